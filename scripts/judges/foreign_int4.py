#!/usr/bin/env python3
"""GPTQ and AWQ tensors, laid out as AutoGPTQ, GPTQModel and AutoAWQ lay them out, with the weights that they mean.

    foreign_int4.py --write     makes tests/foreign_int4_vectors.json anew
    foreign_int4.py             checks that the file still says this

The packers here follow the loops of those programs (QuantLinear.pack, WQLinear_GEMM.from_linear) over plain integers; the weights come from
the integers, not from what was packed. tests/foreign_int4_test.cpp compares this project with the file. Needs the PyPI package numpy.
"""
import argparse
import json
import pathlib
import sys

import numpy as np

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "foreign_int4_vectors.json"
TYPES = {"int32": "I32", "float16": "F16", "float32": "F32"}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

# What the checkpoint says, rows, columns, columns of a group (-1: all), zero points, and whether the groups' columns are mixed.
GPTQ = {"quant_method": "gptq", "bits": 4}
V2 = {"checkpoint_format": "gptq_v2"}
CASES = {
    "gptq sym 32": (GPTQ | {"group_size": 32, "sym": True, "desc_act": False}, 8, 64, 32, "eight", False),
    "gptq sym 64": (GPTQ | {"group_size": 64, "sym": True, "checkpoint_format": "gptq"}, 16, 128, 64, "eight", False),
    "gptq sym 128": (GPTQ | {"group_size": 128, "sym": True, "format": "gptq"}, 8, 256, 128, "eight", False),
    "gptq sym, a group of all columns": (GPTQ | {"group_size": -1, "sym": True, "desc_act": True}, 8, 96, -1, "eight", False),
    "gptq sym 256": (GPTQ | {"group_size": 256, "sym": True}, 8, 512, 256, "eight", False),
    "gptq asym 32": (GPTQ | {"group_size": 32, "sym": False}, 24, 64, 32, "any", False),
    "gptq asym, a group of all columns": (GPTQ | {"group_size": -1, "sym": False}, 16, 40, -1, "any", False),
    "gptq_v2 sym 64": (GPTQ | V2 | {"group_size": 64, "sym": True}, 8, 64, 64, "eight", False),
    "gptq_v2 asym 32": (GPTQ | V2 | {"group_size": 32, "sym": False}, 24, 64, 32, "any", False),
    "gptq sym 32, act-order": (GPTQ | {"group_size": 32, "sym": True, "desc_act": True}, 8, 128, 32, "eight", True),
    "gptq_v2 asym 32, act-order": (GPTQ | V2 | {"group_size": 32, "sym": False, "desc_act": True}, 16, 96, 32, "any", True),
    "awq 32": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, 24, 64, 32, "any", False),
    "awq 64": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, 16, 128, 64, "any", False),
    "awq 128": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, 8, 256, 128, "any", False),
    "awq 32, zero points of 8": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, 8, 96, 32, "eight", False),
}


def pack(values, order):
    """Eight consecutive rows to a word, row order[i] in nibble i."""
    words = np.zeros((values.shape[0] // 8, values.shape[1]), np.uint32)
    for row in range(words.shape[0]):
        for i in range(8):
            words[row] |= values[8 * row + order[i]].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def stored(array):
    array = np.ascontiguousarray(array)
    return {"type": TYPES[array.dtype.name], "shape": list(array.shape), "bytes": array.tobytes().hex()}


def case(config, rows, columns, group, zero_points, mixed, random):
    group = columns if group < 0 else group
    groups = columns // group
    codes = random.integers(0, 16, (columns, rows))
    zeros = np.full((groups, rows), 8) if zero_points == "eight" else random.integers(0, 16, (groups, rows))
    if zero_points == "any":
        zeros.flat[:16] = np.arange(16)  # every one there is
    scales = random.normal(0, 0.02, (groups, rows)).astype(np.float16)
    g_idx = np.arange(columns, dtype=np.int32) // group
    if mixed:
        random.shuffle(g_idx)
    weight = (codes - zeros[g_idx]).astype(np.float32) * scales[g_idx].astype(np.float32)
    in_order = list(range(8))
    if config["quant_method"] == "awq":
        tensors = {"qweight": pack(codes.T, AWQ_ORDER).T, "qzeros": pack(zeros.T, AWQ_ORDER).T, "scales": scales}
    else:
        less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {"qweight": pack(codes, in_order), "qzeros": pack(((zeros - less) & 15).T, in_order).T, "scales": scales, "g_idx": g_idx}
    own = zero_points == "eight" and not mixed
    return {"config": config, "own_group": (128 if groups == 1 else min(group, 128)) if own else 0,
            "tensors": {name: stored(tensor) for name, tensor in tensors.items()}, "weight": stored(weight.T)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    random = np.random.default_rng(7)
    made = json.dumps({name: case(*what, random) for name, what in CASES.items()}, indent=1) + "\n"
    if parser.parse_args().write:
        VECTORS.write_text(made)
    elif VECTORS.read_text() != made:
        sys.exit(f"{VECTORS}: differs from what the packers make")
    print(f"GPTQ and AWQ: {len(CASES)} tensors, 0 differ from {VECTORS.name}")


if __name__ == "__main__":
    main()
