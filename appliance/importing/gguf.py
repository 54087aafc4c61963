"""A GGUF file as the normal form: Hugging Face config from its metadata, tensors under Hugging Face names.

The `gguf` package reads the metadata and the name table; the data is read later, by rows, from the offsets it gives.
Runs in the worker's environment. Covers the architectures in `ARCHITECTURES`; others are refused by name.
Rules: every tensor of the file is mapped or the file is refused, and every tensor the architecture needs is present;
the row order that llama.cpp gives q and k for its rotary kernel is undone; without `output.weight` the head is tied.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ModelError
from appliance.importing.source import Source
from appliance.importing.tensors import NormalForm, StoredTensor


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one GGUF architecture maps. `rotary`: q and k rows are permuted; `qkv_bias`, `qk_norm`: what layers hold.

    `qkv_bias` None: the file says so, by the tensors it has.
    """

    hf_class: str
    model_type: str
    rotary: bool
    qkv_bias: bool | None
    qk_norm: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(hf_class="LlamaForCausalLM", model_type="llama", rotary=True, qkv_bias=None, qk_norm=False),
    "qwen2": Architecture(hf_class="Qwen2ForCausalLM", model_type="qwen2", rotary=False, qkv_bias=True, qk_norm=False),
    "qwen3": Architecture(hf_class="Qwen3ForCausalLM", model_type="qwen3", rotary=False, qkv_bias=False, qk_norm=True),
}
SAME_MODEL = "use the safetensors folder of the same model"


def open_gguf(source: Source) -> NormalForm:
    """Map an inspected GGUF file (all parts of a split one). Raises ModelError with one line when it cannot be used."""
    fields, stored = _read(source)
    name = str(fields.get("general.architecture"))
    arch = ARCHITECTURES.get(name)
    if arch is None:
        known = ", ".join(ARCHITECTURES)
        raise _refuse(source, f"architecture {name!r} is not supported (supported: {known})", SAME_MODEL)
    if int(fields.get(f"{name}.expert_count") or 0) > 0:
        raise _refuse(source, "mixture-of-experts GGUF files are not supported", SAME_MODEL)
    config = _config(source, name, arch, fields, stored)
    tensors = _rename(source, name, arch, config, stored)

    def write_extras(out: Path) -> bool:
        from appliance.importing.gguf_tokenizer import write_tokenizer

        chat = write_tokenizer(source.path, fields, int(config["vocab_size"]), out)
        generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
        (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
        return chat

    return NormalForm(kind="gguf", config=config, tensors=tensors, write_extras=write_extras)


def _refuse(source: Source, why: str, do: str) -> ModelError:
    return ModelError(f"{source.path} cannot be used", why=why, do=do)


def _read(source: Source) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata of the first part and the tensors of all parts, under their GGUF names."""
    import gguf

    fields: dict[str, Any] = {}
    stored: dict[str, StoredTensor] = {}
    for part in source.weights:
        try:
            reader = gguf.GGUFReader(part)
            if not fields:
                fields = {key: field.contents() for key, field in reader.fields.items()}
            for t in reader.tensors:
                shape = tuple(int(n) for n in reversed(t.shape))
                stored[t.name] = StoredTensor(name=t.name, file=part, offset=int(t.data_offset), bytes=int(t.n_bytes),
                                              shape=shape, kind=t.tensor_type.name)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise ModelError(f"{part} is damaged or cut short", why=" ".join(str(error).split())[:120],
                             do="download the file again") from None
    declared = int(fields.get("split.count") or 1)
    if declared > len(source.weights):
        raise _refuse(source, f"it is one of {declared} parts and its name does not tell the others",
                      "give the part named ...-00001-of-... with all parts beside it")
    return fields, stored


def _number(source: Source, fields: Mapping[str, Any], key: str) -> Any:
    value = fields.get(key)
    if value is None or isinstance(value, (list, str)):
        raise _refuse(source, f"its metadata has no single number {key}", SAME_MODEL)
    return value


def _decimal(value: Any) -> float:
    """A float32 of the metadata as the decimal that was meant (1e-05, not 9.999999747378752e-06)."""
    import numpy

    return float(str(numpy.float32(value)))


def _config(source: Source, name: str, arch: Architecture, fields: Mapping[str, Any],
            stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    def number(key: str) -> Any:
        return _number(source, fields, f"{name}.{key}")

    table = stored.get("token_embd.weight")
    if table is None:
        raise _refuse(source, "it has no tensor token_embd.weight", "download the file again")
    def optional(key: str, default: int) -> int:
        return int(number(key)) if fields.get(f"{name}.{key}") is not None else default

    hidden, heads, layers = (int(number(k)) for k in ("embedding_length", "attention.head_count", "block_count"))
    if heads < 1 or not 1 <= layers <= len(stored):
        raise _refuse(source, f"its metadata says {heads} heads and {layers} layers", "download the file again")
    config: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": optional("attention.head_count_kv", heads),
        "head_dim": optional("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": int(number("context_length")),
        "rms_norm_eps": _decimal(number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(fields.get(f"{name}.rope.freq_base") or 10000.0),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if arch.qkv_bias is None:
        config["attention_bias"] = "blk.0.attn_q.bias" in stored
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in stored
    elif not arch.qkv_bias:
        config["attention_bias"] = False
    scaling = _rope_scaling(source, name, fields, stored, config)
    if scaling:
        config["rope_scaling"] = scaling
    config.update(_token_ids(fields))
    return config


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """bos, pad and eos ids; several end tokens (end of turn, end of message) become a list."""
    ids: dict[str, Any] = {}
    for ours, theirs in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if fields.get(f"tokenizer.ggml.{theirs}") is not None:
            ids[ours] = int(fields[f"tokenizer.ggml.{theirs}"])
    ends = [fields.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    unique = list(dict.fromkeys(int(end) for end in ends if end is not None))
    if unique:
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return ids


def _rope_scaling(source: Source, name: str, fields: Mapping[str, Any], stored: Mapping[str, StoredTensor],
                  config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = str(fields.get(f"{name}.rope.scaling.type") or "none")
    if "rope_freqs.weight" in stored:
        return _llama3_scaling(source, stored["rope_freqs.weight"], config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise _refuse(source, f"rope scaling {kind!r} is not supported", SAME_MODEL)
    scaling: dict[str, Any] = {"rope_type": kind,
                               "factor": _decimal(_number(source, fields, f"{name}.rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(
            _number(source, fields, f"{name}.rope.scaling.original_context_length"))
    return scaling


def _llama3_scaling(source: Source, factors: StoredTensor, config: Mapping[str, Any]) -> dict[str, Any]:
    """The Llama 3 scaling whose per-frequency factors are these; the file holds the factors, not their parameters.

    All published Llama 3 models use low 1, high 4 and an original context of 8192 (source: their config.json);
    the formula is recomputed and must agree, or the file is refused.
    """
    import torch

    from appliance.importing.tensors import float_rows

    found = float_rows(factors, 0, factors.rows).flatten().double()
    factor, low, high, original = round(float(found.max()), 3), 1.0, 4.0, 8192
    dim = int(config["head_dim"])
    frequency = float(config["rope_theta"]) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    wavelength = 2 * torch.pi / frequency
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found.shape != expected.shape or not bool(torch.allclose(found, expected, rtol=1e-3)):
        raise _refuse(source, "its rope_freqs are not those of a known Llama 3 scaling", SAME_MODEL)
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}


def _modules(arch: Architecture, config: Mapping[str, Any]) -> dict[str, bool]:
    """Hugging Face tensor names of this model -> whether they must be present."""
    biased = bool(arch.qkv_bias or config.get("attention_bias"))
    wanted = {"model.embed_tokens.weight": True, "model.norm.weight": True,
              "lm_head.weight": not config["tie_word_embeddings"]}
    for i in range(int(config["num_hidden_layers"])):
        layer = f"model.layers.{i}"
        for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            wanted[f"{layer}.self_attn.{module}.weight"] = True
            if biased and (module != "o_proj" or arch.qkv_bias is None):
                # Qwen2 has no bias on o; a llama file with attention_bias has one on all four.
                wanted[f"{layer}.self_attn.{module}.bias"] = True
        for module in ("gate_proj", "up_proj", "down_proj"):
            wanted[f"{layer}.mlp.{module}.weight"] = True
            if config.get("mlp_bias"):
                wanted[f"{layer}.mlp.{module}.bias"] = True
        for norm in ("input_layernorm", "post_attention_layernorm"):
            wanted[f"{layer}.{norm}.weight"] = True
        if arch.qk_norm:
            wanted[f"{layer}.self_attn.q_norm.weight"] = wanted[f"{layer}.self_attn.k_norm.weight"] = True
    return wanted


def _gguf_name(name: str, layers: int) -> Callable[[str], str | None]:
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    table = gguf.get_tensor_name_map(arch, layers)
    return lambda hf: table.get_name(hf, try_suffixes=(".weight", ".bias"))


def _rename(source: Source, name: str, arch: Architecture, config: Mapping[str, Any],
            stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    gguf_name = _gguf_name(name, int(config["num_hidden_layers"]))
    rest = dict(stored)
    rest.pop("rope_freqs.weight", None)
    tensors: dict[str, StoredTensor] = {}
    for hf, needed in _modules(arch, config).items():
        tensor = rest.pop(gguf_name(hf) or "", None)
        if tensor is None:
            if needed:
                raise _refuse(source, f"tensor {gguf_name(hf)} is missing", "download the file again")
            continue
        heads = None
        if ".q_proj." in hf:
            heads = int(config["num_attention_heads"])
        elif ".k_proj." in hf:
            heads = int(config["num_key_value_heads"])
        if heads is not None and tensor.shape[0] != heads * int(config["head_dim"]):
            why = f"tensor {tensor.name} has {tensor.shape[0]} rows, not {heads} heads of {config['head_dim']}"
            raise _refuse(source, why, "download the file again")
        tensors[hf] = dataclasses.replace(tensor, name=hf, rotary_heads=heads if arch.rotary else None)
    if rest:
        why = f"{len(rest)} tensors do not belong to a {name} model, the first is {min(rest)}"
        raise _refuse(source, why, SAME_MODEL)
    return tensors
