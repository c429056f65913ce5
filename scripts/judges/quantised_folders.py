#!/usr/bin/env python3
"""Whether the folders that `fut quantize` writes mean to others what they mean here.

    quantised_folders.py --build BUILD [--model MODEL] [-- OPTION ...]

Quantises MODEL (models/bard) by BUILD/bin/fut with the options given (without any: as it comes, and with --rotate --group-size 32), then

  - the PyPI package compressed-tensors reads config.json and decompresses every projection of decode/ and prefill/: its values and
    those that this project reads must be equal bit for bit (BUILD/bin/hf_folder_test compares);
  - transformers loads both folders, and its loss on a text must be what `fut perplexity` says in F32.

Needs the PyPI packages compressed-tensors, transformers and torch. Ends with 77 if they are missing.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from importlib.metadata import version

# A file beside this one has the package's name, and Python would look here first.
HERE = pathlib.Path(__file__).resolve().parent
sys.path = [path for path in sys.path if pathlib.Path(path or ".").resolve() != HERE]

try:
    import torch
    import transformers
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}; pip install compressed-tensors transformers torch")
    sys.exit(77)

ROOT = HERE.parents[1]
TEXT = ROOT / "tests" / "bard_text.txt"
TOKENS = 256
TOLERANCE = 0.01  # nats over all of them: sums in another order


def decompressed(folder):
    """Every projection as the package has it, by name. Scales as floats: in their own type, FP16, the product would be rounded."""
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored = load_file(folder / "model.safetensors")
    values = {}
    for name in stored:
        if not name.endswith(".weight_scale"):
            continue
        module = name[: -len("weight_scale")]
        state = {key[len(module):]: tensor for key, tensor in stored.items() if key.startswith(module + "weight")}
        values[module + "weight"] = compressor.decompress(state | {"weight_scale": state["weight_scale"].float()}, scheme)["weight"]
        as_stored = compressor.decompress(state, scheme)["weight"]
        if not torch.equal(as_stored, values[module + "weight"].to(as_stored.dtype)):
            sys.exit(f"{folder}: {module}weight: with the scales as stored the package has other values")
    return values


def compare_values(build, folder):
    values = decompressed(folder)
    with tempfile.TemporaryDirectory() as out:
        save_file(values, pathlib.Path(out) / "model.safetensors")
        (pathlib.Path(out) / "config.json").write_text("{}")
        run = subprocess.run([build / "bin" / "hf_folder_test", "--gtest_filter=HfFolderJudge.*"], text=True, capture_output=True,
                             env={**os.environ, "FUT_FOLDER": str(folder), "FUT_VALUES": out})
    if run.returncode:
        sys.exit(f"{folder}: the package's values are not this project's\n{run.stdout[-3000:]}{run.stderr}")
    print(f"  {folder.name}/: {len(values)} projections, {sum(v.numel() for v in values.values())} values, 0 differ", flush=True)


def loss_of_transformers(folder, ids):
    """Sum over all tokens but the first."""
    options = {}
    if folder.name == "prefill":  # otherwise its inputs are rounded to FP8 as well, which is not what is compared
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return -scores[:-1].gather(1, torch.tensor(ids)[1:, None]).sum().item()


def compare_losses(build, folder):
    fut = build / "bin" / "fut"
    ids = json.loads(subprocess.check_output([fut, "tokenize", folder, "-f", TEXT, "--no-bos", "--json"]))["ids"][:TOKENS]
    plain = ["--prefill", "f32", "--decode", "f32", "--kv", "f32", "--no-bos", "--json", "--backend", "cpu"]
    score = [fut, "perplexity", folder, TEXT, "--tokens", str(TOKENS), "--ctx-size", str(TOKENS), *plain]
    ours = json.loads(subprocess.check_output(score, stderr=subprocess.PIPE))["nll"]
    theirs = loss_of_transformers(folder, ids)
    if not abs(ours - theirs) <= TOLERANCE:
        sys.exit(f"{folder}: loss of {len(ids) - 1} tokens {theirs:.6f} by transformers, {ours:.6f} here")
    print(f"  {folder.name}/: loss of {len(ids) - 1} tokens {theirs:.6f} by transformers, {ours:.6f} here", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, type=pathlib.Path)
    parser.add_argument("--model", default=ROOT / "models" / "bard")
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"compressed-tensors {version('compressed-tensors')}, transformers {version('transformers')}, torch {version('torch')}")
    for options in [arguments.options] if arguments.options else [[], ["--rotate", "--group-size", "32"]]:
        print(" ".join(["fut quantize", str(arguments.model), *options]), flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            out = pathlib.Path(scratch) / "out"
            subprocess.run([arguments.build / "bin" / "fut", "quantize", arguments.model, out, *options], check=True, stderr=subprocess.PIPE)
            for phase in ("decode", "prefill"):
                compare_values(arguments.build, out / phase)
                compare_losses(arguments.build, out / phase)


if __name__ == "__main__":
    main()
