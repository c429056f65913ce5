#!/usr/bin/env python3
"""Times PyTorch's own Llama block, compiled and graph-captured: what a user has without this project.

POINT is SHAPE:BATCH:CONTEXT or SHAPE:BATCH:CONTEXT:WEIGHTS; without WEIGHTS all that the phase knows.
  decode   one token a sequence, which sees CONTEXT tokens; weights bf16, fp8, int4
  prefill  CONTEXT new tokens of each of BATCH sequences; weights bf16, fp8, fp8_row. Two
           rows: the sustained rate and, as .../burst, that of 2 ms behind a pause of 8 ms
fp8: static scales, one a tensor. fp8_row: a scale a token, found at run time, and one a channel. int4: tinygemm.

  python3 bench/peers/torch_block.py llama-3.1-8b:1:2048 llama-3.1-8b:32:8192:fp8
  python3 bench/peers/torch_block.py --phase prefill llama-3.1-8b:1:4096
"""
import argparse
import collections
import sys
import time

import common

Point = collections.namedtuple("Point", "shape batch context weights")
PHASE_KINDS = {"decode": ("bf16", "fp8", "int4"), "prefill": ("bf16", "fp8", "fp8_row")}
SLACK_BYTES = 3 << 30  # the context of CUDA, workspaces, and what making the random weights takes for a moment


def parse_point(text):
    words = text.split(":")
    if len(words) not in (3, 4):
        raise argparse.ArgumentTypeError(f'"{text}" is no point; expected SHAPE:BATCH:CONTEXT or ...:WEIGHTS')
    number = common.at_least(1)
    if len(words) == 4 and words[3] not in common.KINDS:
        raise argparse.ArgumentTypeError(f'weights "{words[3]}" are unknown ({", ".join(common.KINDS)})')
    return Point(common.shape_name(words[0]), number(words[1]), number(words[2]), words[3] if len(words) == 4 else None)


def parse():
    parser = common.parser(__doc__)
    parser.add_argument("points", metavar="POINT", nargs="+", type=parse_point)
    parser.add_argument("--phase", choices=PHASE_KINDS, default="decode")
    parser.add_argument("--layers", type=common.at_least(1),
                        help="sets of weights and cache that take turns, so that the L2 cache keeps none (default 16; "
                             "prefill: 2)")
    parser.add_argument("--rounds", type=common.at_least(1), default=10, help="prefill: samples of a load (default 10)")
    parser.add_argument("--replays", type=common.at_least(1), default=40, help="of the graph (default 40)")
    parser.add_argument("--mode", choices=("default", "max-autotune-no-cudagraphs"), default="default",
                        help="torch.compile's; autotuning takes a minute a point")
    args = parser.parse_args()
    args.layers = args.layers or (2 if args.phase == "prefill" else 16)
    for point in args.points:
        if point.weights and point.weights not in PHASE_KINDS[args.phase]:
            parser.error(f"weights {point.weights} are not for {args.phase} ({', '.join(PHASE_KINDS[args.phase])})")
    return args


def in_order(points, phase):
    """One point for each kind of weights; points that share compiled code stand next to one another."""
    points = [p._replace(weights=w) for p in points for w in ([p.weights] if p.weights else PHASE_KINDS[phase])]
    keys = list(dict.fromkeys(code_key(p) for p in points))
    return sorted(points, key=lambda p: keys.index(code_key(p)))


def code_key(point):
    return point.shape, point.batch, point.weights


def op_name(point, prefill):
    return f"torch_{point.weights}_{'prefill_' if prefill else ''}block"


def describe(point, prefill):
    return f"{op_name(point, prefill)} {point.shape} B={point.batch} C={point.context}"


class Bench:
    def __init__(self, args, record):
        self.args, self.record, self.prefill = args, record, args.phase == "prefill"
        self.key, self.block, self.checked = None, None, set()

    def layer_bytes(self, point):
        import llama_block

        shape = common.SHAPES[point.shape]
        weights = sum(llama_block.weight_bytes(point.weights, n, k) for n, k in shape.products().values())
        return weights + shape.kv_bytes(point.batch, point.context)

    def needed_bytes(self, point):
        """Layers, and the activations of one: about ten vectors as wide as gate_up's output."""
        rows = point.batch * (point.context if self.prefill else 1)
        return self.args.layers * self.layer_bytes(point) + rows * common.SHAPES[point.shape].F * 40 + SLACK_BYTES

    def compiled(self, point):
        import llama_block
        import torch

        if self.key != code_key(point):
            torch.compiler.reset()
            block = llama_block.make_block(common.SHAPES[point.shape], point.weights, self.prefill)
            self.block = torch.compile(block, mode=self.args.mode, fullgraph=True, dynamic=False)
            self.key = code_key(point)
        return self.block

    def measure(self, point):
        import llama_block
        import torch

        begin = time.monotonic()
        shape, count = common.SHAPES[point.shape], self.args.layers
        if point.weights not in self.checked:
            llama_block.check_product(point.weights, "cuda")
            self.checked.add(point.weights)
        block = self.compiled(point)
        stack = llama_block.Stack(shape, point.weights, point.batch, point.context, self.prefill, count, "cuda")
        out = stack.run(block)
        if not torch.isfinite(out).all():
            raise RuntimeError("the block's output is not finite")
        ready = time.monotonic()
        if self.prefill:
            loads = common.time_loads(lambda: stack.run(block), self.args.rounds)
            loads = {load: common.Times(*(us / count for us in times)) for load, times in loads.items()}
        else:
            loads = {"": common.time_replays(lambda: stack.run(block), count, self.args.replays)}
        for load, times in loads.items():
            note = f"ready in {ready - begin:.1f} s, measured in {time.monotonic() - ready:.1f} s"
            if self.prefill:
                note = f"{self.flops(point) / times.median / 1e9:.3f} PFLOP/s  {note}"
            self.record.add(op_name(point, self.prefill) + load, point.shape, point.batch, point.context,
                            common.CSV_NAME[point.weights], "bf16", times, self.layer_bytes(point), note)

    def flops(self, point):
        """Causal attention counted as half of its square."""
        shape, rows = common.SHAPES[point.shape], point.batch * point.context
        return 2 * rows * shape.layer_weights() + 2 * rows * point.context * shape.H * shape.E

    def run(self, point):
        """False where the point failed; what the machine lacks is no failure."""
        import torch

        shortage = common.shortage(self.needed_bytes(point))
        if not shortage and point.weights.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
            shortage = "the card has no FP8 products"
        try:
            if not shortage:
                self.measure(point)
        except torch.cuda.OutOfMemoryError as error:
            shortage = common.first_line(error)
        except Exception as error:  # one point that a peer cannot run must not cost the others
            print(f"{describe(point, self.prefill)}: failed: {common.first_line(error)}", flush=True)
            if isinstance(error, torch.AcceleratorError):
                sys.exit(1)  # after a fault on the card nothing more runs in this process
            return False
        finally:
            torch.cuda.empty_cache()
        if shortage:
            print(f"{describe(point, self.prefill)}: skipped: {shortage}", flush=True)
        return True


def main():
    args = parse()
    record = common.Record(args.csv, args.commit)
    torch = common.need_card()
    bench = Bench(args, record)
    with torch.no_grad():
        results = [bench.run(point) for point in in_order(args.points, args.phase)]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
