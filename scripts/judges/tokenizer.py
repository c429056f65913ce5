#!/usr/bin/env python3
"""What the packages sentencepiece and tokenizers make of texts, against what this project makes of them.

    tokenizer.py --write      trains tests/tokenizers/small.model and makes small_vectors.json anew
    tokenizer.py              checks that small_vectors.json still says what the packages do
    tokenizer.py --program build/bin/spm_test --folder FOLDER [--texts FILE ...]
                              compares both sides on texts cut at random from the files: FOLDER holds a tokenizer.json (judged by
                              tokenizers) or a tokenizer.model (judged by sentencepiece)

    ... --vectors PREFIX      and with the ids of PREFIX.out, a line for each of the texts that a mark parts in PREFIX.inp

Needs the PyPI packages sentencepiece and tokenizers.
"""
import argparse
import io
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import sentencepiece
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ROOT / "tests" / "tokenizers" / "small.model"
VECTORS = ROOT / "tests" / "tokenizers" / "small_vectors.json"
TRAINING_TEXT = ROOT / "tests" / "bard_text.txt"
MARK = "\u2581"

TEXTS = [
    "", " ", "  ", "   ", "\n", "\t", " \n ", "a", " a", "  a", "a ", "a  ", "a b", "a  b", "the", "The king", " the king ", "KING LEAR",
    "the\nking\n\nthe  queen", "what's thy name, sir?", "1234567890", "x = 3.14;", "é", "naïve café", "日本語", "\U0001f999", "a\U0001f999b",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0000", "a\u0000b", "\ufffd", "x\u0085y", "x\u00a0y", MARK, MARK + MARK, "a" + MARK + "b", " " + MARK + " a",
    "<s>", "</s>", "a</s>b", "<unk>", "<0x0A>", "<s> the", "tttttttttttttttttttttt", "thethethethethe", "and and and", "ſ", "e\u0301",
    "Now is the winter of our discontent\nMade glorious summer by this sun of York;", "  indented\n    more\n", "\r\n", "it is, it is", "....!!!!????",
    "ab" * 40, "the " * 30, " " * 33, "\n" * 17, "zq" * 9,
]


def train():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT.read_text().splitlines()), model_writer=model, model_type="bpe", vocab_size=700,
        character_coverage=0.995, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, split_digits=True, num_threads=1, minloglevel=2)
    SMALL.parent.mkdir(exist_ok=True)
    SMALL.write_bytes(model.getvalue())


def hf_json(processor, layout):
    """The vocabulary as a tokenizer.json: with the normalizer Prepend, or with Metaspace and one of its schemes."""
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        if not processor.is_control(vocab[piece]) and not processor.is_byte(vocab[piece]) and not processor.is_unknown(vocab[piece]):
            merges += [(-processor.get_score(vocab[piece]), vocab[piece], pair) for pair in halves]
    merges = [list(pair) for _, _, pair in sorted(merges, key=lambda m: m[:2])]
    added = [{"id": i, "content": pieces[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i in range(3)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    decoders = [{"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    normalizer, pre = None, None
    if layout == "prepend":
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, replace]}
    else:
        scheme, split = layout.split("+")
        pre = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split == "split"}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre,
            "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": merges}}


LAYOUTS = ["prepend", "first+whole", "always+whole", "never+whole", "always+split", "first+split"]


def small_vectors():
    processor = sentencepiece.SentencePieceProcessor(model_file=str(SMALL))
    vectors = {"texts": TEXTS, "sentencepiece": [processor.encode(text) for text in TEXTS], "layouts": {}}
    for layout in LAYOUTS:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(hf_json(processor, layout)))
        encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
        decoded = [tokenizer.decode(ids) for ids in encoded]
        vectors["layouts"][layout] = {"ids": encoded, "decoded": decoded}
    return json.dumps(vectors, separators=(",", ":")) + "\n"


def random_texts(files, count):
    rng = random.Random(5)
    texts = list(TEXTS)
    for name in files:
        whole = pathlib.Path(name).read_bytes().decode()
        texts.append(whole)
        for _ in range(count):
            at, length = rng.randrange(len(whole)), int(2 ** rng.uniform(0, 12))
            texts.append(whole[at:at + length])
    for _ in range(count):  # any characters at all
        alphabet = [rng.randrange(1, 0x2000) if rng.random() < 0.8 else rng.randrange(0x20000, 0x20100) for _ in range(8)] + [32, 32, 97]
        texts.append("".join(chr(rng.choice(alphabet)) for _ in range(rng.randrange(60))))
    return texts


def published_vectors(prefix):
    texts = pathlib.Path(prefix + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = pathlib.Path(prefix + ".out").read_text().split("\n")
    return texts, [[int(number) for number in line.split()] for line in lines[:len(texts)]]


def compare(program, folder, files, vectors):
    texts = random_texts(files, 2000)
    folder = pathlib.Path(folder)
    if (folder / "tokenizer.json").exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        judge, control = "tokenizers " + tokenizers.__version__, True
    else:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        ids = [processor.encode(text) for text in texts]
        judge, control = "sentencepiece " + sentencepiece.__version__, False
    if vectors:
        published, expected = published_vectors(vectors)
        print(f"{len(published)} published vectors")
        texts, ids = texts + published, ids + expected
    data = {"folder": str(folder.resolve()), "texts": texts, "ids": ids, "parse_control": control}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(data, file)
        file.flush()
        print(f"{len(texts)} texts of {sum(map(len, texts))} characters, {sum(map(len, ids))} tokens by {judge}", flush=True)
        return subprocess.run([program, "--gtest_filter=TokenizerJudge.*"], env={**os.environ, "FUT_TOKENIZER_VECTORS": file.name}).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--program", help="the built spm_test")
    parser.add_argument("--folder", help="holds tokenizer.json or tokenizer.model")
    parser.add_argument("--vectors", help="the prefix of an .inp and an .out file")
    parser.add_argument("--texts", nargs="*", default=[], help="files in UTF-8")
    arguments = parser.parse_args()
    if arguments.write:
        train()
        VECTORS.write_text(small_vectors())
    elif VECTORS.read_text() != small_vectors():
        sys.exit(f"{VECTORS} is not what the packages say: run with --write and look at the difference")
    print(f"{len(TEXTS)} texts of our own")
    if arguments.program and arguments.folder:
        sys.exit(compare(arguments.program, arguments.folder, arguments.texts, arguments.vectors))


if __name__ == "__main__":
    main()
