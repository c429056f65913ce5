#!/usr/bin/env python3
"""Writes tests/fuzz/seeds: small files that every parser accepts, between them most of what each parser knows.

The seeds are committed; run this only to change them. Needs nothing but Python's standard library.
"""
import json
import pathlib
import shutil
import struct

ROOT = pathlib.Path(__file__).parent / "seeds"
SPACE = "\u2581"


def write(parser, name, content):
    """A file, or a folder of files if `content` is a dict."""
    files = {f"{name}/{part}": text for part, text in content.items()} if isinstance(content, dict) else {name: content}
    for path, data in files.items():
        target = ROOT / parser / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# ---- safetensors

WIDTH = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1}


def safetensors(tensors, metadata=None):
    """tensors: (name, type, shape) or (name, type, shape, bytes)."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, kind, shape, *given in tensors:
        count = WIDTH[kind]
        for extent in shape:
            count *= extent
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + count]}
        data += given[0] if given else bytes(i % 251 for i in range(count))
    text = compact(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def make_safetensors():
    write("safetensors", "types", safetensors([
        ("a", "F64", [1]), ("b", "I64", [2]), ("c", "F32", [2, 3]), ("d", "BF16", [4]), ("e", "F16", [1, 1, 2]),
        ("f", "F8_E4M3", [3]), ("g", "BOOL", []), ("h", "U8", [0, 5])]))
    write("safetensors", "metadata", safetensors([("model.norm.weight", "F32", [4])], {"format": "pt", "by": "hand"}))
    write("safetensors", "empty", safetensors([]))


def make_index():
    packed = [("p.weight_packed", "I32", [2, 2]), ("p.weight_scale", "BF16", [2, 1]),
              ("p.weight_shape", "I64", [2], struct.pack("<qq", 2, 16))]
    eights = [("w", "F8_E4M3", [2, 4]), ("w_scale", "F32", [2, 1]), ("n", "F32", [3])]
    one = [("w", "F8_E4M3", [2, 4]), ("w_scale", "F32", [1])]
    for name, first, second in [("quantised", packed, eights), ("one_scale", one, [("n", "F16", [2])]), ("plain", [("n", "BF16", [2, 2])], [("w", "F32", [2])])]:
        shard_of = {tensor[0]: "a.safetensors" for tensor in first} | {tensor[0]: "b.safetensors" for tensor in second}
        write("index", name, {
            "config.json": "{}",
            "model.safetensors.index.json": compact({"metadata": {"total_size": 1}, "weight_map": shard_of}),
            "a.safetensors": safetensors(first), "b.safetensors": safetensors(second)})
    asymmetric = [("p.weight_packed", "I32", [9, 1]), ("p.weight_scale", "F32", [9, 2]), ("p.weight_zero_point", "I32", [2, 2]),
                  ("p.weight_g_idx", "I32", [8], struct.pack("<8i", *[0, 1] * 4))]
    write("index", "zero_points", {
        "config.json": "{}",
        "model.safetensors.index.json": compact({"weight_map": {name: "a.safetensors" for name, *_ in asymmetric}
                                                 | {"p.weight_shape": "b.safetensors"}}),
        "a.safetensors": safetensors(asymmetric),
        "b.safetensors": safetensors([("p.weight_shape", "I64", [2], struct.pack("<qq", 9, 8))])})
    block = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}
    write("index", "blocks", {
        "config.json": compact(block),
        "model.safetensors.index.json": compact({"weight_map": {"w": "a.safetensors", "w_scale_inv": "b.safetensors"}}),
        "a.safetensors": safetensors([("w", "F8_E4M3", [3, 5])]),
        "b.safetensors": safetensors([("w_scale_inv", "F32", [2, 3])])})
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True, "checkpoint_format": "gptq_v2"}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    order = struct.pack("<16i", *[0, 1] * 8)
    for name, said, codes, more in [("gptq", gptq, [2, 8], [("q.g_idx", "I32", [16], order)]), ("awq", awq, [64, 1], [])]:
        first = [("q.qweight", "I32", codes), ("q.scales", "F16", [2, 8]), *more]
        write("index", name, {
            "config.json": compact({"quantization_config": said}),
            "model.safetensors.index.json": compact({"weight_map": {tensor: "a.safetensors" for tensor, *_ in first} | {"q.qzeros": "b.safetensors"}}),
            "a.safetensors": safetensors(first),
            "b.safetensors": safetensors([("q.qzeros", "I32", [2, 1])])})


# ---- GGUF

def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key, kind, payload):
    return text(key) + struct.pack("<I", kind) + payload


def u32(key, value):
    return entry(key, 4, struct.pack("<I", value))


def f32(key, value):
    return entry(key, 6, struct.pack("<f", value))


def string(key, value):
    return entry(key, 8, text(value))


def boolean(key, value):
    return entry(key, 7, struct.pack("<?", value))


def strings(key, values):
    return entry(key, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values)))


def array(key, kind, letter, values):
    return entry(key, 9, struct.pack(f"<IQ{len(values)}{letter}", kind, len(values), *values))


def gguf(entries, tensors, version=3):
    """tensors: (name, extents with the fastest first, type number, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    data = b""
    for name, extents, kind, content in tensors:
        head += text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, len(data))
        data += content + b"\0" * (-len(content) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def llama(theta=10000.0, name="llama"):
    return [string("general.architecture", name), u32(name + ".embedding_length", 32),
            u32(name + ".feed_forward_length", 64), u32(name + ".block_count", 1), u32(name + ".context_length", 16),
            u32(name + ".attention.head_count", 4), u32(name + ".attention.head_count_kv", 2),
            f32(name + ".attention.layer_norm_rms_epsilon", 1e-5), f32(name + ".rope.freq_base", theta)]


def make_gguf():
    floats = lambda count: bytes(4 * count)
    blocks = {2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 12: (256, 144), 13: (256, 176), 14: (256, 210)}
    block = lambda kind, count: bytes(i % 200 for i in range(blocks[kind][1] * count // blocks[kind][0]))
    bpe = ["h", "e", "l", "o", "\u0120", "he", "ll", "hell", "hello", "<|begin_of_text|>", "<|eot_id|>"]
    write("gguf", "bpe.gguf", gguf(llama() + [
        string("tokenizer.ggml.model", "gpt2"), string("tokenizer.ggml.pre", "llama-bpe"),
        strings("tokenizer.ggml.tokens", bpe), strings("tokenizer.ggml.merges", ["h e", "l l", "he ll", "hell o"]),
        array("tokenizer.ggml.token_type", 5, "i", [1] * 9 + [3, 3]), u32("tokenizer.ggml.bos_token_id", 9),
        u32("tokenizer.ggml.eos_token_id", 10), boolean("tokenizer.ggml.add_bos_token", True),
        string("tokenizer.chat_template", "{{ bos_token }}")], [
            ("token_embd.weight", [32, 11], 0, floats(32 * 11)), ("blk.0.attn_q.weight", [32, 32], 8, block(8, 1024)),
            ("blk.0.attn_k.weight", [32, 16], 2, block(2, 512)), ("blk.0.attn_q.bias", [32], 0, floats(32)),
            ("blk.0.ffn_up.weight", [32, 64], 3, block(3, 2048)), ("blk.0.attn_norm.weight", [32], 1, bytes(64)),
            ("output.weight", [32, 11], 30, bytes(704))]))
    for name, extra in [("qwen2", ("blk.0.attn_q.bias", [32])), ("qwen3", ("blk.0.attn_q_norm.weight", [16]))]:
        write("gguf", name + ".gguf", gguf(llama(1e6, name) + [
            u32(name + ".attention.key_length", 16), u32(name + ".attention.value_length", 16),
            u32(name + ".rope.dimension_count", 8), u32(name + ".attention.sliding_window", 16),
            string("tokenizer.ggml.model", "gpt2"), string("tokenizer.ggml.pre", "qwen2"),
            strings("tokenizer.ggml.tokens", bpe[:9] + ["<|endoftext|>", "<|im_end|>"]),
            strings("tokenizer.ggml.merges", ["h e", "l l"]), array("tokenizer.ggml.token_type", 5, "i", [1] * 9 + [3, 3]),
            u32("tokenizer.ggml.eos_token_id", 10), boolean("tokenizer.ggml.add_bos_token", False)], [
                ("token_embd.weight", [32, 11], 0, floats(32 * 11)), ("blk.0.attn_q.weight", [32, 64], 8, block(8, 2048)),
                (*extra, 0, floats(extra[1][0]))]))
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", SPACE, "a", "b", "ab", SPACE + "ab", "<user>"]
    factors = struct.pack("<4f", 1, 1, 1, 1)
    write("gguf", "spm.gguf", gguf(llama() + [
        string("tokenizer.ggml.model", "llama"), strings("tokenizer.ggml.tokens", pieces),
        array("tokenizer.ggml.scores", 6, "f", [0.0, 0, 0, 0, -1, -2, -3, -4, -5, 0]),
        array("tokenizer.ggml.token_type", 5, "i", [2, 3, 3, 6, 1, 1, 1, 1, 1, 4]),
        u32("tokenizer.ggml.bos_token_id", 1), u32("tokenizer.ggml.eos_token_id", 2),
        u32("tokenizer.ggml.unknown_token_id", 0), boolean("tokenizer.ggml.add_space_prefix", True),
        string("llama.rope.scaling.type", "none"), u32("llama.rope.dimension_count", 8)], [
            ("token_embd.weight", [32, 10], 0, floats(320)), ("rope_freqs.weight", [4], 0, factors),
            ("output_norm.weight", [32], 0, floats(32))]))
    write("gguf", "old.gguf", gguf(llama() + [
        string("llama.rope.scaling.type", "linear"), f32("llama.rope.scaling.factor", 2.0),
        array("some.numbers", 0, "B", [1, 2, 3]), entry("wide", 12, struct.pack("<d", 0.5))],
        [("token_embd.weight", [32, 2], 0, floats(64)), ("extra", [], 0, floats(1))], version=2))
    write("gguf", "blocks.gguf", gguf(llama(), [
        ("token_embd.weight", [32, 2], 0, floats(64)), ("blk.0.attn_q.weight", [32, 32], 6, block(6, 1024)),
        ("blk.0.attn_k.weight", [32, 16], 7, block(7, 512)), ("blk.0.ffn_up.weight", [256, 2], 12, block(12, 512)),
        ("blk.0.ffn_gate.weight", [256, 2], 13, block(13, 512)), ("blk.0.ffn_down.weight", [256, 2], 14, block(14, 512))]))


# ---- configurations

def make_configs():
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1,
            "eos_token_id": [2, 3], "rope_scaling": None}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 1024}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.1, "truncate": False}
    variants = {
        "plain": {}, "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}}, "llama3": {"rope_scaling": llama3},
        "yarn": {"rope_scaling": yarn}, "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "new": {"rope_theta": None, "head_dim": 16, "rope_parameters": {"rope_theta": 5e5, **llama3}},
        "biases": {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.5},
        "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True,
                  "max_window_layers": 2, "use_mrope": False},
        "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "rope_theta": None,
                  "layer_types": ["full_attention", "full_attention"],
                  "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        "new_yarn": {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    }
    for name, change in variants.items():
        write("config", name, {"config.json": compact(base | change),
                               "generation_config.json": compact({"eos_token_id": 4, "temperature": 0.6})})


# ---- tokenizers

TEXT = "Hello, the  world's 1234 tests\n\tof caf\u00e9 <s>and</s> <tool>\u4f60\u597d\n"


def byte_alphabet():
    plain = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    extra = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(0x100 + i) for i in range(len(extra))]


def added(token, number, special=True, **flags):
    return {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": not special, "special": special} | flags


def template(token, number):
    return {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}}}


def byte_level(pre, **model):
    merges = ["t h", "th e", "\u0120 the", "l l", "h e", "he ll", "hell o"]
    spellings = ["h", "e", "l", "o", "t", "s", "'", ",", "\u0120", "\u010a", "1", "2", "3", "th", "the", "\u0120the",
                 "ll", "he", "hell", "hello"]
    tokens = spellings if model.pop("partial", False) else byte_alphabet() + spellings[13:]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    count = len(tokens)
    return {"version": "1.0", "added_tokens": [added("<s>", count), added("</s>", count + 1),
                                               added("<tool>", count + 2, False, lstrip=True, rstrip=True)],
            "normalizer": None, "pre_tokenizer": pre, "post_processor": template("<s>", count),
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "ignore_merges": True, "vocab": vocabulary,
                      "merges": merges} | model}


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", SPACE, "h", "e", "l", "o", "t", "s", "he", "ll",
          "hell", "hello", SPACE + "t", SPACE + "the"]
MERGES = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], [SPACE, "t"], [SPACE + "t", "he"]]


def sentencepiece(**parts):
    return {"version": "1.0", "added_tokens": [added("<unk>", 0), added("<s>", 1), added("</s>", 2)],
            "normalizer": None, "pre_tokenizer": None, "post_processor": template("<s>", 1),
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
                      "vocab": {piece: i for i, piece in enumerate(PIECES)}, "merges": MERGES}} | parts


def make_tokenizers():
    split = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    digits = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}
    old = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}
    new = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    qwen2 = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA3.replace("{1,3}", "")}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]}
    qwen = byte_level(qwen2, ignore_merges=False) | {"normalizer": {"type": "NFC"}}
    tokenizers = {
        "qwen": qwen,
        "llama3": byte_level(split), "gpt2": byte_level({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True},
                                                        ignore_merges=False, partial=True),
        "digits": byte_level(digits, partial=True), "prepend": sentencepiece(normalizer=old),
        "metaspace": sentencepiece(pre_tokenizer=new, decoder={"type": "Metaspace", "replacement": SPACE})}
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "pad_token": None,
              "chat_template": "{{ bos_token }}"}
    for name, tokenizer in tokenizers.items():
        marks = "cafe\u0301 <tool>\u1100\u1161\u11a8<s>s\u0307\u0323\u0958\n" if name == "qwen" else ""
        write("tokenizer_json", name, {"tokenizer.json": compact(tokenizer), "tokenizer_config.json": compact(config),
                                       "text.txt": TEXT + marks})


def varint(value):
    out = b""
    value &= (1 << 64) - 1
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def make_models():
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<user>": 4}
    for name, pieces, prefix in [("bytes", PIECES, 1), ("small", ["<unk>", "<s>", "</s>", SPACE, "a", "b", "ab", "<user>"], 0)]:
        model = b""
        for i, piece in enumerate(pieces):
            kind = kinds.get(piece, 6 if piece.startswith("<0x") else 1)
            model += field(1, field(1, piece) + field(2, float(-i)) + (field(3, kind) if kind != 1 else b""))
        trainer = field(3, 2) + field(4, len(pieces)) + field(35, int(name == "bytes")) + field(40, 0) + field(41, 1)
        model += field(2, trainer + field(42, 2) + field(43, -1) + field(45, "<unk>"))
        model += field(3, field(1, "identity") + field(3, prefix) + field(4, 0) + field(5, 1))
        config = {"add_bos_token": True, "legacy": False, "bos_token": "<s>",
                  "added_tokens_decoder": {"0": added("<unk>", 0), str(len(pieces)): added("<extra>", 0, False)}}
        write("tokenizer_model", name, {"tokenizer.model": model, "tokenizer_config.json": compact(config),
                                        "text.txt": TEXT})


# ---- templates

SECRET = "Qz7~secret~7zQ"
TEMPLATES = {
    "loops": "{{- bos_token }}{% for message in messages if message.content %}{%- if loop.first and not loop.last -%}"
             "[{{ loop.index }}/{{ loop.length }}/{{ loop.revindex0 }}]{% elif loop.previtem is defined %}"
             "{{ loop.previtem.role }}{% else %}{{ loop.cycle('a', 'b') }}{% endif %}<|{{ message['role'] }}|>\n"
             "{{ message.content | trim }}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% else %}none\n"
             "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "filters": "{% set x = messages | map_names if false else messages %}{{ x | length }}{{ x | first | tojson }}"
               "{{ x[-1].content | upper if x[-1].content is string and x[-1].content == 'a' else 'B' | lower }}"
               "{{ [3, 1, 2] | sort(reverse=true) | join(', ') }}{{ {'b': 1, 'a': 2} | dictsort }}{{ 'a b'.split() }}"
               "{{ ' x ' | trim | capitalize | default('d', true) }}{{ '3' | int + '1.5' | float }}"
               "{{ 'line\\nline' | indent(2, first=true) }}{{ [1, 1, 2] | unique | list }}{{ 'abc' | reverse }}"
               "{{ x | tojson(indent=2) }}{{ {'k': none} | items | list }}{{ 'aXb' | replace('X', x[0].content) }}",
    "methods": "{% set ns = namespace(found=false, n=0) %}{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}"
               "{% if m.content.startswith(('H', 'Q')) or m.content.endswith('.') %}{% set ns.found = true %}"
               "{% endif %}{{ m.content.replace('a', '-').strip().rstrip('.') }}{{ m.content.find('e') }}"
               "{{ m.content.split('~')[0] }}{{ m.get('x', 'no') }}{{ m.keys() | list }}{{ m.content[::-1] }}"
               "{% break %}{% endfor %}{{ ns.found }}{{ ns.n // 2 ** 3 % 5 - -1 }}{{ 'a' ~ 1 ~ [none, true, 1.5] }}"
               "{{ strftime_now('%d %b %Y') }}{{ dict(a=1)['a'] }}{{ range(3) | list }}{{ 'x' in 'xyz' and 1 not in [2] }}",
    "macros": "{% macro turn(role, text='none') -%}<{{ role }}>{{ text }}</{{ role }}>{%- endmacro %}"
              "{% set body %}{{ turn('user', messages[0].content) }}{% endset %}{{ body }}{# a comment #}"
              "{% generation %}{{ turn(role='system') }}{% endgeneration %}{% raw %}{{ kept }}{% endraw %}"
              "{% if messages | length > 9 %}{{ raise_exception('too long') }}{% endif %}"
              "{% set a, b = (1, 'two') %}{{ a }}{{ b }}{{ 5 is divisibleby 5 if false else 4 is even }}",
}


def make_templates():
    turns = [("system", "Be brief."), ("user", f"Hi {SECRET} a\u00e9"), ("assistant", "Hello.  "), ("user", f"{SECRET}\n")]
    conversation = {"messages": [{"role": role, "content": content} for role, content in turns],
                    "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", "tools": None}
    for name, source in TEMPLATES.items():
        write("template", name, {"template.jinja": source, "conversation.json": compact(conversation)})


def make_metadata():
    plain = {"version": 1, "source": "model", "group_size": 64, "rotations": {"value": True, "residual": False},
             "activation_amax": None, "key_mean": None}
    amax = {"attention": [0.5, 1], "swiglu": [18.25, 3]}
    write("metadata", "plain.json", compact(plain))
    write("metadata", "calibrated.json", compact(plain | {"activation_amax": amax,
                                                          "key_mean": [[0, -1.5, 2e-3, 3], [1, 1, -1, 1]]}))


def make_prompts():
    write("prompts", "all.jsonl", '"Once upon a time"\n\n{"prompt":"Hi \\u00e9\\n","max_tokens":20,"temperature":0.5,'
          '"top_k":40,"top_p":0.9,"min_p":0.05,"seed":7,"stop":["\\n\\n","x"]}\n{"prompt":"","stop":"x","seed":null}\n')
    write("prompts", "one.jsonl", '{"prompt": "x", "max_tokens": -1}')


def main():
    shutil.rmtree(ROOT, ignore_errors=True)
    for make in (make_safetensors, make_index, make_gguf, make_configs, make_tokenizers, make_models, make_templates,
                 make_metadata, make_prompts):
        make()


main()
