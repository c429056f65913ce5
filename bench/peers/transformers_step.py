#!/usr/bin/env python3
"""Times one decode step of a Llama in Hugging Face transformers, compiled: random BF16 weights, static cache, greedy.

Two rows: transformers_step is what a loop that looks at every token waits for; transformers_step_queued lets the host
run ahead by 20 steps, which leaves what the card itself needs. A step ends with the next token on the card.

  python3 bench/peers/transformers_step.py --shape llama-3.1-8b --batch 1 --context 1024
"""
import sys
import time

import common

WARM, QUEUE, ROUNDS = 6, 20, 3


def parse():
    parser = common.parser(__doc__)
    parser.add_argument("--shape", type=common.shape_name, default="llama-3.1-8b", help=", ".join(common.SHAPES))
    parser.add_argument("--batch", type=common.at_least(1), default=1)
    parser.add_argument("--context", type=common.at_least(1), default=1024, help="tokens before the first step")
    parser.add_argument("--max-len", type=common.at_least(1), default=2048,
                        help="of the static cache, all of which every step reads (default 2048)")
    parser.add_argument("--steps", type=common.at_least(1), default=40)
    parser.add_argument("--mode", choices=("reduce-overhead", "max-autotune", "default"), default="reduce-overhead",
                        help="torch.compile's; the first two capture CUDA graphs")
    args = parser.parse_args()
    room = args.context + WARM + args.steps + QUEUE * ROUNDS
    if args.max_len < room:
        parser.error(f"--max-len {args.max_len}: context and steps take {room} tokens")
    return args


def model_config(shape):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.D, intermediate_size=shape.F, num_hidden_layers=shape.L, num_attention_heads=shape.H,
        num_key_value_heads=shape.J, head_dim=shape.E, vocab_size=shape.V, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})


def weight_bytes(shape):
    """What a step reads; of the embedding it is one row a sequence, which is left out."""
    return 2 * (shape.L * shape.layer_weights() + shape.V * shape.D)


def make_step(shape, max_len, device):
    import torch
    from transformers import LlamaForCausalLM, StaticCache

    config = model_config(shape)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    cache = StaticCache(config=config, max_cache_len=max_len)

    def step(tokens):
        return model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)

    return step


def time_waiting(step, token, count):
    import torch

    us = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        token = step(token)
        torch.cuda.synchronize()
        us.append((time.perf_counter() - begin) * 1e6)
    return common.percentiles(us), token


def time_queued(step, token):
    import torch

    us = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(QUEUE):
            token = step(token)
        torch.cuda.synchronize()
        us.append((time.perf_counter() - begin) * 1e6 / QUEUE)
    return common.percentiles(us)


def measure(args, record):
    import torch
    from torch._dynamo.utils import counters

    begin = time.monotonic()
    shape = common.SHAPES[args.shape]
    plain = make_step(shape, args.max_len, "cuda")
    token = plain(torch.randint(0, shape.V, (args.batch, args.context), device="cuda"))
    fast = torch.compile(plain, mode=args.mode, fullgraph=True)

    def step(last):
        torch.compiler.cudagraph_mark_step_begin()
        return fast(last).clone()  # the graph's own output is overwritten by the next step

    for _ in range(WARM):
        token = step(token)
    torch.cuda.synchronize()
    ready = time.monotonic()
    waiting, token = time_waiting(step, token, args.steps)
    queued = time_queued(step, token)
    skips = counters["inductor"]["cudagraph_skips"]
    note = f"mode {args.mode}, {f'{skips} graphs were NOT captured, ' if skips else ''}ready in {ready - begin:.1f} s"
    moved = weight_bytes(shape) + shape.L * shape.kv_bytes(args.batch, args.context)
    for op, times in (("transformers_step", waiting), ("transformers_step_queued", queued)):
        record.add(op, args.shape, args.batch, args.context, "bf16", "bf16", times, moved, note)


def main():
    args = parse()
    record = common.Record(args.csv, args.commit)
    torch = common.need_card()
    try:
        import transformers  # noqa: F401  (whether it is here at all)
    except (ImportError, OSError) as error:
        common.lacking(f"transformers cannot be imported ({common.first_line(error)})")
    shape = common.SHAPES[args.shape]
    kv = shape.L * shape.kv_bytes(args.batch, args.max_len)
    # The embedding, and 4 GiB for the context of CUDA, logits and activations.
    shortage = common.shortage(weight_bytes(shape) + 2 * shape.V * shape.D + kv + (4 << 30))
    if shortage:
        common.lacking(f"transformers_step {args.shape}: {shortage}")
    try:
        with torch.no_grad():
            measure(args, record)
    except Exception as error:
        sys.exit(f"transformers_step {args.shape} B={args.batch} C={args.context}: failed: {common.first_line(error)}")


if __name__ == "__main__":
    main()
