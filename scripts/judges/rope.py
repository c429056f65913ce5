#!/usr/bin/env python3
"""What Hugging Face's transformers makes of rotary configurations, against what this project makes of them.

    rope.py --write     makes tests/rope_vectors.json anew: configurations with the frequencies and attention factors of transformers
    rope.py             checks that the file still says what transformers does

tests/config_test.cpp compares this project with the file. Needs the PyPI packages transformers and torch.
"""
import argparse
import json
import pathlib
import sys

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "rope_vectors.json"

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def old(rope_type, key="rope_type", **block):
    """The layout before transformers 5: rope_theta beside rope_scaling."""
    return {"rope_theta": 500000.0, "rope_scaling": {key: rope_type, **block}}


def new(rope_type, **block):
    return {"rope_parameters": {"rope_theta": 500000.0, "rope_type": rope_type, **block}}


def configurations():
    yield "default", {"rope_theta": 10000.0}
    yield "no theta", {}
    yield "empty blocks", {"rope_scaling": {}, "rope_parameters": {"rope_theta": 1e6}}
    yield "both blocks", {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0},
                          "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}
    for layout in (old, new):
        name = layout.__name__
        yield f"{name} default", layout("default")
        yield f"{name} linear", layout("linear", factor=2.5)
        yield f"{name} dynamic", layout("dynamic", factor=4.0)
        yield f"{name} llama3", layout("llama3", **LLAMA3)
        yield f"{name} llama3, factor 32", layout("llama3", **LLAMA3 | {"factor": 32.0})
        yield f"{name} yarn", layout("yarn", **YARN)
        yield f"{name} yarn, betas", layout("yarn", **YARN, beta_fast=16, beta_slow=2)
        yield f"{name} yarn, betas of 0 and null", layout("yarn", **YARN, beta_fast=0, beta_slow=None)
        yield f"{name} yarn, not truncated", layout("yarn", **YARN, truncate=False)
        yield f"{name} yarn, truncate null", layout("yarn", **YARN, truncate=None)
        yield f"{name} yarn, attention factor", layout("yarn", **YARN, attention_factor=1.25)
        yield f"{name} yarn, mscales", layout("yarn", **YARN, mscale=0.707, mscale_all_dim=1.0)
        yield f"{name} yarn, one mscale", layout("yarn", **YARN, mscale=0.707)
        yield f"{name} yarn, mscale 0", layout("yarn", **YARN, mscale=0.707, mscale_all_dim=0)
        yield f"{name} yarn, no length", layout("yarn", factor=4.0)
        yield f"{name} yarn, factor null", layout("yarn", factor=None, original_max_position_embeddings=4096)
        yield f"{name} yarn, factor below 1", layout("yarn", factor=0.5, original_max_position_embeddings=32768)
        yield f"{name} yarn, length beside", {**layout("yarn", **YARN), "original_max_position_embeddings": 16384}
        yield f"{name} yarn, short length", layout("yarn", factor=40.0, original_max_position_embeddings=8)
        yield f"{name} yarn, long length", layout("yarn", factor=2.0, original_max_position_embeddings=1 << 26)
    yield "type llama3", old("llama3", "type", **LLAMA3)
    yield "type yarn", old("yarn", "type", **YARN)
    yield "llama3, length beside", {**old("llama3", **LLAMA3), "original_max_position_embeddings": 4096}
    yield "yarn, theta 10000", {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **YARN}}


def cases():
    for name, rope in configurations():
        for head_dim in (64,) if "," in name else (64, 128):
            config = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim,
                      "max_position_embeddings": 131072, **rope}
            embedding = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(json.loads(json.dumps(config))))
            # A pass up to the limit: what "dynamic" does to its frequencies, it does here.
            embedding(torch.zeros(1), torch.tensor([[config["max_position_embeddings"] - 1]]))
            yield {"name": f"{name}, heads of {head_dim}", "config": config,
                   "inverse_frequencies": [float(f"{f:.9g}") for f in embedding.inv_freq.tolist()],
                   "attention_factor": float(embedding.attention_scaling)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = list(cases())
    if arguments.write:
        lines = ",\n".join(json.dumps(case) for case in found)
        VECTORS.write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}\n')
        print(f"{len(found)} configurations written to {VECTORS.name}")
        return
    stored = json.loads(VECTORS.read_text())["cases"]
    wrong = [case["name"] for case, other in zip(found, stored) if case != other]
    print(f"transformers {transformers.__version__}: {len(found)} configurations, {len(wrong)} differ from {VECTORS.name}", *wrong[:9])
    sys.exit(1 if wrong or len(found) != len(stored) else 0)


if __name__ == "__main__":
    main()
