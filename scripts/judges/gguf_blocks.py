#!/usr/bin/env python3
"""What the PyPI package gguf makes of GGUF's block types.

    gguf_blocks.py --write     makes tests/gguf_block_vectors.json anew: random blocks of every type that is read, and their values
    gguf_blocks.py             checks that the file still says what the package does

tests/gguf_test.cpp compares this project with the file, bit for bit. Needs the PyPI packages gguf and numpy.
"""
import argparse
import json
import pathlib
import sys
from importlib.metadata import version

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "gguf_block_vectors.json"
BLOCKS = 3
# Where a block's halves lie: any other byte may be anything, these must be finite.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def vectors():
    random = np.random.default_rng(5)
    made = {}
    for name, halves in HALVES.items():
        kind = GGMLQuantizationType[name]
        block_bytes = GGML_QUANT_SIZES[kind][1]
        blocks = random.integers(0, 256, (BLOCKS, block_bytes), dtype=np.uint8)
        for at in halves:
            blocks[:, at:at + 2] = random.normal(0, 0.1, (BLOCKS, 1)).astype("<f2").view(np.uint8)
        values = dequantize(blocks, kind).astype("<f4")
        made[name] = {"blocks": blocks.tobytes().hex(), "values": values.tobytes().hex()}
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    made = json.dumps(vectors(), indent=1) + "\n"
    if parser.parse_args().write:
        VECTORS.write_text(made)
    elif VECTORS.read_text() != made:
        sys.exit(f"{VECTORS}: differs from what gguf says")
    print(f"gguf {version('gguf')}: {len(HALVES)} block types, {BLOCKS} blocks each, 0 differ from {VECTORS.name}")


if __name__ == "__main__":
    main()
