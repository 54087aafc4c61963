"""What planning needs to know of a stored `cpu_int4` model: config.json and safetensors headers, nothing else.

Does: read shapes, stored bytes and what stays bf16. Does not: read weights, import torch, judge. Rules: sizes come
from the tensors that are there, not from the configuration; a field that the configuration does not have and that
no other field implies is a ModelError, never a guess; a nested `text_config` wins over the level above it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance import parsers
from appliance.errors import ModelError
from appliance.facts import KeptLayer, ModelFacts
from appliance.importing.safetensors import Entry, read_header
from appliance.importing.source import merge_headers, read_config, weight_files
from appliance.importing.template import read as read_template
from appliance.quantize.format import (
    FUSED,
    HEADS,
    PACKED,
    QUANT_METHOD,
    SCALE,
    TABLES,
    ZERO,
    Int4Config,
    choose_group,
    parse_config,
)

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length",
                                "max_seq_len"),
}
_FOUR_TIMES = ("gpt2", "gptj", "gpt_bigcode", "bloom", "falcon")
"""Model types whose feed-forward part is four times as wide as the model where the configuration does not say."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_model(path: Path, *, name: str, digest: str) -> ModelFacts:
    """The facts of a model folder. Raises ModelError when it is not a whole `cpu_int4` checkpoint."""
    config = read_config(path)
    text = _text_config(config)
    raw = text.get("quantization_config")
    if not isinstance(raw, Mapping) or raw.get("quant_method") != QUANT_METHOD:
        raise ModelError(f"{path} is not a {QUANT_METHOD} model", do="add it with `applianctl model add`")
    int4 = parse_config(raw)
    tensors = {tensor: entry for tensor, (_, entry) in
               merge_headers(path, {file: read_header(file) for file in weight_files(path)}).items()}
    heads = _whole(text, "num_attention_heads", path)
    hidden = _whole(text, "hidden_size", path)
    layers = _whole(text, "num_hidden_layers", path)
    stored_head = any(_kind(tensor) == "head" for tensor in tensors)
    tied = bool(text.get("tie_word_embeddings", not stored_head))
    if tied:  # a head that is stored beside a tied table is never loaded
        tensors = {tensor: entry for tensor, entry in tensors.items() if _kind(tensor) != "head"}
    sizes = {kind: sum(e.bytes for tensor, e in tensors.items() if _kind(tensor) == kind)
             for kind in ("linear", "table", "head", "kept")}
    parameters = sum(_parameters(tensor, entry, int4) for tensor, entry in tensors.items())
    window, windowed = _window(text, layers)
    report, template = _report(path), read_template(path)
    tried = report.get("template") or {}
    return ModelFacts(
        name=name,
        digest=digest,
        architecture=str(config["architectures"][0]),
        layers=layers,
        hidden_size=hidden,
        intermediate_size=_intermediate(text, hidden, path),
        heads=heads,
        kv_heads=_key_value_heads(text, heads),
        head_dim=text.get("head_dim") or hidden // heads,
        vocab_size=_whole(text, "vocab_size", path),
        max_context=_whole(text, "max_position_embeddings", path),
        short_context=_short_context(text),
        sliding_window=window,
        sliding_layers=windowed,
        tied=tied,
        parameters=parameters,
        group_size=int4.group_size,
        group_size_overrides=dict(int4.group_size_overrides),
        quantize_embedding=int4.quantize_embedding,
        linear_bytes=sizes["linear"],
        table_bytes=sizes["table"] + sizes["head"],
        kept_bytes=sizes["kept"],
        largest_linear=_largest_linear(tensors),
        kept=_kept(tensors, int4, _recorded_reasons(report)),
        experts=next((int(text[field]) for field in _EXPERTS if text.get(field)), 0),
        chat=template is not None and not tried.get("fault"),
        roles=tuple(str(role) for role in tried.get("roles") or ()),
        template_marks=parsers.marks(template),
        absent_tokens=_absent_tokens(path),
        template_fault=str(tried.get("fault") or ""),
        dtype=str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"),
        bits_per_weight=round(8 * sum(sizes.values()) / max(parameters, 1), 3),
        quantization=dict(raw),
    )


def _absent_tokens(path: Path) -> tuple[str, ...]:
    """What the vocabulary lacks; nothing where tokenizer.json does not tell (another kind of tokenizer)."""
    try:
        return parsers.absent((path / "tokenizer.json").read_text("utf-8"))
    except (OSError, ValueError):
        return ()


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def _first(text: Mapping[str, Any], field: str) -> int | None:
    """The field's value under the first of its names that has one."""
    for alias in _ALIASES.get(field, (field,)):
        value = text.get(alias)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _intermediate(text: Mapping[str, Any], hidden: int, path: Path) -> int:
    if text.get("model_type") in _FOUR_TIMES and _first(text, "intermediate_size") is None:
        return 4 * hidden
    return _whole(text, "intermediate_size", path)


def _key_value_heads(text: Mapping[str, Any], heads: int) -> int:
    """As vLLM counts them: by the names in use, one for `multi_query` models, else as many as heads."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return _first(text, "num_key_value_heads") or heads


def _whole(text: Mapping[str, Any], field: str, path: Path) -> int:
    if (value := _first(text, field)) is not None:
        return value
    raise ModelError(f"{path / 'config.json'} is not complete", why=f"`{field}` is missing or not a whole number",
                     do="use a model that was saved with transformers")


def _short_context(text: Mapping[str, Any]) -> int | None:
    """Where the rotation is LongRoPE: how many tokens its short factors are for."""
    rotation = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rotation, Mapping):
        return None
    if (rotation.get("rope_type") or rotation.get("type")) not in ("longrope", "su"):
        return None
    length = rotation.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    most = _first(text, "max_position_embeddings") or 0
    return length if isinstance(length, int) and not isinstance(length, bool) and 0 < length < most else None


def _window(text: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Window in tokens and number of layers that have it, as the architectures define it."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or window <= 0 or text.get("use_sliding_window") is False:
        return None, 0
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        count = sum(kind == "sliding_attention" for kind in kinds)
    elif text.get("use_sliding_window") and isinstance(text.get("max_window_layers"), int):
        count = max(0, layers - int(text["max_window_layers"]))  # Qwen2: the layers from this one on
    elif isinstance(pattern := text.get("sliding_window_pattern"), int) and pattern > 0:
        count = layers - layers // pattern  # Gemma 3: every pattern-th layer sees everything
    elif text.get("model_type") == "gemma2":
        count = (layers + 1) // 2
    else:
        count = layers
    return (window, count) if count else (None, 0)


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _kind(tensor: str) -> str:
    """`table`, `head`, `linear` (an int4 part of one) or `kept`."""
    module = _module(tensor).rpartition(".")[2]
    if module in TABLES:
        return "table"
    if module in HEADS:
        return "head"
    return "linear" if tensor.endswith((f".{PACKED}", f".{SCALE}", f".{ZERO}")) else "kept"


def _parameters(tensor: str, entry: Entry, int4: Int4Config) -> int:
    if tensor.endswith(f".{PACKED}"):
        return math.prod(entry.shape) * 8 // int4.bits_of(_module(tensor))
    return 0 if tensor.endswith((f".{SCALE}", f".{ZERO}")) else math.prod(entry.shape)


def _largest_linear(tensors: Mapping[str, Entry]) -> tuple[int, int]:
    """[N, K] of the largest int4 linear after fusion; fused parts of one layer add up their rows."""
    fused: dict[str, tuple[int, int]] = {}
    parts = {part: whole for whole, members in FUSED.items() for part in members}
    for tensor, entry in tensors.items():
        if tensor.endswith(f".{PACKED}") and _kind(tensor) == "linear":
            head, _, last = _module(tensor).rpartition(".")
            module = f"{head}.{parts.get(last, last)}"
            n, _ = fused.get(module, (0, 0))
            fused[module] = (n + entry.shape[0], 2 * entry.shape[1])
    return max(fused.values(), key=lambda shape: shape[0] * shape[1], default=(0, 0))


def _kept(tensors: Mapping[str, Entry], int4: Int4Config, recorded: Mapping[str, str]) -> tuple[KeptLayer, ...]:
    """Matrices that stay bf16 and why (case 33); the experts of one layer are one entry."""
    found: dict[str, tuple[str, int]] = {}
    for tensor, entry in tensors.items():
        if tensor.endswith((f".{PACKED}", f".{SCALE}", f".{ZERO}")):
            continue
        if len(entry.shape) < 2:
            continue
        module, reason = _module(tensor), recorded.get(_module(tensor), "")
        experts = re.match(r"(.*\bexperts)\b", tensor)
        if experts:
            module, reason = experts[1], "expert weights are not quantized"
        reason = reason or _reason(module, entry, int4)
        found[module] = (reason, found.get(module, ("", 0))[1] + entry.bytes)
    return tuple(KeptLayer(name=module, reason=reason, bytes=size) for module, (reason, size) in found.items())


def _reason(module: str, entry: Entry, int4: Int4Config) -> str:
    if _kind(f"{module}.weight") in ("table", "head"):
        return "table and head are kept by the recipe"
    if len(entry.shape) != 2:
        return "not a matrix"
    if choose_group(entry.shape[1], int4.group_of(module)) is None:
        return f"no allowed group size divides {entry.shape[1]} columns"
    if any(module == name or module.endswith(f".{name}") for name in int4.ignore):
        return "named in the ignore list"
    return "not a linear layer of the transformer"


def _report(path: Path) -> Mapping[str, Any]:
    """What the conversion reported; empty where nothing is recorded."""
    try:
        report = json.loads((path / "manifest.json").read_text("utf-8"))["report"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return report if isinstance(report, Mapping) else {}


def _recorded_reasons(report: Mapping[str, Any]) -> dict[str, str]:
    """Module -> reason, from the report of the conversion where there is one."""
    try:
        return {str(entry["name"]).removesuffix(".weight"): str(entry["reason"]) for entry in report["kept"]}
    except (KeyError, TypeError):
        return {}
