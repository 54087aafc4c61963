"""A GGUF file as the normal form: Hugging Face config from its metadata, tensors under Hugging Face names.

`gguf_header` reads the header within bounds, `gguf_architectures` says how a family maps; the data is read later, by
rows, from the offsets of the header. Runs in the worker's environment. Rules: every tensor of the file is mapped or
the file is refused, and every tensor the architecture needs is present; the row order that llama.cpp gives q and k for
its rotary kernel is undone; without `output.weight` the head is tied.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.errors import ModelError
from appliance.importing.gguf_architectures import (
    ARCHITECTURES,
    OUTER,
    Architecture,
    Metadata,
    Unmapped,
    as_decimal,
    unmapped,
)
from appliance.importing.gguf_header import AGAIN, read_header
from appliance.importing.shapes import shape_refusal
from appliance.importing.source import Source
from appliance.importing.tensors import FLOATS, GGUF_DECODED, NormalForm, StoredTensor

SAME_MODEL = "use the safetensors folder of the same model"
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Not weights: they become fields of config.json."""
LONGEST_HEAD = 4096


def open_gguf(source: Source) -> NormalForm:
    """Map an inspected GGUF file (all parts of a split one). Raises ModelError with one line when it cannot be used."""
    fields, stored = _read(source)
    name = str(fields.get("general.architecture"))
    arch = ARCHITECTURES.get(name)
    if arch is None:
        known = ", ".join(ARCHITECTURES)
        raise _refuse(source, f"architecture {name!r} is not supported (supported: {known})", SAME_MODEL)
    try:
        config = _config(Metadata(prefix=name, fields=fields, present=frozenset(stored)), arch, stored)
    except Unmapped as unmapped:
        raise _refuse(source, str(unmapped), SAME_MODEL) from None
    tensors = _rename(source, name, arch, config, stored)
    if reason := shape_refusal(config, {hf: tensor.shape for hf, tensor in tensors.items()}):
        raise _refuse(source, reason, "download the file again")

    def write_extras(out: Path) -> None:
        from appliance.importing.gguf_tokenizer import write_tokenizer

        write_tokenizer(source.path, fields, int(config["vocab_size"]), out)
        generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
        (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")

    return NormalForm(kind="gguf", config=config, tensors=tensors, write_extras=write_extras)


def _refuse(source: Source, why: str, do: str) -> ModelError:
    return ModelError(f"{source.path} cannot be used", why=why, do=do)


def _read(source: Source) -> tuple[Mapping[str, Any], dict[str, StoredTensor]]:
    """Metadata of the first part and the tensors of all parts, under their GGUF names."""
    fields: Mapping[str, Any] = {}
    stored: dict[str, StoredTensor] = {}
    for part in source.weights:
        header = read_header(part)
        fields = fields or header.fields
        for name, t in header.tensors.items():
            if name in stored:
                raise _refuse(source, f"tensor {name} stands in two of its parts", AGAIN)
            if t.kind not in (*GGUF_DECODED, *FLOATS):
                raise _refuse(source, f"tensor {name} has the type {t.kind}, which is not supported",
                              "use a file of a common type, such as Q4_K_M or Q8_0")
            stored[name] = StoredTensor(name=name, file=part, offset=t.offset, bytes=t.bytes, shape=t.shape,
                                        kind=t.kind)
    declared = fields.get("split.count") or 1
    if not isinstance(declared, int) or declared > len(source.weights):
        raise _refuse(source, f"it is one of {declared} parts and its name does not tell the others",
                      "give the part named ...-00001-of-... with all parts beside it")
    return fields, stored


def _config(m: Metadata, arch: Architecture, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """config.json. Raises Unmapped."""
    table = stored.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise Unmapped("it has no matrix token_embd.weight")
    hidden, heads, layers = (m.whole(k) for k in ("embedding_length", "attention.head_count", "block_count"))
    if heads < 1 or not 1 <= layers <= len(stored):
        raise Unmapped(f"its metadata says {heads} heads and {layers} layers")
    config: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": m.whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": m.whole("attention.head_count_kv", heads),
        "head_dim": m.whole("attention.key_length", hidden // heads),
        "max_position_embeddings": m.whole("context_length"),
        "rope_theta": m.decimal("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if m.whole("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise Unmapped("its keys and values have different widths")
    if config["head_dim"] < 2 or config["head_dim"] % 2:
        raise Unmapped(f"its heads are {config['head_dim']} wide")
    if reason := unmapped(arch, m, int(config["head_dim"])):
        raise Unmapped(reason)
    for biases in arch.biases:
        if biases.flag:
            config[biases.flag] = f"blk.0.{biases.modules[0]}.bias" in stored
    config.update(arch.extra(m, config))
    factors = [name for name in ROPE_FACTORS if name in stored]
    if "rope_parameters" in config and factors:
        raise Unmapped(f"its {factors[0]} is not supported")
    if "rope_parameters" not in config and (scaling := _rope_scaling(m, stored, config)):
        config["rope_scaling"] = scaling
    config.update(_token_ids(m.fields))
    return config


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """bos, pad and eos ids; several end tokens (end of turn, end of message) become a list."""

    def found(key: str) -> int | None:
        value = fields.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    ids: dict[str, Any] = {}
    for ours, theirs in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if found(theirs) is not None:
            ids[ours] = found(theirs)
    ends = [found(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if unique:
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return ids


def _rope_scaling(m: Metadata, stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, factor = m.rope_scaling()
    for factors in (stored[name] for name in ROPE_FACTORS if name in stored):
        if len(factors.shape) != 1 or factors.parameters > LONGEST_HEAD:
            raise Unmapped(f"its {factors.name} has the shape {list(factors.shape)}")
    if "rope_freqs.weight" in stored:
        return _llama3_scaling(stored["rope_freqs.weight"], config)
    long, short = (stored.get(f"rope_factors_{reach}.weight") for reach in ("long", "short"))
    if long is not None and short is not None:
        return {"rope_type": "longrope", "long_factor": _values(long), "short_factor": _values(short)}
    if long is not None or short is not None:
        raise Unmapped("of its long and short rope factors one is missing")
    if kind in ("none", "longrope"):
        return None
    if kind not in ("linear", "yarn"):
        raise Unmapped(f"rope scaling {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = m.whole("rope.scaling.original_context_length")
    return scaling


def _values(tensor: StoredTensor) -> list[float]:
    from appliance.importing.tensors import float_rows

    return [as_decimal(value) for value in float_rows(tensor, 0, tensor.rows).flatten().tolist()]


def _llama3_scaling(factors: StoredTensor, config: Mapping[str, Any]) -> dict[str, Any]:
    """The Llama 3 scaling whose per-frequency factors are these; the file holds the factors, not their parameters.

    All published Llama 3 models use low 1, high 4 and an original context of 8192 (source: their config.json);
    the formula is recomputed and must agree, or the file is refused.
    """
    import torch

    from appliance.importing.tensors import float_rows

    found = float_rows(factors, 0, factors.rows).flatten().double()
    factor, low, high, original = round(float(found.max()), 3), 1.0, 4.0, 8192
    dim = int(config["head_dim"])
    if len(found) != dim // 2:
        raise Unmapped(f"its rope_freqs are {len(found)} for heads of {dim} columns")
    frequency = float(config["rope_theta"]) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    wavelength = 2 * torch.pi / frequency
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not bool(torch.allclose(found, expected, rtol=1e-3)):
        raise Unmapped("its rope_freqs are not those of a known Llama 3 scaling")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}


def _names(arch: Architecture, config: Mapping[str, Any]) -> dict[str, str]:
    """Every tensor of this model that must be in the file -> its Hugging Face name."""
    outer = {gguf: hf for gguf, hf in OUTER.items() if gguf != "output" or not config["tie_word_embeddings"]}
    biased = {module for biases in arch.biases if biases.always or config.get(biases.flag)
              for module in biases.modules}
    places: list[tuple[Mapping[str, str], str, str]] = [(outer, "", "")]
    places += [(arch.layer, f"blk.{i}.", f"model.layers.{i}.") for i in range(int(config["num_hidden_layers"]))]
    names = {}
    for modules, ours, theirs in places:
        for gguf, hf in modules.items():
            for part in ("weight", "bias") if gguf in biased else ("weight",):
                names[f"{ours}{gguf}.{part}"] = f"{theirs}{hf}.{part}"
    return names


def _rename(source: Source, name: str, arch: Architecture, config: Mapping[str, Any],
            stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    rest = {gguf: tensor for gguf, tensor in stored.items() if gguf not in ROPE_FACTORS}
    tensors: dict[str, StoredTensor] = {}
    for gguf, hf in _names(arch, config).items():
        tensor = rest.pop(gguf, None)
        if tensor is None:
            raise _refuse(source, f"tensor {gguf} is missing", AGAIN)
        why = _shape_refusal(tensor, gguf.split(".")[-2], config)
        if why:
            raise _refuse(source, why, AGAIN)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(gguf.split(".")[-2])
        tensors[hf] = dataclasses.replace(
            tensor, name=hf, rotary_heads=int(config[heads]) if heads and arch.rotary else None,
            shift=arch.norm_shift if "norm" in gguf else 0.0)
    if rest:
        why = f"{len(rest)} tensors do not belong to a {name} model, the first is {min(rest)}"
        raise _refuse(source, why, SAME_MODEL)
    return tensors


def _shape_refusal(tensor: StoredTensor, module: str, config: Mapping[str, Any]) -> str | None:
    """Why this tensor contradicts the metadata, or None."""
    hidden, mlp, width = (int(config[key]) for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (int(config[key]) * width for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
              "attn_output": (hidden, queries), "ffn_gate": (mlp, hidden), "ffn_up": (mlp, hidden),
              "ffn_down": (hidden, mlp), "token_embd": (config["vocab_size"], hidden),
              "output": (config["vocab_size"], hidden), "attn_qkv": (queries + 2 * keys, hidden)}
    if config["model_type"] == "phi3":
        shapes["ffn_up"] = (2 * mlp, hidden)
    wanted = shapes.get(module)
    vector = len(tensor.shape) == 1
    if module in ("attn_q", "attn_k") and wanted and tensor.shape[0] != wanted[0]:
        key = "num_attention_heads" if module == "attn_q" else "num_key_value_heads"
        return f"tensor {tensor.name} has {tensor.shape[0]} rows, not {config[key]} heads of {width}"
    if wanted is None:
        return None if vector else f"tensor {tensor.name} has the shape {list(tensor.shape)}, not one dimension"
    if tensor.shape != (wanted[:1] if vector else wanted) or vector != tensor.name.endswith(".bias"):
        return f"tensor {tensor.name} has the shape {list(tensor.shape)}, not {list(wanted)}"
    return None
