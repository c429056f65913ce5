#!/usr/bin/env python3
"""Prints bench/results.csv as the tables of docs/PERF.md: ours, peers, ratio, share of the read ceiling.

Only rows of one run are set side by side: the same commit, card and date. Without --commit and --date that is the last
run in the file that holds rows of ours. Of a point that was measured more than once in it the median counts. Our block
is a layer of the step, by difference (`fut bench step`), where that was measured; else a layer's operations in a row.

  python3 bench/report.py
  python3 bench/report.py bench/results.csv --commit f081203
"""
import argparse
import csv
import pathlib
import re
import statistics
import sys

COLUMNS = "commit card date clock_mhz op shape batch context weights kv us bytes".split()
PEERS = {"torch_bf16_block": "torch BF16", "torch_fp8_block": "torch FP8", "torch_int4_block": "torch INT4"}
STEP_PEERS = {"transformers_step": "transformers", "transformers_step_queued": "transformers, queued"}
PARTS = ("block", "layer", "step")  # of ours; every other op of ours is a part of them
# What issue 3 accepts, in microseconds; a table of bounds, not of results.
ACCEPTED = {
    ("block", "llama-3.1-8b", 1, 2048): 40, ("block", "llama-3.1-8b", 8, 2048): 48,
    ("block", "llama-3.1-8b", 32, 2048): 70, ("block", "llama-3.1-8b", 1, 16384): 45,
    ("block", "llama-3.1-8b", 32, 8192): 140, ("block", "llama-3.1-70b", 1, 2048): 122,
    ("block", "llama-3.1-70b", 32, 2048): 165, ("step", "llama-3.1-8b", 1, 1024): 1250,
    ("step", "llama-3.1-70b", 1, 2048): 9800, ("step", "llama-3.2-1b", 1, 1024): 320,
    ("step", "llama-3.2-1b", 1, 2048): 320,
}
NONE = "–"


def fail(text):
    sys.exit(f"report.py: {text}")


def read(path):
    """Rows with numbers as numbers; `ceiling` is the bytes a second that the file's header names."""
    try:
        lines = list(csv.reader(pathlib.Path(path).read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: cannot be read ({error})")
    header = lines[0] if lines else []
    share = [re.fullmatch(r"share_of_([\d.]+)TB/s", name) for name in header]
    if not set(COLUMNS) <= set(header) or not any(share):
        fail(f"{path}: line 1 should name the columns {', '.join(COLUMNS)}, share_of_...TB/s")
    ceiling = float(next(s for s in share if s)[1]) * 1e12
    rows = []
    for number, fields in enumerate(lines[1:], 2):
        if not fields:
            continue
        if len(fields) != len(header):
            fail(f"{path}: line {number} has {len(fields)} fields, line 1 {len(header)}")
        row = dict(zip(header, fields))
        try:
            row.update(batch=int(row["batch"]), context=int(row["context"]), us=float(row["us"]),
                       bytes=int(row["bytes"]), ceiling=ceiling)
        except ValueError as error:
            fail(f"{path}: line {number}: {error}")
        if not 0 < row["us"] < float("inf"):
            fail(f"{path}: line {number}: us is {row['us']}")
        rows.append(row)
    return rows


def is_peer(row):
    makers = ("torch_", "transformers_", "cublaslt_", "cudnn_", "flash_")
    return row["op"].startswith(makers) or row["op"] in ("read", "copy")


def choose_run(rows, commit, date):
    rows = [r for r in rows if (not commit or r["commit"] == commit) and (not date or r["date"] == date)]
    if not rows:
        fail(f"no rows of commit {commit or 'any'}, date {date or 'any'}")
    last = ([r for r in rows if not is_peer(r)] or rows)[-1]
    key = [last[name] for name in ("commit", "card", "date")]
    return key, [r for r in rows if [r[name] for name in ("commit", "card", "date")] == key]


class Numbers:
    """(op, shape, batch, context, weights, kv) -> the median of its rows."""

    def __init__(self, rows):
        groups = {}
        for r in rows:
            key = (r["op"], r["shape"], r["batch"], r["context"], r["weights"], r["kv"])
            groups.setdefault(key, []).append(r)
        self.us = {key: statistics.median(r["us"] for r in group) for key, group in groups.items()}
        self.bytes = {key: group[-1]["bytes"] for key, group in groups.items()}
        self.ceiling = rows[0]["ceiling"]

    def share(self, key):
        return self.bytes[key] / self.us[key] * 1e6 / self.ceiling

    def points(self, ops):
        """(shape, batch, context) of these ops, models in the file's order, then by context and batch."""
        shapes = list(dict.fromkeys(key[1] for key in self.us))
        found = {key[1:4] for key in self.us if key[0] in ops}
        return sorted(found, key=lambda p: (shapes.index(p[0]), p[2], p[1]))

    def peer(self, op, point):
        return next((us for key, us in self.us.items() if key[0] == op and key[1:4] == point), None)


def number(us):
    return NONE if us is None else f"{us:.0f}" if us >= 1000 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def percent(share):
    return f"{share * 100:.0f} %"


def table(title, header, rows):
    if not rows:
        return
    print(f"### {title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def compared(numbers, part, peers, weights="int4"):
    """Ours beside the peers at every point where either was measured; the ratio is over the fastest peer."""
    rows = []
    for point in numbers.points({part, *peers} | ({"layer"} if part == "block" else set())):
        key = (part, *point, weights, weights)
        if part == "block" and ("layer", *key[1:]) in numbers.us:
            key = ("layer", *key[1:])
        ours = numbers.us.get(key)
        times = [numbers.peer(op, point) for op in peers]
        fastest = min((t for t in times if t), default=None)
        floor = numbers.bytes[key] / numbers.ceiling * 1e6 if ours else None
        if ours or fastest:
            rows.append([point[0], str(point[1]), str(point[2]), number(floor), number(ours),
                         percent(numbers.share(key)) if ours else NONE, str(ACCEPTED.get((part, *point), NONE)),
                         *map(number, times), f"{fastest / ours:.2f}x" if ours and fastest else NONE])
    return rows


def formats(numbers):
    """Our own formats beside one another, weights and cache alike."""
    rows = []
    for part in PARTS:
        for point in numbers.points({part}):
            times = [numbers.us.get((part, *point, w, w)) for w in ("int4", "e4m3", "bf16")]
            if times[0] and any(times[1:]):
                rows.append([part, point[0], str(point[1]), str(point[2]), *map(number, times),
                             *(f"{t / times[0]:.2f}x" if t else NONE for t in times[1:])])
    return rows


def operations(numbers):
    """Every op of ours, alone: microseconds and share of the ceiling, a column a point."""
    ops = list(dict.fromkeys(k[0] for k in numbers.us
                             if k[0] not in PARTS and not k[0].startswith("prefill_") and not is_peer({"op": k[0]})))
    points = numbers.points(ops)
    cells = []
    for op in ops:
        keys = [(op, *point, "int4", "int4") for point in points]
        if any(k in numbers.us for k in keys):
            cells.append([op, *(f"{number(numbers.us[k])} ({percent(numbers.share(k))})" if k in numbers.us else NONE
                                for k in keys)])
    return ["us (share)", *(f"{s.rsplit('-', 1)[-1]} {b} x {c}" for s, b, c in points)], cells


def ceilings(numbers, products):
    rows = []
    for key, us in numbers.us.items():
        if key[0] in ("read", "copy"):
            rows.append([key[0], NONE, NONE, number(us), f"{numbers.bytes[key] / us / 1e6:.2f} TB/s"])
        product = re.fullmatch(r"cublaslt_(\w+?)_(qkv|o|gate_up|down)(/burst)?", key[0])
        if product and (key[1], product[2]) in products:
            n, k = products[key[1], product[2]]
            rows.append([f"cuBLASLt {product[1]}{product[3] or ''}", f"{key[1]} {product[2]}", str(key[2]), number(us),
                         f"{2 * key[2] * n * k / us / 1e9:.3f} PFLOP/s"])
    return rows


PRODUCT_OPS = {"qkv_rope_cache": "qkv", "o_proj_residual": "o", "gate_up_swiglu": "gate_up", "down_residual": "down"}
SCALINGS = {"e4m3": ("", "/frozen", "/delayed"), "bf16": ("",)}


def ratio(peer, ours):
    return f"{peer / ours:.2f}x" if peer and ours else NONE


def ours_in_prefill(numbers, op, point, weights):
    """Whatever the cache's format: the first that the file has."""
    return next((us for key, us in numbers.us.items() if key[0] == f"prefill_{op}" and key[1:5] == (*point, weights)),
                None)


def cudnn(numbers, point, burst=""):
    return numbers.peer(f"cudnn_attention{burst}", point) or numbers.peer(f"flash_attention{burst}", point)


def prefill_operations(numbers):
    """Products beside cuBLASLt's bare ones (BF16 out), attention beside cuDNN's; all sustained but the column burst."""
    rows = []
    for op, part in (*PRODUCT_OPS.items(), ("attention_prefill", None)):
        for weights, scaling in ((w, s) for w, scalings in SCALINGS.items() for s in scalings):
            for point in numbers.points({f"prefill_{op}{scaling}"}):
                def peer(burst):
                    if not part:
                        return cudnn(numbers, point, burst)
                    return numbers.peer(f"cublaslt_{weights}_{part}{burst}", (point[0], point[1] * point[2], 0))

                ours = ours_in_prefill(numbers, op + scaling, point, weights)
                if ours:
                    swiglu = numbers.peer("cublaslt_bf16_swiglu_gate_up", (point[0], point[1] * point[2], 0))
                    rows.append([op, weights + scaling, point[0], f"{point[1]} x {point[2]}", number(ours),
                                 number(peer("")), number(peer("/burst")), ratio(peer(""), ours),
                                 number(swiglu if part == "gate_up" else None)])
    return rows


def bare_parts(numbers, point):
    """A block's products in cuBLASLt FP8 and its attention in cuDNN, one after the other; None where one is missing."""
    parts = [numbers.peer(f"cublaslt_e4m3_{part}", (point[0], point[1] * point[2], 0)) for part in PRODUCT_OPS.values()]
    parts.append(cudnn(numbers, point))
    return sum(parts) if all(parts) else None


def prefill_blocks(numbers):
    """Whole prompts; a padded batch beside the same prompts ragged."""
    rows = []
    kinds = ("fp8", "fp8_row", "bf16")
    ops = {f"prefill_block{s}{ragged}" for s in SCALINGS["e4m3"] for ragged in ("", "/ragged")}
    for point in numbers.points(ops | {f"torch_{kind}_prefill_block" for kind in kinds}):
        times = [numbers.peer(f"torch_{kind}_prefill_block", point) for kind in kinds]
        for ragged in ("", "/ragged"):
            for weights in SCALINGS:
                for scaling in SCALINGS[weights]:
                    us = ours_in_prefill(numbers, f"block{scaling}{ragged}", point, weights)
                    if us:
                        bare = bare_parts(numbers, point) if not ragged and weights == "e4m3" else None
                        rows.append([weights + scaling + ragged, point[0], f"{point[1]} x {point[2]}", number(us),
                                     number(bare), ratio(bare, us), *map(number, times), ratio(times[0], us)])
    return rows


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"report.py: {message}\n")
    parser.add_argument("file", nargs="?", default=str(pathlib.Path(__file__).with_name("results.csv")))
    parser.add_argument("--commit", help="rows of this commit only")
    parser.add_argument("--date", help="rows of this day only, as 2026-11-30")
    return parser.parse_args()


def main():
    args = parse()
    (commit, card, date), rows = choose_run(read(args.file), args.commit, args.date)
    numbers = Numbers(rows)
    print(f"{card}, commit {commit}, {date}; microseconds; INT4 weights and cache unless said; "
          f"shares of {numbers.ceiling / 1e12:.2f} TB/s; ratio: the fastest peer over ours\n")
    for part, peers in (("block", PEERS), ("step", STEP_PEERS)):
        table(part.capitalize(),
              ["model", "B", "context", "floor by bytes", "ours", "share", "accepted", *peers.values(), "ratio"],
              compared(numbers, part, peers))
    table("Our formats", ["", "model", "B", "context", "INT4", "E4M3", "BF16", "E4M3 / INT4", "BF16 / INT4"],
          formats(numbers))
    table("Operations", *operations(numbers))
    table("Prefill: operations", ["", "weights", "model", "prompts", "ours", "cuBLASLt / cuDNN", "burst", "ratio",
                                  "BF16 + SwiGLU"], prefill_operations(numbers))
    table("Prefill: block", ["weights", "model", "prompts", "ours", "bare parts", "ratio", "torch FP8",
                             "torch FP8 a row", "torch BF16", "FP8 / ours"], prefill_blocks(numbers))
    sys.path.insert(0, str(pathlib.Path(__file__).with_name("peers")))
    import common

    products = {(name, part): nk for name, shape in common.SHAPES.items() for part, nk in shape.products().items()}
    table("Ceilings", ["", "product", "rows", "us", "rate"], ceilings(numbers, products))


if __name__ == "__main__":
    main()
