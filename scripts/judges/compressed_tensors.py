#!/usr/bin/env python3
"""What the PyPI package compressed-tensors makes of its pack-quantized and float-quantized layouts.

    compressed_tensors.py --write     makes tests/compressed_tensors_vectors.json anew: tensors as the package compresses them,
                                      and the weights that it makes of them again
    compressed_tensors.py             checks that the file still says what the package does

tests/hf_folder_test.cpp compares this project with the file. Needs the PyPI packages compressed-tensors, torch and numpy.
"""
import argparse
import json
import pathlib
import sys
from importlib.metadata import version

# This file has the package's name, and Python would look here first.
sys.path = [path for path in sys.path if pathlib.Path(path or ".").resolve() != pathlib.Path(__file__).resolve().parent]

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "compressed_tensors_vectors.json"
# layout, rows, columns, arguments of its weights, shape of the scales
CASES = [
    ("pack-quantized", 3, 64, {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, (3, 2)),
    ("pack-quantized", 2, 128, {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, (2, 1)),
    ("pack-quantized", 4, 40, {"num_bits": 4, "type": "int", "strategy": "channel"}, (4, 1)),
    ("pack-quantized", 11, 64, {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}, (11, 2)),
    ("pack-quantized", 3, 16, {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}, (3, 1)),
    ("float-quantized", 3, 5, {"num_bits": 8, "type": "float", "strategy": "channel"}, (3, 1)),
    ("float-quantized", 2, 6, {"num_bits": 8, "type": "float", "strategy": "tensor"}, (1,)),
]
TYPES = {torch.int32: "I32", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}


def stored(tensor):
    return {"type": TYPES[tensor.dtype], "shape": list(tensor.shape),
            "bytes": tensor.flatten().repeat(1).view(torch.uint8).numpy().tobytes().hex()}


def vectors():
    random = torch.Generator().manual_seed(3)
    made = []
    for layout, rows, columns, arguments, scale_shape in CASES:
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        weight = torch.randn(rows, columns, generator=random)
        scale = (0.1 + 0.1 * torch.rand(scale_shape, generator=random)).to(torch.bfloat16)
        state = {"weight": weight.to(torch.bfloat16), "weight_scale": scale}
        if not arguments.get("symmetric", True):
            state["weight_zero_point"] = torch.randint(-8, 8, scale_shape, generator=random).to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(layout)
        compressed = compressor.compress(state, scheme)
        # Scales in F32, so that what the package multiplies is not rounded to BF16.
        weight = compressor.decompress(compressed | {"weight_scale": scale.float()}, scheme)["weight"]
        made.append({"layout": layout, "tensors": {name: stored(tensor) for name, tensor in compressed.items()},
                     "weight": stored(weight.float())["bytes"]})
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    made = json.dumps(vectors(), indent=1) + "\n"
    if parser.parse_args().write:
        VECTORS.write_text(made)
    elif VECTORS.read_text() != made:
        sys.exit(f"{VECTORS}: differs from what compressed-tensors says")
    print(f"compressed-tensors {version('compressed-tensors')}: {len(CASES)} tensors, 0 differ from {VECTORS.name}")


if __name__ == "__main__":
    main()
