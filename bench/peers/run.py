#!/usr/bin/env python3
"""Measures what issues 3 and 4 compare with, in one command: PyTorch's compiled blocks and transformers step (decode),
cuBLASLt's products, cuDNN's attention and the compiled blocks (--phase prefill).

The peers that can be a point's fastest come first, so a run cut short by --limit has the numbers that count. With
--ours our own steps and blocks run at the same points on the same card just before, and single operations behind them.
A table closes the run.

  python3 bench/peers/run.py --ours build/bin/fut --csv bench/results.csv
  python3 bench/peers/run.py --ours build/bin/fut --phase prefill --quick --limit 150
"""
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

import ceilings
import common
import torch_block

FOLDER = pathlib.Path(__file__).resolve().parent
POINTS = [("llama-3.1-8b", 1, 2048), ("llama-3.1-8b", 1, 16384), ("llama-3.1-8b", 8, 2048), ("llama-3.1-8b", 32, 2048),
          ("llama-3.1-8b", 32, 8192), ("llama-3.1-70b", 1, 2048), ("llama-3.1-70b", 32, 2048)]
PREFILL_POINTS = [("llama-3.1-8b", 1, 4096), ("llama-3.1-8b", 4, 4096), ("llama-3.1-70b", 1, 4096),
                  ("llama-3.1-8b", 1, 1024), ("llama-3.1-8b", 1, 512), ("llama-3.1-8b", 1, 256)]
PADDED = ("llama-3.1-8b", 64, 2048)  # where ours runs common.RAGGED, the same prompts without padding
PRODUCT_TOKENS = (4096, 1024, 16384)
STATIC = ["--prefill-scaling", "frozen"]  # as the peers' FP8
STEP = ("llama-3.1-8b", 1, 1024)  # whole steps are compared here
OURS_S, BANDWIDTH_S, POINT_S, STEP_S = 90, 30, 45, 120  # limits of one piece of work, in seconds
START_S = 30  # more for a program's first line: imports, the card's context
TIME_IS_UP = "the run's time is up"


def may_be_fastest(point):
    """INT4 led at B = 1, FP8 elsewhere: PyTorch's INT4 product unpacks all weights again for every 16 rows."""
    return point.weights == "fp8" or (point.weights == "int4" and point.batch == 1)


def parse():
    parser = common.parser(__doc__)
    parser.add_argument("--ours", metavar="PROGRAM", help="fut of this build, to run `fut bench` at the same points")
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--limit", type=common.at_least(10), default=240, metavar="SECONDS",
                        help="what has not begun or ended by then is left out, by name (default 240)")
    parser.add_argument("--quick", action="store_true", help="only the peers that can be a point's fastest; prefill: "
                        "fewer samples, no products at 16384, FP8 alone")
    args = parser.parse_args()
    if args.ours and not os.access(args.ours, os.X_OK):
        parser.error(f"--ours {args.ours}: is no program")
    return args


class Child:
    """A program in a process group of its own: its output line by line, its end by force."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next_line(self, seconds):
        """A line; None at the end. Raises queue.Empty when `seconds` are over."""
        return self.lines.get(timeout=max(seconds, 0.01))

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return self.process.wait()


class Run:
    def __init__(self, args, csv):
        self.begin, self.limit = time.monotonic(), args.limit
        self.failed = self.measured = False
        self.commit = args.commit or common.head_commit()
        self.flags = ["--csv", csv, "--commit", self.commit]

    def left(self):
        return self.limit - (time.monotonic() - self.begin)

    def say(self, text):
        print(f"[{time.monotonic() - self.begin:5.1f} s] {text}", flush=True)

    def follow(self, command, limit):
        """Passes a program's lines on and waits for each `limit` seconds, for the first START_S longer.

        Returns (lines, status, reason): status None where the program had to be ended, reason None where all went well.
        """
        child, seen, last, status = Child(command + self.flags), 0, time.monotonic(), None
        try:
            while True:
                wait = last + limit + (0 if seen else START_S) - time.monotonic()
                line = child.next_line(min(wait, self.left()))
                if line is None:
                    status = child.process.wait(timeout=10)
                    break
                self.say(line.rstrip())
                seen, last = seen + ("/burst " not in line), time.monotonic()  # a point's second row
        except (queue.Empty, subprocess.TimeoutExpired):
            if self.left() <= 0:
                return seen, None, TIME_IS_UP
            self.failed = True
            return seen, None, f"no result in {limit} s"
        finally:
            child.end()
        self.measured |= status == 0
        self.failed |= status not in (0, common.LACKING)
        return seen, status, None if status in (0, common.LACKING) else f"ended with status {status}"

    def one(self, name, command, limit):
        """A program that measures one thing; its own line says what the machine lacks."""
        reason = self.follow(command, limit)[2] if self.left() > 0 else TIME_IS_UP
        if reason:
            self.say(f"{name}: left out: {reason}")

    def blocks(self, points, phase="decode", *flags):
        """One program for all points, so that they share what was imported and compiled; begun again where it stuck."""
        while points:
            seen, status, reason = 0, None, TIME_IS_UP
            if self.left() > 0:
                words = [":".join(map(str, point)) for point in points]
                seen, status, reason = self.follow([sys.executable, str(FOLDER / "torch_block.py"), *words,
                                                    "--phase", phase, *flags], POINT_S)
            if status == common.LACKING:
                return
            points = points[seen:]
            # A program that ended by itself behind a line got as far as that line; else the next point is to blame.
            lost = points if self.left() <= 0 else points[:1] if status is None or not seen else []
            for point in lost:
                self.say(f"{torch_block.describe(point, phase == 'prefill')}: left out: {reason}")
            points = points[len(lost):]


def ours(run, program, part):
    """`fut bench PART` at every point, with an INT4 head."""
    if not program:
        return
    for shape, batch, context in [*POINTS, STEP]:
        words = ["bench", part, "--backend", "cuda", "--head", "int4", "--shape", shape, "--batch", str(batch),
                 "--context", str(context)]
        run.one(" ".join(["fut", *words]), [program, *words], OURS_S)


def ours_prefill(run, program, points, *flags):
    """`fut bench` on whole prompts; PADDED's are those of common.RAGGED."""
    for shape, batch, tokens in points if program else ():
        size = ["--lengths", str(common.RAGGED)] if (shape, batch, tokens) == PADDED else [
            "--batch", str(batch), "--tokens", str(tokens)]
        words = ["bench", *flags, "--phase", "prefill", "--backend", "cuda", "--shape", shape, *size]
        run.one(" ".join(["fut", *words]), [program, *words], OURS_S)


def measure_prefill(run, args):
    points, rounds = [*PREFILL_POINTS, PADDED], ["--rounds", "3" if args.quick else "10"]
    tokens = PRODUCT_TOKENS[:2] if args.quick else PRODUCT_TOKENS
    products = [(shape, 1, t) for t in tokens for shape in ("llama-3.1-8b", "llama-3.1-70b")]
    attention = [point for point in ceilings.ATTENTION if point not in products]
    ours_prefill(run, args.ours, points, "block", *STATIC)
    ours_prefill(run, args.ours, products, "op", "layer", *STATIC)
    ours_prefill(run, args.ours, attention, "op", "attention_prefill", *STATIC)
    for what in ("attention", "products"):
        run.one(what, [sys.executable, str(FOLDER / "ceilings.py"), "--what", what, "--load", "both", *rounds,
                       "--tokens", *map(str, tokens)], POINT_S)
    kinds = [[torch_block.Point(*p, kind) for p in points] for kind in ("fp8", "fp8_row", "bf16")]
    run.blocks(torch_block.in_order(kinds[0], "prefill"), "prefill", *rounds)
    if not args.quick:
        ours_prefill(run, args.ours, points, "block")
        ours_prefill(run, args.ours, points, "block", "--weights", "bf16")
        ours_prefill(run, args.ours, products, "op", "layer", "--weights", "bf16")
        run.blocks(torch_block.in_order(kinds[1] + kinds[2], "prefill"), "prefill", *rounds)


def measure(run, args):
    ours(run, args.ours, "step")
    ours(run, args.ours, "block")
    run.one("bandwidth", [sys.executable, str(FOLDER / "ceilings.py"), "--what", "bandwidth"], BANDWIDTH_S)
    points = torch_block.in_order([torch_block.Point(*p, None) for p in POINTS], "decode")
    run.blocks([p for p in points if may_be_fastest(p)])
    shape, batch, context = (str(w) for w in STEP)
    command = [sys.executable, str(FOLDER / "transformers_step.py"), "--shape", shape, "--batch", batch]
    run.one("transformers_step", [*command, "--context", context], STEP_S)
    if not args.quick:
        ours(run, args.ours, "op")
        run.blocks([p for p in points if not may_be_fastest(p)])


def main():
    args = parse()
    common.Record(args.csv, args.commit)  # refuses a wrong file before anything runs
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        csv = args.csv or str(pathlib.Path(folder) / "results.csv")
        if args.ours and not (os.path.exists(csv) and os.path.getsize(csv)):
            pathlib.Path(csv).write_text(common.HEADER + "\n")  # fut bench would begin a file with columns of its own
        run = Run(args, csv)
        try:
            (measure_prefill if args.phase == "prefill" else measure)(run, args)
        except KeyboardInterrupt:
            run.failed = True
            run.say("interrupted")
        if run.measured:
            print(flush=True)
            report = [sys.executable, str(FOLDER.parent / "report.py"), csv]
            subprocess.run([*report, "--commit", run.commit, "--date", common.today()])
        run.say("something failed, see above" if run.failed else "done" if run.measured else "nothing was measured")
    sys.exit(1 if run.failed else 0 if run.measured else common.LACKING)


if __name__ == "__main__":
    main()
