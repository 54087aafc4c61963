"""Damaged and hostile model files, made from whole ones: case NUMBER of a KIND is the same everywhere and always.

`make(kind, number)` gives the files of a folder (or one GGUF file) as bytes. Half of the cases change what a format says
(a shape, an offset, a name), with everything around it kept right, so that they get past the outer checks; the others
change bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

KINDS = ("safetensors", "index", "config", "gguf", "int4")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 80, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}
FOREIGN = (b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", b"<!DOCTYPE html><html></html>", b"PK\x03\x04" + bytes(200),
           b"\x80\x02}q\x00.", b"GGUF" + bytes(60), b"\x7fELF" + bytes(100), b"{}", b"[]", b"null", b"\xff" * 64, b"[" * 200_000, b'{"a":' * 100_000)
NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 3, 7, 15, 16, 17, 32, 63, 64, 65, 96, 128, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 53,
                            (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 200, -(1 << 63), 1.0, 64.0, 0.5, 1e308, float("nan"), float("inf"))
ODD: tuple[Any, ...] = (None, True, False, "", "64", "x" * 5000, [], {}, [[]], {"a": {}}, ["LlamaForCausalLM"], [None], "../../../etc/passwd", "\u0000", "\ud800",
                        "/dev/zero", "model.safetensors")
NAMES = ("../../etc/passwd", "/etc/passwd", "..", ".", "", "model.safetensors/../x", "a\x00b.safetensors", "x" * 300 + ".safetensors", "sub/model.safetensors",
         "pytorch_model.bin", "model-00003-of-00002.safetensors", "CON", "\u202e.safetensors", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight",
         "model.layers.99999999999.mlp.up_proj.weight", "__metadata__")


def shapes(config: dict[str, Any] = CONFIG) -> dict[str, list[int]]:
    h, m, v, q, kv = 64, 96, 80, 64, 32
    found = {"model.embed_tokens.weight": [v, h], "model.norm.weight": [h], "lm_head.weight": [v, h]}
    for i in range(config["num_hidden_layers"]):
        a, b = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        found |= {f"{a}q_proj.weight": [q, h], f"{a}k_proj.weight": [kv, h], f"{a}v_proj.weight": [kv, h], f"{a}o_proj.weight": [h, q],
                  f"{b}gate_proj.weight": [m, h], f"{b}up_proj.weight": [m, h], f"{b}down_proj.weight": [h, m],
                  f"model.layers.{i}.input_layernorm.weight": [h], f"model.layers.{i}.post_attention_layernorm.weight": [h]}
    return found


Pairs = list[tuple[str, Any]]


def header(tensors: dict[str, tuple[str, list[int]]]) -> Pairs:
    found: Pairs = []
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * {"BF16": 2, "U8": 1}[dtype]
        found.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}))
        position += size
    return found


def dump(pairs: Any) -> bytes:
    """JSON of pairs that may hold one name twice."""
    if isinstance(pairs, list) and all(isinstance(one, tuple) for one in pairs):
        text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs) + "}"
    else:
        text = json.dumps(pairs)
    return text.encode("utf-8", "surrogatepass")


def file_of(pairs: Any, data_bytes: int, *, claimed: int | None = None) -> bytes:
    text = dump(pairs)
    return struct.pack("<Q", (len(text) if claimed is None else claimed) & (1 << 64) - 1) + text + bytes(data_bytes)


def end_of(pairs: Pairs) -> int:
    return max((value["data_offsets"][1] for _, value in pairs), default=0)


def folder() -> tuple[dict[str, bytes], list[Pairs]]:
    """A whole model in two shards, and the headers of the shards."""
    all_tensors = {name: ("BF16", shape) for name, shape in shapes().items()}
    names = list(all_tensors)
    parts = [header({name: all_tensors[name] for name in names[: len(names) // 2]}), header({name: all_tensors[name] for name in names[len(names) // 2:]})]
    files = {f"model-{i:05d}-of-00002.safetensors": file_of(part, end_of(part)) for i, part in enumerate(parts, 1)}
    weight_map = {name: f"model-{i:05d}-of-00002.safetensors" for i, part in enumerate(parts, 1) for name, _ in part}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
    files["config.json"] = json.dumps(CONFIG).encode()
    files["tokenizer.json"] = b"{}"
    files["tokenizer_config.json"] = b'{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}'
    return files, parts


def int4_folder() -> tuple[dict[str, bytes], Pairs]:
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            tensors[name] = ("BF16", shape)
        else:
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.weight_packed": ("U8", [shape[0], shape[1] // 2]), f"{module}.weight_scale": ("BF16", [shape[0], shape[1] // 32]),
                        f"{module}.weight_zero": ("BF16", [shape[0], shape[1] // 32])}
    pairs = header(tensors)
    config = {**CONFIG, "quantization_config": {"quant_method": "cpu_int4", "group_size": 32}}
    return {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", "model.safetensors": file_of(pairs, end_of(pairs))}, pairs


def gguf_parts() -> tuple[list[tuple[str, int, Any]], list[tuple[str, list[int], int, int]]]:
    """Metadata (key, type, value) and tensors (name, dimensions, type, offset) of a small llama with its tokenizer."""
    tokens = ["<|endoftext|>", "<s>", "</s>", *[chr(33 + i) for i in range(75)], '!"', "#$"]
    fields: list[tuple[str, int, Any]] = [
        ("general.architecture", 8, "llama"), ("llama.block_count", 4, 1), ("llama.context_length", 4, 128), ("llama.embedding_length", 4, 64),
        ("llama.feed_forward_length", 4, 96), ("llama.attention.head_count", 4, 4), ("llama.attention.head_count_kv", 4, 2),
        ("llama.attention.layer_norm_rms_epsilon", 6, 1e-5), ("llama.rope.freq_base", 6, 10000.0), ("llama.rope.dimension_count", 4, 16),
        ("tokenizer.ggml.model", 8, "gpt2"), ("tokenizer.ggml.pre", 8, "smollm"), ("tokenizer.ggml.tokens", 9, (8, tokens)),
        ("tokenizer.ggml.token_type", 9, (5, [3, 3, 3, *[1] * 77])), ("tokenizer.ggml.merges", 9, (8, ["! \"", "# $"])),
        ("tokenizer.ggml.bos_token_id", 4, 1), ("tokenizer.ggml.eos_token_id", 4, 2),
    ]
    found, position = [], 0
    table = {"token_embd.weight": [64, 80], "output_norm.weight": [64], "output.weight": [64, 80], "blk.0.attn_q.weight": [64, 64],
             "blk.0.attn_k.weight": [64, 32], "blk.0.attn_v.weight": [64, 32], "blk.0.attn_output.weight": [64, 64], "blk.0.ffn_gate.weight": [64, 96],
             "blk.0.ffn_up.weight": [64, 96], "blk.0.ffn_down.weight": [96, 64], "blk.0.attn_norm.weight": [64], "blk.0.ffn_norm.weight": [64]}
    for name, dimensions in table.items():
        kind = 0 if len(dimensions) == 1 else 8
        found.append((name, dimensions, kind, position))
        position += math.prod(dimensions) * 4 if kind == 0 else math.prod(dimensions) // 32 * 34
        position += -position % 32
    return fields, found


FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def gguf_text(value: Any) -> bytes:
    data = str(value).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind: int, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if kind == 8:
        return gguf_text(value)
    if kind == 9:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(gguf_value(inner, one) for one in items)
    form = FORMATS.get(kind)
    if form is None:
        return b"\x00" * 8
    try:
        return struct.pack("<" + form, value)
    except (struct.error, OverflowError, TypeError):
        return b"\xff" * struct.calcsize(form)


def gguf_file(fields: Any, tensors: Any, *, version: int = 3, counts: tuple[int, int] | None = None, data_bytes: int | None = None) -> bytes:
    kv = b"".join(gguf_text(key) + struct.pack("<I", kind & 0xFFFFFFFF) + gguf_value(kind, value) for key, kind, value in fields)
    infos = b"".join(gguf_text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d & (1 << 64) - 1) for d in dims)
                     + struct.pack("<IQ", kind & 0xFFFFFFFF, offset & (1 << 64) - 1) for name, dims, kind, offset in tensors)
    n_tensors, n_fields = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version & 0xFFFFFFFF, n_tensors & (1 << 64) - 1, n_fields & (1 << 64) - 1) + kv + infos
    head += bytes(-len(head) % 32)
    return head + bytes(gguf_data_bytes() if data_bytes is None else data_bytes)


def gguf_data_bytes() -> int:
    _, tensors = gguf_parts()
    _name, dims, _kind, offset = tensors[-1]
    return offset + math.prod(dims) * 4


def change_bytes(data: bytes, rng: Random) -> bytes:
    """One to four changes of bytes, or something else altogether."""
    if rng.random() < 0.05:
        return rng.choice(FOREIGN)
    body = bytearray(data)
    near = min(len(body), 3000)  # where headers are
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(near + 1) if near else 0
        change = rng.randrange(6)
        if change == 0 and at < len(body):
            body[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            body[at:at] = rng.randbytes(rng.randint(1, 16))
        elif change == 2:
            del body[at:at + rng.randint(1, 64)]
        elif change == 3 and rng.random() < 0.5:
            del body[rng.randrange(len(body) + 1):]
        elif change == 4 and at + 8 <= len(body):
            body[at:at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1, rng.getrandbits(64))))
        else:
            body += rng.randbytes(rng.randint(1, 64))
    return bytes(body)


def change_json(value: Any, rng: Random, depth: int = 0) -> Any:
    """One value somewhere inside replaced by an odd one."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.7):
        key = rng.choice(list(value))
        change = rng.randrange(5)
        if change == 0:
            return {k: v for k, v in value.items() if k != key}
        if change == 1:
            return {**value, rng.choice(NAMES): value[key]}
        return {**value, key: change_json(value[key], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], change_json(value[at], rng, depth + 1), *value[at + 1:]]
    return rng.choice(NUMBERS if rng.random() < 0.6 else ODD)


def change_header(pairs: Pairs, rng: Random) -> tuple[Any, int, int | None]:
    """A safetensors header with one lie, the bytes of data behind it, and a claimed length (None: the true one)."""
    pairs = [(name, json.loads(json.dumps(value))) for name, value in pairs]
    end, claimed = end_of(pairs), None
    at = rng.randrange(len(pairs))
    name, entry = pairs[at]
    change = rng.randrange(14)
    if change == 0:
        entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(NUMBERS)
    elif change == 1:
        entry["data_offsets"][rng.randrange(2)] = rng.choice(NUMBERS)
    elif change == 2:
        entry["dtype"] = rng.choice(("F32", "F16", "I64", "U8", "F8_E4M3", "BOOL", "F4", "", 7, None, ["BF16"]))
    elif change == 3:
        pairs.append((name, entry))  # twice
    elif change == 4:
        pairs[at] = (rng.choice(NAMES), entry)
    elif change == 5:
        del pairs[at]
    elif change == 6:  # shape turned, bytes right
        entry["shape"] = rng.choice((list(reversed(entry["shape"])), [math.prod(entry["shape"])], [1, *entry["shape"]], [*entry["shape"], 1],
                                     [2, math.prod(entry["shape"]) // 2], [1] * 17 + [math.prod(entry["shape"])]))
    elif change == 7:  # two tensors share their bytes
        other = pairs[rng.randrange(len(pairs))][1]
        entry["data_offsets"] = list(other["data_offsets"])
        entry["shape"] = list(other["shape"])
    elif change == 8:
        claimed = rng.choice((0, 1, 7, 8, 1 << 20, 26_000_000, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1, len(dump(pairs)) + 1, len(dump(pairs)) - 1))
    elif change == 9:
        end += rng.choice((-1, 1, -2, 8, -end))
    elif change == 10:
        pairs.append(("__metadata__", rng.choice((*ODD, {"a": "b" * 100_000}))))
    elif change == 11:
        return change_json(dict(pairs), rng), end, None
    elif change == 12:  # dtype and shape changed together: the bytes are right, the meaning is not
        entry["dtype"], entry["shape"] = "U8", [*entry["shape"][:-1], 2 * entry["shape"][-1]]
    else:
        rng.shuffle(pairs)
        pairs[0][1]["extra"] = rng.choice(ODD)
    return pairs, max(0, end), claimed


def make(kind: str, number: int) -> dict[str, bytes]:
    """The files of one case; a GGUF case has the single file `model.gguf`."""
    rng = Random(f"{kind}-{number}")
    structured = rng.random() < 0.6
    makers: dict[str, Callable[[Random, bool], dict[str, bytes]]] = {
        "safetensors": _safetensors, "index": _index, "config": _config, "gguf": _gguf, "int4": _int4}
    return makers[kind](rng, structured)


def _safetensors(rng: Random, structured: bool) -> dict[str, bytes]:
    files, parts = folder()
    which = rng.randrange(2)
    name = f"model-{which + 1:05d}-of-00002.safetensors"
    if structured:
        pairs, size, claimed = change_header(parts[which], rng)
        files[name] = file_of(pairs, size, claimed=claimed)
        if rng.random() < 0.5:
            del files["model.safetensors.index.json"]
    else:
        files[name] = change_bytes(files[name], rng)
    return files


def _index(rng: Random, structured: bool) -> dict[str, bytes]:
    files, _ = folder()
    name = "model.safetensors.index.json"
    if not structured:
        files[name] = change_bytes(files[name], rng)
        return files
    whole = json.loads(files[name])
    change = rng.randrange(5)
    if change == 0:
        whole["weight_map"][rng.choice(list(whole["weight_map"]))] = rng.choice(NAMES)
    elif change == 1:
        whole["weight_map"][rng.choice(NAMES)] = rng.choice(list(whole["weight_map"].values()))
    elif change == 2:
        one = rng.choice(list(whole["weight_map"]))
        whole["weight_map"][one] = next(name for name in files if name.endswith(".safetensors") and name != whole["weight_map"][one])
    elif change == 3:
        whole = change_json(whole, rng)
    else:
        pairs = list(whole["weight_map"].items())
        pairs.append((pairs[rng.randrange(len(pairs))][0], rng.choice(NAMES)))
        files[name] = b'{"weight_map":' + dump(pairs) + b"}"
        return files
    files[name] = json.dumps(whole).encode("utf-8", "surrogatepass")
    return files


def _config(rng: Random, structured: bool) -> dict[str, bytes]:
    files, _ = folder()
    if not structured:
        files["config.json"] = change_bytes(files["config.json"], rng)
        return files
    config = dict(CONFIG)
    change = rng.randrange(8)
    if change < 4:
        config[rng.choice(list(config))] = rng.choice(NUMBERS if rng.random() < 0.7 else ODD)
    elif change == 4:
        config = change_json(config, rng)
    elif change == 5:
        config[rng.choice(("text_config", "quantization_config", "compression_config", "auto_map", "rope_scaling", "layer_types", "sliding_window"))] = rng.choice(
            (*ODD, {"quant_method": "cpu_int4"}, {"quant_method": "gptq"}, {"load_in_4bit": True}, {"hidden_size": 7}, 4096))
    elif change == 6:
        config["architectures"] = [rng.choice(("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "EvilForCausalLM", "", 7, None))]
    else:
        config = {key: config[key] for key in rng.sample(list(config), rng.randint(0, len(config)))}
    files["config.json"] = json.dumps(config).encode("utf-8", "surrogatepass")
    return files


def _int4(rng: Random, structured: bool) -> dict[str, bytes]:
    files, pairs = int4_folder()
    if not structured:
        name = rng.choice(("config.json", "model.safetensors"))
        files[name] = change_bytes(files[name], rng)
    elif rng.random() < 0.5:
        changed, size, claimed = change_header(pairs, rng)
        files["model.safetensors"] = file_of(changed, size, claimed=claimed)
    else:
        config = json.loads(files["config.json"])
        fields = ("group_size", "ignore", "quantize_embedding", "table_bits", "format_version", "group_size_overrides", "dequant_threshold", "kernel")
        if rng.random() < 0.6:
            config["quantization_config"][rng.choice(fields)] = rng.choice((*NUMBERS, *ODD, {"model.layers.0.self_attn.q_proj": 7}))
        else:
            config = change_json(config, rng)
        files["config.json"] = json.dumps(config).encode("utf-8", "surrogatepass")
    return files


def _gguf(rng: Random, structured: bool) -> dict[str, bytes]:
    fields, tensors = gguf_parts()
    if not structured:
        return {"model.gguf": change_bytes(gguf_file(fields, tensors), rng)}
    version, counts, data_bytes = 3, None, None
    at, field_at = rng.randrange(len(tensors)), rng.randrange(len(fields))
    name, dims, kind, offset = tensors[at]
    key, field_kind, value = fields[field_at]
    change = rng.randrange(14)
    whole = [number for number in NUMBERS if isinstance(number, int)]
    if change == 0:
        tensors[at] = (name, [rng.choice(whole) if i == 0 or rng.random() < 0.3 else d for i, d in enumerate(dims)], kind, offset)
    elif change == 1:
        tensors[at] = (name, dims, rng.choice((0, 1, 2, 3, 6, 8, 12, 14, 30, 31, 39, 99, -1)), offset)
    elif change == 2:
        tensors[at] = (name, dims, kind, rng.choice((*whole, offset + 1, offset + 32, offset - 32)))
    elif change == 3:
        tensors[at] = (rng.choice((*NAMES, tensors[0][0], "x" * 70_000)), dims, kind, offset)
    elif change == 4:
        del tensors[at]
    elif change == 5:
        counts = (rng.choice(whole), len(fields)) if rng.random() < 0.5 else (len(tensors), rng.choice(whole))
    elif change == 6:
        fields[field_at] = (key, rng.choice((0, 1, 4, 5, 6, 7, 8, 10, 11, 12, 13, 99, -1)), value if not isinstance(value, tuple) else 7)
    elif change == 7:
        fields[field_at] = (key, field_kind, rng.choice(whole) if field_kind == 4 else rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e-38))
                            if field_kind == 6 else rng.choice(NAMES) if field_kind == 8 else (rng.choice((0, 5, 8, 10)), []))
    elif change == 8:
        del fields[field_at]
    elif change == 9:
        fields.append(fields[field_at] if rng.random() < 0.5 else (rng.choice(("split.count", "general.alignment", "llama.expert_count", "llama.rope.scaling.type")), 4, rng.choice(whole)))
    elif change == 10:  # arrays in arrays
        fields.append(("deep", 9, struct.pack("<IQ", 9, 1) * rng.choice((1, 5, 500, 20_000)) + struct.pack("<IQI", 4, 1, 1)))
    elif change == 11:
        version = rng.choice((0, 1, 2, 4, 0x03000000))
    elif change == 12:
        data_bytes = rng.choice((0, gguf_data_bytes() - 1, gguf_data_bytes() + 1, gguf_data_bytes() - 4096))
    else:
        dims = list(dims)
        rng.shuffle(dims)
        tensors[at] = (name, rng.choice((dims, [*dims, 1], [], [1, *dims], [1] * 9, list(reversed(dims)))), kind, offset)
    return {"model.gguf": gguf_file(fields, tensors, version=version, counts=counts, data_bytes=data_bytes)}
