"""What the peers share: shapes, points, the record's form, and the timing of graph replays.

PyTorch is imported inside the functions that need it, so that --help and a wrong argument answer at once and anywhere.
"""
import argparse
import collections
import csv
import ctypes
import dataclasses
import datetime
import io
import math
import pathlib
import re
import statistics
import subprocess
import sys
import time

READ_RATE = 4.57e12  # bytes a second: the ceiling that fut bench divides by on an H200
HEADER = "commit,card,date,clock_mhz,op,shape,batch,context,weights,kv,us,bytes,share_of_4.57TB/s"
LACKING = 77  # exit status: this machine has not what the measurement needs (what ctest and automake call a skip)
CSV_NAME = {"bf16": "bf16", "fp8": "e4m3", "fp8_row": "e4m3", "int4": "int4"}  # --weights: how the record calls it
KINDS = tuple(CSV_NAME)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Letters as in src/ops/ops.h: width, feed-forward width, heads, KV heads, head width, layers, vocabulary."""

    D: int
    F: int
    H: int
    J: int
    E: int
    L: int
    V: int

    def products(self):
        """(N, K) of a layer's four products."""
        return {
            "qkv": ((self.H + 2 * self.J) * self.E, self.D),
            "o": (self.D, self.H * self.E),
            "gate_up": (2 * self.F, self.D),
            "down": (self.D, self.F),
        }

    def layer_weights(self):
        return sum(n * k for n, k in self.products().values())

    def kv_bytes(self, batch, context):
        """One layer's keys and values in BF16, the only cache format that the peers have."""
        return batch * context * 2 * self.J * self.E * 2


SHAPES = {
    "llama-3.1-8b": Shape(4096, 14336, 32, 8, 128, 32, 128256),
    "llama-3.1-70b": Shape(8192, 28672, 64, 8, 128, 80, 128256),
    "llama-3.2-1b": Shape(2048, 8192, 32, 8, 64, 16, 128256),
}

RAGGED = pathlib.Path(__file__).with_name("ragged_lengths.txt")  # 64 prompts, which fut bench --lengths reads as well


def ragged_lengths():
    return [int(word) for word in RAGGED.read_text().split()]


Times = collections.namedtuple("Times", "median low high")  # microseconds; high is the 90th percentile


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def parser(description):
    made = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--csv", metavar="FILE", help="append a row for every number, in the form of bench/results.csv")
    made.add_argument("--commit", metavar="ID", help="of the rows; by itself the commit of this work tree, or unknown")
    return made


def at_least(least):
    def number(text):
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f'"{text}" is not a whole number from {least} up')
        return int(text)

    return number


def shape_name(text):
    if text not in SHAPES:
        raise argparse.ArgumentTypeError(f'shape "{text}" is unknown ({", ".join(SHAPES)})')
    return text


def lacking(what):
    """Ends the program: nothing is wrong with it, the machine lacks something."""
    print(f"{pathlib.Path(sys.argv[0]).name}: skipped: {what}", flush=True)
    sys.exit(LACKING)


def need_card():
    try:
        import torch
    except (ImportError, OSError) as error:
        lacking(f"PyTorch cannot be imported ({str(error).splitlines()[0]})")
    if not torch.cuda.is_available():
        lacking("PyTorch sees no CUDA card")
    torch.manual_seed(0)
    return torch


def shortage(needed_bytes):
    """None where `needed_bytes` are free on the card, else the sentence that says what is missing."""
    import torch

    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if needed_bytes <= free:
        return None
    return f"needs {needed_bytes / 2**30:.1f} GiB on the card, {free / 2**30:.1f} GiB are free"


def first_line(error):
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"


def percentiles(us):
    us = sorted(us)
    return Times(statistics.median(us), us[0], us[len(us) * 9 // 10])


def time_replays(work, count, replays=40):
    """Captures `work` as a CUDA graph and replays it; microseconds of one of its `count` equal parts.

    The card spins for a moment before each replay. The graph is launched meanwhile, and the host's share in launching
    it is not counted against the peer.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and makes what libraries make on first use
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    us = []
    for i in range(replays + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)  # clock cycles, about 200 us
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:
            us.append(begin.elapsed_time(end) * 1e3 / count)
    return percentiles(us)


BURST_US, PAUSE_S = 2e3, 8e-3
SUSTAINED_US, SUSTAINED_WARM_US = 30e3, 15e3  # by then the card sits at its power cap


def time_loads(work, rounds=10):
    """`work` as a CUDA graph, in two ways; microseconds of one run: {"": sustained, "/burst": burst}.

    Sustained: 30 ms of work behind 15 ms of its own. Burst: about 2 ms behind a pause of 8 ms.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()

    def timed(warm, runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)  # about 200 us: the host gets ahead
        for _ in range(warm):
            graph.replay()
        begin.record()
        for _ in range(runs):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / runs

    once = min(timed(1, 1) for _ in range(3))
    us = {"": [], "/burst": []}
    for _ in range(rounds):
        us[""].append(timed(math.ceil(SUSTAINED_WARM_US / once), math.ceil(SUSTAINED_US / once)))
        time.sleep(PAUSE_S)
        us["/burst"].append(timed(0, max(1, round(BURST_US / once))))
    return {load: percentiles(times) for load, times in us.items()}


def clock_mhz():
    """The card's highest clock, as fut bench asks for it."""
    value, clock_rate = ctypes.c_int(0), 13  # CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    try:
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), clock_rate, 0)
    except OSError:
        return 0
    return value.value // 1000


def today():
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def head_commit():
    try:
        found = subprocess.run(["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short", "HEAD"],
                               capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


class Record:
    """Lines on stdout for people; rows for bench/results.csv where a file is named.

    Rows follow the file's own header by name, so a column that this program does not know stays empty. Wrong files are
    refused when the program starts, not after the measuring.
    """

    def __init__(self, path, commit):
        self.path = pathlib.Path(path) if path else None
        self.commit = commit or (head_commit() if path else "unknown")
        self.columns, self.joint = HEADER.split(","), HEADER + "\n"  # joint: what has to stand before the first row
        if not self.path:
            return
        try:
            text = self.path.read_text() if self.path.exists() else ""
            if text:
                self.path.open("a").close()
                self.joint = "" if text.endswith("\n") else "\n"
                self.columns = text.splitlines()[0].split(",")
            elif not self.path.parent.is_dir():
                sys.exit(f"{self.path}: there is no folder {self.path.parent}")
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"{self.path}: cannot be used as a record: {first_line(error)}")
        if not set(HEADER.split(",")) <= set(self.columns):
            sys.exit(f"{self.path}: is no record of this form; its first line should be {HEADER}")

    def add(self, op, shape, batch, context, weights, kv, times, moved_bytes, note=""):
        rate = moved_bytes / times.median * 1e6
        print(f"{shape:<14} B={batch:<5} C={context:<6} {weights:<4} {kv:<4} {op:<26} {times.median:10.2f} us "
              f"({times.low:.2f}-{times.high:.2f}) {moved_bytes / 1e6:9.3f} MB {rate / 1e9:7.1f} GB/s "
              f"{rate / READ_RATE * 100:5.1f} %{note and '  ' + note}", flush=True)
        if not self.path:
            return
        import torch

        values = [self.commit, torch.cuda.get_device_name(), today(), clock_mhz(), op, shape, batch, context, weights,
                  kv, f"{times.median:.6g}", moved_bytes, f"{rate / READ_RATE:.6g}"]
        row = dict(zip(HEADER.split(","), values))
        line = io.StringIO()
        csv.DictWriter(line, self.columns, restval="", lineterminator="\n").writerow(row)
        with self.path.open("a") as file:
            file.write(self.joint + line.getvalue())
        self.joint = ""
