#!/usr/bin/env python3
"""Trains models/bard, the small Llama that ships with the tests, from one plain text.

    python3 scripts/train_bard.py --text tinyshakespeare.txt --out models/bard
    python3 scripts/train_bard.py --out models/bard --golden tests/bard_text.txt    (expected.json of a trained model)

The text has about a million bytes, so everything here is about not memorising it: dropout, weight decay, windows at
random offsets, words split into other tokens than the tokenizer's own (BPE dropout, fading out over the run), averaged
weights, and the checkpoint with the lowest loss on the held-out last tenth of the text, in the BF16 that is saved.
The first command needs torch, tokenizers, numpy and safetensors; only the second one needs transformers.
"""
import argparse
import copy
import json
import math
import pathlib
import platform
import random
import re
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

BOS = "<|endoftext|>"
PROMPTS = ["ROMEO:\n", "KING RICHARD III:\nNow", "First Citizen:\nWe are", "GLOUCESTER:\n"]


# ---------------------------------------------------------------------------------------------------------- tokens

def train_tokenizer(text, vocab_size):
    """Byte-level BPE that puts BOS first. It sees the training part only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BOS], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    return tokenizer


def token_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def split_word(word, rank, skip, rng):
    """BPE in which each possible merge is overlooked with probability `skip`; 0 is the tokenizer's own split."""
    parts = list(word)
    while True:
        pairs = [(rank[pair], i) for i, pair in enumerate(zip(parts, parts[1:]))
                 if pair in rank and (skip == 0 or rng.random() >= skip)]
        if not pairs:
            return parts
        i = min(pairs)[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]


class WordStream:
    """The training text as words, each with its own split (variant 0) and `variants` random ones."""

    def __init__(self, tokenizer, text, variants, skip, seed):
        rng = random.Random(seed)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        rank = {tuple(pair): i for i, pair in enumerate(merges)}
        vocab = tokenizer.get_vocab()
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        number = {word: i for i, word in enumerate(dict.fromkeys(words))}
        splits = [[vocab[part] for part in split_word(word, rank, skip if v else 0, rng)]
                  for word in number for v in range(1 + variants)]
        self.variants = variants
        self.words = np.array([number[word] for word in words])
        self.flat = np.concatenate([np.array(split) for split in splits])
        self.length = np.array([len(split) for split in splits])
        self.start = np.cumsum(self.length) - self.length

    def ids(self, share, rng):
        """The text's ids, with `share` of its words in a random split."""
        variant = rng.integers(1, self.variants + 1, len(self.words)) * (rng.random(len(self.words)) < share)
        split = self.words * (1 + self.variants) + variant
        length = self.length[split]
        first = np.cumsum(length) - length
        return self.flat[np.repeat(self.start[split] - first, length) + np.arange(length.sum())]


# ----------------------------------------------------------------------------------------------------------- model

class Norm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config["hidden_size"]))
        self.eps = config["rms_norm_eps"]

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.head = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(width, self.heads * self.head, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head, width, bias=False)

    def forward(self, x, rope, dropout):
        q, k, v = (proj(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (rotate(k, rope), v))
        out = F.scaled_dot_product_attention(rotate(q, rope), k, v, is_causal=True, dropout_p=dropout)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x, rope):
    """Rotary embedding in the checkpoint's convention: channel i is paired with channel i + head / 2."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = (t[:x.shape[2]] for t in rope)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(config), Norm(config)
        self.self_attn, self.mlp = Attention(config), Mlp(config)

    def forward(self, x, rope, dropout):
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), rope, dropout), dropout)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout)


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(config)


class Llama(nn.Module):
    """Parameter names are those of the checkpoint; the head is the embedding."""

    def __init__(self, config, dropout=0.0):
        super().__init__()
        self.model, self.dropout = Body(config), dropout
        for name, p in self.named_parameters():
            if p.dim() == 2:  # what adds to the residual starts smaller, the more layers the smaller
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config["num_hidden_layers"]) if out else 0.02)
        half = config["head_dim"] // 2
        frequency = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config["max_position_embeddings"], dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, ids):
        dropout = self.dropout if self.training else 0.0
        x = F.dropout(self.model.embed_tokens(ids), dropout)
        for layer in self.model.layers:
            x = layer(x, (self.cos, self.sin), dropout)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


# -------------------------------------------------------------------------------------------------------- measuring

def windows(ids, context, bos):
    """Non-overlapping windows: BOS, then context - 1 ids of the text (fewer in the last); each id is scored once."""
    body = context - 1
    return [torch.tensor([[bos] + list(ids[i:i + body])]) for i in range(0, len(ids), body)]


@torch.no_grad()
def total_nll(logits_of, ids, context, bos, device):
    """Sum over the text's tokens of -ln p(token | the tokens before it in its window)."""
    parts = windows(ids, context, bos)
    full = [w for w in parts if w.shape[1] == context]
    batches = [torch.cat(full[i:i + 64]) for i in range(0, len(full), 64)] + parts[len(full):]
    total = 0.0
    for batch in (b.to(device) for b in batches):
        logits = logits_of(batch[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").double().sum().item()
    return total


def report(name, nll, tokens, size):
    print(f"{name}: perplexity {math.exp(nll / tokens):.3f} a token, {nll / math.log(2) / size:.4f} bits a byte "
          f"(nll {nll:.2f}, {tokens} tokens, {size} bytes)", flush=True)


@torch.no_grad()
def sample(model, tokenizer, prompt, count, temperature, seed, device):
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    for _ in range(count):
        logits = model(torch.tensor([ids], device=device))[0, -1].double().cpu()
        ids.append(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator).item())
    return tokenizer.decode(ids)


# --------------------------------------------------------------------------------------------------------- training

def make_config(args, bos):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
            "vocab_size": args.vocab, "hidden_size": args.hidden, "intermediate_size": args.intermediate,
            "num_hidden_layers": args.layers, "num_attention_heads": args.hidden // 64,
            "num_key_value_heads": args.kv_heads, "head_dim": 64, "hidden_act": "silu",
            "max_position_embeddings": args.context, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
            "bos_token_id": bos, "eos_token_id": bos}


def learning_rate(step, args):
    warmup = 200
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model, args, device):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": args.weight_decay},
                              {"params": gains, "weight_decay": 0.0}],
                             lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")


def batch_of(stream, context, args, bos, generator):
    """BOS and text from a random offset; half the steps train short windows, because most uses are short."""
    count = args.batch_tokens // context
    start = torch.randint(0, len(stream) - context, (count, 1), generator=generator, device=stream.device)
    target = stream[start + torch.arange(context, device=stream.device)]
    return F.pad(target[:, :-1], (1, 0), value=bos), target


def train(args, model, words, held_ids, bos, device):
    """Returns the best averaged weights in BF16 and how they came about."""
    generator = torch.Generator(device=device).manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    optimizer = make_optimizer(model, args, device)
    params, judged = list(model.parameters()), copy.deepcopy(model).eval()
    average = [p.detach().clone() for p in params]
    best, best_step, best_state, began, step = math.inf, 0, None, time.time(), 0
    for step in range(args.steps):
        progress = step / args.steps
        if step % args.epoch == 0:
            stream = torch.from_numpy(words.ids(args.resplit * (1 - progress), rng)).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        context = args.context if step % 2 else min(256, args.context)
        source, target = batch_of(stream, context, args, bos, generator)
        loss = F.cross_entropy(model(source).flatten(0, 1), target.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        torch._foreach_lerp_(average, params, max(1 - args.average, 1 / (step + 2)))
        if (step + 1) % 100 and step + 1 != args.steps:
            continue
        with torch.no_grad():
            for p, a in zip(judged.parameters(), average):
                p.copy_(a.bfloat16())
        held = total_nll(judged, held_ids, 256, bos, device) / len(held_ids)
        if held < best:
            best, best_step = held, step + 1
            best_state = {name: p.detach().bfloat16().cpu().clone() for name, p in judged.named_parameters()}
        if (step + 1) % 500 == 0:
            print(f"step {step + 1}: train {loss.item():.4f}, held out {held:.4f}, {time.time() - began:.0f} s",
                  flush=True)
        if time.time() - began > 60 * args.minutes or step + 1 - best_step >= 100 * args.patience:
            break
    print(f"stopped after {step + 1} steps and {time.time() - began:.1f} s; best at step {best_step}")
    return best_state


def write_json(path, value):
    text = json.dumps(value, indent=2)
    text = re.sub(r"\[[\d,\s]+\]", lambda ids: " ".join(ids[0].split()), text)  # lists of ids on one line
    path.write_text(text + "\n")


def save(out, config, tokenizer, state):
    out.mkdir(parents=True, exist_ok=True)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    bos = config["bos_token_id"]
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": bos, "do_sample": True,
                                                "temperature": 0.8})
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": BOS, "add_bos_token": True,
        "clean_up_tokenization_spaces": False, "model_max_length": config["max_position_embeddings"]})


def run_training(args, device):
    text = pathlib.Path(args.text).read_text(encoding="utf-8")
    cut = int(0.9 * len(text))
    train_text, held_text = text[:cut], text[cut:]
    tokenizer = train_tokenizer(train_text, args.vocab)
    bos = tokenizer.token_to_id(BOS)
    words = WordStream(tokenizer, train_text, args.variants, args.skip, args.seed)
    own = words.ids(0, np.random.default_rng(0))
    assert own.tolist() == token_ids(tokenizer, train_text), "our split of the text is not the tokenizer's"
    held_ids = token_ids(tokenizer, held_text)
    args.epoch = max(1, len(own) // args.batch_tokens)

    torch.manual_seed(args.seed)
    config = make_config(args, bos)
    model = Llama(config, args.dropout).to(device).train()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(own)} training tokens, "
          f"{len(held_ids)} held out, {args.epoch} steps an epoch, "
          f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}", flush=True)
    state = train(args, model, words, held_ids, bos, device)

    torch.set_float32_matmul_precision("highest")
    model = Llama(config).to(device).eval()
    model.load_state_dict({name: p.float() for name, p in state.items()})
    for context in sorted({256, args.context}):
        nll = total_nll(model, held_ids, context, bos, device)
        report(f"held out, windows of {context}, BF16 weights", nll, len(held_ids), len(held_text.encode()))
    if args.out:
        save(pathlib.Path(args.out), config, tokenizer, state)
        print(sample(model, tokenizer, PROMPTS[0], 200, 0.8, args.seed, device))


# ---------------------------------------------------------------------------------------------------- golden values

@torch.no_grad()
def greedy(model, ids, count):
    """The whole sequence anew for each token, so that no cache is trusted. Also the smallest lead of a best token."""
    ids, gap = list(ids), math.inf
    for _ in range(count):
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        gap = min(gap, (best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return ids, gap


def run_golden(args):
    """What transformers makes of the saved folder, in F32 on the CPU."""
    import transformers
    out = pathlib.Path(args.out)
    model = transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    bos = tokenizer.token_to_id(BOS)

    text = pathlib.Path(args.golden).read_text(encoding="utf-8")
    ids = token_ids(tokenizer, text)
    nll = total_nll(lambda x: model(x).logits, ids, 256, bos, "cpu")
    report("golden text", nll, len(ids), len(text.encode()))
    ours = Llama(json.loads((out / "config.json").read_text())).eval()
    ours.load_state_dict({name: p.float() for name, p in load_file(out / "model.safetensors").items()})
    ours_nll, exact_nll = (total_nll(m, ids, 256, bos, "cpu") for m in (ours, copy.deepcopy(ours).double()))
    print(f"golden text, this script's model: nll {ours_nll:.4f} in F32, {exact_nll:.4f} in F64")
    assert abs(nll - exact_nll) < 1e-5 * exact_nll, "this script and transformers compute different models"
    greedies = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt).ids
        assert prompt_ids == theirs(prompt)["input_ids"], "transformers splits the prompt differently"
        all_ids, gap = greedy(model, prompt_ids, 64)
        new = all_ids[len(prompt_ids):]
        greedies.append({"prompt": prompt, "prompt_ids": prompt_ids, "ids": new, "text": tokenizer.decode(new),
                         "smallest_gap": round(gap, 5)})
        print(f"greedy gap {gap:.4f}: {prompt!r} {tokenizer.decode(new)!r}")
    write_json(out / "expected.json", {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, F32 on the CPU "
                     f"({platform.machine()}), weights read from the BF16 file, no KV cache",
        "nll": {"text": "tests/bard_text.txt", "context": 256, "tokens": len(ids), "sum": round(nll, 4),
                "sum_f64": round(exact_nll, 4),
                "windows": "non-overlapping: BOS, then the next 255 tokens of the text (fewer in the last window); "
                           "every token of the text is scored exactly once, BOS never; sum of -ln p"},
        "greedy": greedies})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="plain text to train on; its last tenth is held out")
    parser.add_argument("--out", help="folder of the model; without it nothing is saved")
    parser.add_argument("--golden", help="text to score for OUT/expected.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8, help="training stops after so long, whatever the step")
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--patience", type=int, default=10, help="stop after so many hundred steps without gain")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=640)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--weight-decay", type=float, default=2.0)
    parser.add_argument("--average", type=float, default=0.998, help="decay of the averaged weights")
    parser.add_argument("--resplit", type=float, default=0.5, help="share of words in a random split at the start")
    parser.add_argument("--skip", type=float, default=0.2, help="chance that a merge is overlooked in a random split")
    parser.add_argument("--variants", type=int, default=8, help="random splits of each word")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    if args.text:
        run_training(args, device)
    if args.golden:
        run_golden(args)


if __name__ == "__main__":
    main()
