#!/usr/bin/env python3
"""The card's own ceilings: read and copy bandwidth, and the rate of cuBLASLt's BF16 and FP8 products by shape.

Random data; 4 GiB for the bandwidth; products over two sets of operands in turn. In the record a product's batch is
its number of rows. FP8 products have one scale a tensor and fast accumulation; the e4m3_out ones round to FP8.

  python3 bench/peers/ceilings.py --what bandwidth
  python3 bench/peers/ceilings.py --what products --shapes llama-3.1-8b --tokens 1024 4096
"""
import sys

import common

BUFFER_BYTES = 4 << 30
PRODUCTS = 10  # a graph


def parse():
    parser = common.parser(__doc__)
    parser.add_argument("--what", choices=("bandwidth", "products", "all"), default="all")
    parser.add_argument("--shapes", type=common.shape_name, nargs="+", default=["llama-3.1-8b", "llama-3.1-70b"],
                        metavar="SHAPE", help=", ".join(common.SHAPES))
    parser.add_argument("--tokens", type=common.at_least(16), nargs="+", default=[4096], metavar="T",
                        help="rows of the products (default 4096)")
    return parser.parse_args()


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


def product(record, name, part, n, k, rows):
    import torch

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
    for way, weights, work, in_bytes, out_bytes in ways:
        times = common.time_replays(lambda: [work(i & 1) for i in range(PRODUCTS)], PRODUCTS, 15)
        moved = (rows * k + n * k) * in_bytes + rows * n * out_bytes
        record.add(f"cublaslt_{way}_{part}", name, rows, 0, weights, "-", times, moved,
                   f"{2 * rows * n * k / times.median / 1e9:.3f} PFLOP/s")


def main():
    args = parse()
    record = common.Record(args.csv, args.commit)
    torch = common.need_card()
    if args.what != "products":
        bandwidth(record)
        torch.cuda.empty_cache()
    if args.what == "bandwidth":
        return
    if torch.cuda.get_device_capability() < (8, 9):
        common.lacking("products: the card has no FP8 products")
    try:
        for rows in args.tokens:
            for name in args.shapes:
                for part, (n, k) in common.SHAPES[name].products().items():
                    product(record, name, part, n, k, rows)
    except torch.cuda.OutOfMemoryError as error:
        sys.exit(f"ceilings.py: {common.first_line(error)}")


if __name__ == "__main__":
    main()
