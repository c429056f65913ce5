#!/usr/bin/env python3
"""What Hugging Face's transformers makes of the architectures whose block is Llama's, against what this project makes of them.

    architectures.py --write     makes tests/architecture_vectors.json anew: tiny random models, losses and logits of a prompt, greedy tokens
    architectures.py             checks that the file still says what transformers does

Every model also goes through an implementation in double precision below, which must agree with transformers; where transformers
ignores a key (partial_rotary_factor of these architectures) it is the only one. tests/architectures_test.cpp compares this project
with the file. Needs the PyPI packages transformers, torch and numpy.
"""
import argparse
import json
import pathlib
import random
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "architecture_vectors.json"
PROMPT = [256, *(i * 37 % 256 for i in range(100))]  # BOS, then more than a page of 64
GREEDY = 6

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
OUTLIERS = {"model.layers.0.self_attn.k_proj.bias": [[5, 80.0], [30, -50.0]], "model.layers.1.self_attn.k_proj.bias": [[7, -60.0]]}


def case(name, build=None, config=None, drop=(), biases=(), head_norm=False, lm_head="yes", values=None):
    """build: sizes; config: merged into config.json behind them; biases: q, k and v ("qkv"), "o", "mlp"; values: tensor to [index, value]."""
    return {"name": name, "build": build or {}, "config": config or {}, "drop": list(drop), "biases": list(biases),
            "head_norm": head_norm, "lm_head": lm_head, "values": values or {}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

CASES = [
    case("llama"),
    case("llama, llama3", config={"rope_scaling": LLAMA3}),
    case("llama, linear", config={"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    case("llama, yarn", config={"rope_scaling": {**YARN, "original_max_position_embeddings": 64}}),
    case("llama, yarn, its factor given", config={"rope_scaling": {**YARN, "original_max_position_embeddings": 64, "attention_factor": 1.0}}),
    case("llama, KV heads not given", build={"num_key_value_heads": 4}, drop=["num_key_value_heads"]),
    case("llama, every bias", config={"attention_bias": True, "mlp_bias": True}, biases=["qkv", "o", "mlp"]),
    case("llama, half rotary", config={"partial_rotary_factor": 0.5}),
    case("llama, quarter rotary, yarn", build={"head_dim": 32},
         config={"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25, **YARN}}),
    case("mistral", build={"head_dim": 32}, config=MISTRAL),
    case("mistral, window as long as the context, KV heads not given", build={"num_attention_heads": 8, "num_key_value_heads": 8},
         config=MISTRAL | {"sliding_window": 256}, drop=["num_key_value_heads"]),
    case("qwen2", config=QWEN2 | {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}, biases=["qkv"]),
    case("qwen2, tied, window of no layer", config=QWEN2 | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 32,
                                                            "max_window_layers": 2}, biases=["qkv"], lm_head="no"),
    case("qwen2, outliers in keys", config=QWEN2, biases=["qkv"], values=OUTLIERS),
    case("qwen2, half rotary", config=QWEN2 | {"partial_rotary_factor": 0.5}, biases=["qkv"]),
    case("qwen3", build={"head_dim": 32}, config=QWEN3, head_norm=True),
    case("qwen3, biases, tied", build={"num_key_value_heads": 1}, config=QWEN3 | {"head_dim": 16, "attention_bias": True,
                                                                                 "tie_word_embeddings": True},
         biases=["qkv", "o"], head_norm=True, lm_head="no"),
    case("qwen3, head_dim not given, yarn", build={"head_dim": 128}, config=QWEN3 | {"rope_scaling": {**YARN, "factor": 8.0}},
         drop=["head_dim"], head_norm=True),
]


def make(case):
    """config.json and tensors; the order of the draws is that of tests/support/fixture_model.h."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 259, "tie_word_embeddings": False, "bos_token_id": 256,
              "eos_token_id": 257, "torch_dtype": "float32"} | case["build"]
    D, F, H, J = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    E = config.get("head_dim", D // H)
    source, tensors = random.Random(7), {}

    def draw(name, *shape, sigma=None, base=0.0):
        sigma = shape[-1] ** -0.5 if sigma is None else sigma
        values = np.array([source.gauss(0, 1) * sigma for _ in range(int(np.prod(shape)))]).astype(np.float32)
        tensors[name] = (values + np.float32(base)).reshape(shape)

    draw("model.embed_tokens.weight", config["vocab_size"], D, sigma=1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, outputs, inputs, kind in (("self_attn.q_proj", H * E, D, "qkv"), ("self_attn.k_proj", J * E, D, "qkv"),
                                            ("self_attn.v_proj", J * E, D, "qkv"), ("self_attn.o_proj", D, H * E, "o"),
                                            ("mlp.gate_proj", F, D, "mlp"), ("mlp.up_proj", F, D, "mlp"), ("mlp.down_proj", D, F, "mlp")):
            draw(prefix + name + ".weight", outputs, inputs)
            if kind in case["biases"]:
                draw(prefix + name + ".bias", outputs, sigma=0.5)
        for name in ("q_norm", "k_norm") if case["head_norm"] else ():
            draw(f"{prefix}self_attn.{name}.weight", E, sigma=0.25, base=1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(D, np.float32)
    tensors["model.norm.weight"] = np.ones(D, np.float32)
    if case["lm_head"] == "yes":
        draw("lm_head.weight", config["vocab_size"], D)
    for name, changes in case["values"].items():
        for index, value in changes:
            tensors[name].reshape(-1)[index] = value
    config |= case["config"]
    for key in case["drop"]:
        del config[key]
    return config, tensors, E


def rotary(config, E):
    """Channels turned, frequencies, attention factor."""
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    turned = int(E * block.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    theta = block.get("rope_theta", config["rope_theta"])
    if block.get("rope_type", "default") == "default":
        return turned, theta ** (-np.arange(0, turned, 2) / turned), 1.0
    names = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
    theirs = getattr(transformers, names[config["model_type"]]).from_dict(json.loads(json.dumps(config)))
    frequencies, factor = ROPE_INIT_FUNCTIONS[block["rope_type"]](theirs, "cpu")
    return turned, frequencies.double().numpy(), factor


def oracle(config, tensors, E, ids):
    """Logits of every position, in double precision, from the architectures' definitions."""
    w = {name: values.astype(np.float64) for name, values in tensors.items()}
    H = config["num_attention_heads"]
    R, frequencies, factor = rotary(config, E)
    angles = np.arange(len(ids))[:, None] * frequencies
    cos, sin = factor * np.cos(angles)[:, None], factor * np.sin(angles)[:, None]

    def project(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def norm(x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * gain

    def turn(heads):
        a, b, rest = heads[..., : R // 2], heads[..., R // 2 : R], heads[..., R:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        y = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (project(y, f"{p}self_attn.{part}_proj").reshape(len(ids), -1, E) for part in "qkv")
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(q, w[p + "self_attn.q_norm.weight"]), norm(k, w[p + "self_attn.k_norm.weight"])
        q, k = turn(q), turn(k)
        k, v = (np.repeat(part, H // part.shape[1], 1) for part in (k, v))
        scores = np.einsum("the,she->hts", q, k) / np.sqrt(E)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + project(np.einsum("hts,she->the", weights, v).reshape(len(ids), -1), p + "self_attn.o_proj")
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = project(y, p + "mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(y, p + "mlp.up_proj"), p + "mlp.down_proj")
    return norm(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def transformers_logits(config, tensors, ids):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        save_file({name: torch.tensor(values) for name, values in tensors.items()}, folder + "/model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        assert type(model).__name__ == config["architectures"][0]
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].double().numpy()


def answer(case):
    config, tensors, E = make(case)
    logits = oracle(config, tensors, E, PROMPT)
    distance = None
    if "partial_rotary_factor" not in json.dumps(config):
        distance = float(np.abs(transformers_logits(config, tensors, PROMPT) - logits).max())
    ids = list(PROMPT)
    for _ in range(GREEDY):
        ids.append(int(oracle(config, tensors, E, ids)[-1].argmax()))
    losses = np.log(np.exp(logits[:-1]).sum(-1)) - logits[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    return case | {"losses": [round(float(loss), 6) for loss in losses], "logits": [round(float(x), 6) for x in logits[-1]],
                   "greedy": ids[len(PROMPT):]}, distance


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    answers, far = [], []
    for each in CASES:
        found, distance = answer(each)
        answers.append(found)
        print(f"{each['name']}: " + ("not a key of transformers" if distance is None else f"{distance:.1e} from transformers"))
        if distance is not None and distance > 5e-5:
            far.append(each["name"])
    if arguments.write and not far:
        lines = ",\n".join(json.dumps(each) for each in answers)
        VECTORS.write_text(f'{{"transformers": "{transformers.__version__}", "prompt": {json.dumps(PROMPT)}, "cases": [\n{lines}\n]}}\n')
        print(f"{len(answers)} models written to {VECTORS.name}")
        return
    stored = [] if arguments.write else json.loads(VECTORS.read_text())["cases"]
    wrong = [each["name"] for each, other in zip(answers, stored)
             if {**each, "losses": 0, "logits": 0} != {**other, "losses": 0, "logits": 0}
             or max(np.abs(np.subtract(each[key], other[key])).max() for key in ("losses", "logits")) > 2e-6]
    print(f"transformers {transformers.__version__}: {len(answers)} models; far from transformers: {far}; other than {VECTORS.name}: {wrong}")
    sys.exit(1 if far or wrong or len(answers) != len(stored) else 0)


if __name__ == "__main__":
    main()
