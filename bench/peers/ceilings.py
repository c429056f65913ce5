#!/usr/bin/env python3
"""The card's own ceilings: read and copy bandwidth, cuBLASLt's BF16 and FP8 products by shape, cuDNN's attention.

Random data; 4 GiB for the bandwidth; products over two sets of operands in turn. In the record a product's batch is
its number of rows. FP8 products have one scale a tensor and fast accumulation; the e4m3_out ones round to FP8.
--load both: sustained (30 ms of work behind 15 ms of its own) and, as .../burst, 2 ms behind a pause of 8 ms.
--what attention: causal, BF16, prompts without a cache.

  python3 bench/peers/ceilings.py --what bandwidth
  python3 bench/peers/ceilings.py --what products --shapes llama-3.1-8b --tokens 1024 4096
  python3 bench/peers/ceilings.py --what attention --load both
"""
import sys

import common

BUFFER_BYTES = 4 << 30
PRODUCTS = 10  # a graph
ATTENTION = [("llama-3.1-8b", 1, 4096), ("llama-3.1-8b", 4, 4096), ("llama-3.1-8b", 1, 16384),
             ("llama-3.1-70b", 1, 4096)]  # shape, sequences, tokens of each


def parse():
    parser = common.parser(__doc__)
    parser.add_argument("--what", choices=("bandwidth", "products", "attention", "all"), default="all")
    parser.add_argument("--load", choices=("replays", "both"), default="replays",
                        help="replays behind short pauses, as for decode, or sustained and burst rates (prefill)")
    parser.add_argument("--shapes", type=common.shape_name, nargs="+", default=["llama-3.1-8b", "llama-3.1-70b"],
                        metavar="SHAPE", help=", ".join(common.SHAPES))
    parser.add_argument("--tokens", type=common.at_least(16), nargs="+", default=[4096], metavar="T",
                        help="rows of the products (default 4096)")
    parser.add_argument("--rounds", type=common.at_least(1), default=10, help="samples of each load (default 10)")
    args = parser.parse_args()
    args.load = "replays" if args.load == "replays" else args.rounds
    return args


def bandwidth(record):
    import torch

    shortage = common.shortage(2 * BUFFER_BYTES + (1 << 30))
    if shortage:
        common.lacking(f"bandwidth: {shortage}")
    x = torch.randint(-2**31, 2**31 - 1, (BUFFER_BYTES // 4,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    read = common.time_replays(lambda: torch.max(x), 1, 20)
    record.add("read", "-", 0, 0, "-", "-", read, BUFFER_BYTES)
    copy = common.time_replays(lambda: y.copy_(x), 1, 20)
    record.add("copy", "-", 0, 0, "-", "-", copy, 2 * BUFFER_BYTES)


def timed(load, work, count):
    """Times of one of the `count` equal parts of `work`, by suffix of the op's name."""
    if load == "replays":  # else load is the number of rounds
        return {"": common.time_replays(work, count, 15)}
    loads = common.time_loads(work, load)
    return {suffix: common.Times(*(us / count for us in times)) for suffix, times in loads.items()}


def attention(record, load, name, batch, tokens):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = common.SHAPES[name]

    def heads(count):
        return torch.randn(batch, tokens, count, shape.E, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    q, k, v = heads(shape.H), heads(shape.J), heads(shape.J)
    moved = 2 * 2 * (q.numel() + k.numel())  # q in, out; k, v in
    flops = 2 * batch * tokens * tokens * shape.H * shape.E  # half of the square
    for maker, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                loads = timed(load, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 1)
        except RuntimeError as error:  # this build of PyTorch has it not
            print(f"{maker}_attention {name} B={batch} C={tokens}: left out: {common.first_line(error)}", flush=True)
            continue
        for suffix, times in loads.items():
            record.add(f"{maker}_attention{suffix}", name, batch, tokens, "-", "bf16", times, moved,
                       f"{flops / times.median / 1e9:.3f} PFLOP/s")


def product(record, name, part, n, k, rows, load):
    import torch
    import torch.nn.functional as F

    scale = torch.ones((), device="cuda")
    a, w = ([torch.randn(count, k, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for count in (rows, n))
    a8, w8 = ([t.to(torch.float8_e4m3fn) for t in pair] for pair in (a, w))

    def fp8(i, **out):
        return torch._scaled_mm(a8[i], w8[i].t(), scale, scale, use_fast_accum=True, **out)

    ways = [
        ("bf16", "bf16", lambda i: a[i] @ w[i].t(), 2, 2),
        ("e4m3", "e4m3", lambda i: fp8(i, out_dtype=torch.bfloat16), 1, 2),
        ("e4m3_out", "e4m3", lambda i: fp8(i, out_dtype=torch.float8_e4m3fn, scale_result=scale), 1, 1),
    ]
    if part == "gate_up" and load != "replays":
        @torch.compile(dynamic=True)  # once for all shapes: only element by element
        def swiglu(y):
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up

        ways.append(("bf16_swiglu", "bf16", lambda i: swiglu(a[i] @ w[i].t()), 2, 1))  # half as wide an output
    for way, weights, work, in_bytes, out_bytes in ways:
        moved = (rows * k + n * k) * in_bytes + rows * n * out_bytes
        for suffix, times in timed(load, lambda: [work(i & 1) for i in range(PRODUCTS)], PRODUCTS).items():
            record.add(f"cublaslt_{way}_{part}{suffix}", name, rows, 0, weights, "-", times, moved,
                       f"{2 * rows * n * k / times.median / 1e9:.3f} PFLOP/s")


def main():
    args = parse()
    record = common.Record(args.csv, args.commit)
    torch = common.need_card()
    if args.what in ("bandwidth", "all"):
        bandwidth(record)
        torch.cuda.empty_cache()
    if args.what in ("attention", "all"):
        for point in ATTENTION:
            attention(record, args.load, *point)
    if args.what in ("bandwidth", "attention"):
        return
    if torch.cuda.get_device_capability() < (8, 9):
        common.lacking("products: the card has no FP8 products")
    try:
        for rows in args.tokens:
            for name in args.shapes:
                for part, (n, k) in common.SHAPES[name].products().items():
                    product(record, name, part, n, k, rows, args.load)
    except torch.cuda.OutOfMemoryError as error:
        sys.exit(f"ceilings.py: {common.first_line(error)}")


if __name__ == "__main__":
    main()
