#!/usr/bin/env python3
"""What the package tokenizers makes of texts with a tokenizer built like Qwen2's and Qwen3's (NFC, their split), against this project.

    qwen_tokenizer.py --write            trains tests/tokenizers/qwen.json and makes qwen_vectors.json anew
    qwen_tokenizer.py                    checks that qwen_vectors.json still says what the package does
    qwen_tokenizer.py --program build/bin/fut [--folder FOLDER]
                                         compares both sides on every code point in several surroundings and on random texts, with that
                                         tokenizer or the one in FOLDER

Needs the PyPI package tokenizers.
"""
import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests" / "tokenizers" / "qwen.json"
VECTORS = ROOT / "tests" / "tokenizers" / "qwen_vectors.json"
TRAINING_TEXT = ROOT / "tests" / "bard_text.txt"
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ACCENTED = "é è ñ ü ç å ố ệ ặ 한국어 각 がぎぐ ё й ά ώ"

TEXTS = [
    "", " ", "\n", " \n ", "a", "The king's word", "THE KING'S", "12345 and 6.78", "x = 3.14;\n\n\treturn", "naïve café", "cafe\u0301 nai\u0308ve", "e\u0301", "\u0301e",
    "e\u0301\u0323", "e\u0323\u0301", "\u1e69", "s\u0323\u0307", "s\u0307\u0323", "o\u0302\u0301", "\u00f4\u0301", "A\u030a", "\u212b", "\u2126", "\ufb01", "\u00bd", "\u0958",
    "\u0915\u093c", "\uac00", "\u1100\u1161", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u1100\u1161\u1100\u1161\u11a7", "\u304b\u3099", "\u0344", "\u0345\u0301",
    "\u0061\u0315\u0300\u05ae\u0300\u0062", "\u0b47\u0300\u0b3e", "\u0f71\u0f72\u0f74", "\U0001d15e", "\U0002f800", "\u0340\u0341", "\U0001f468\u200d\U0001f469",
    "日本語テキスト", "a<|im_end|>b", "<|im_start|>user\ncafe\u0301<|im_end|>\n", "e<|im_end|>\u0301", "<tool_call>e\u0301</tool_call>", "q\u0303" * 20, "a" + "\u0301\u0323" * 40,
    "\u00e9" * 9, " \u0301", "\r\n\u0301", "1\u0301", "don\u2019t", "ẛ\u0323", "d\u0323\u0307", "\u1e0b\u0323", "\u03b1\u0313\u0300\u0345",
]


def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([*TRAINING_TEXT.read_text().splitlines(), *[ACCENTED] * 50], trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    TOKENIZER.write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")


def vectors(tokenizer):
    return [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in TEXTS]


def surroundings():
    """Every code point alone and beside marks, letters and parts of syllables; then texts of such characters by chance."""
    source = random.Random(1)
    codes = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for pattern in ("{}", "e{}", "{}\u0301", "q\u0323{}\u0301", "\u0315{}\u0334", "\u1100{}\u11a8", "\u0915{}\u3099"):
        for at in range(0, len(codes), 4096):
            yield " ".join(pattern.format(chr(c)) for c in codes[at:at + 4096])
    marks = [c for c in codes if 0x300 <= c < 0x370 or 0x591 <= c < 0x5c8 or 0x1100 <= c < 0x1200 or 0x1dc0 <= c < 0x1e00]
    for _ in range(200):
        yield "".join(chr(source.choice(marks if source.random() < 0.7 else codes)) for _ in range(1000))
    for _ in range(200):
        yield "".join(chr(source.choice((0x41, 0x65, 0x6f, 0x73, 0x301, 0x302, 0x307, 0x323, 0x20, 0xac00, 0x1100, 0x1161, 0x11a8, 0x915, 0x93c))) for _ in range(500))


def compare(program, folder):
    tokenizer = Tokenizer.from_file(str(pathlib.Path(folder) / "tokenizer.json"))
    texts = wrong = 0
    for text in surroundings():
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        with tempfile.NamedTemporaryFile() as file:
            file.write(text.encode())
            file.flush()
            found = subprocess.run([program, "tokenize", folder, "-f", file.name, "--no-bos", "--parse-control", "--json"], check=True, capture_output=True)
        texts += 1
        if json.loads(found.stdout)["ids"] != expected:
            wrong += 1
            print("differs:", ascii(text[:60]))
    print(f"tokenizers {tokenizers.__version__}: {texts} texts, {wrong} differ")
    return wrong == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--program")
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    if arguments.program:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(TOKENIZER, folder + "/tokenizer.json")
            sys.exit(0 if compare(arguments.program, arguments.folder or folder) else 1)
    if arguments.write:
        train()
    found = vectors(Tokenizer.from_file(str(TOKENIZER)))
    if arguments.write:
        lines = ",\n".join(json.dumps(each) for each in found)
        VECTORS.write_text(f'{{"tokenizers": "{tokenizers.__version__}", "texts": [\n{lines}\n]}}\n')
        return print(f"{len(found)} texts written to {VECTORS.name}")
    stored = json.loads(VECTORS.read_text())["texts"]
    wrong = [ascii(each["text"]) for each, other in zip(found, stored) if each != other]
    print(f"tokenizers {tokenizers.__version__}: {len(found)} texts, {len(wrong)} differ from {VECTORS.name}", *wrong[:9])
    sys.exit(1 if wrong or len(found) != len(stored) else 0)


if __name__ == "__main__":
    main()
