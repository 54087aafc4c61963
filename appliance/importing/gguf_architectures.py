"""PURE: how each GGUF architecture maps to Hugging Face: tensor names, biases, and the fields of config.json.

Names are data; only what differs between families is code. Knows no file and no tensor's content. Rules: an
architecture stands here only when a model of it, written by llama.cpp's own converter, comes back value for value and
computes the same logits (tests/gguf); what a family may have and is not mapped is refused by name, never left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Unmapped(Exception):
    """This file cannot be expressed as a Hugging Face model; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """A file's metadata as one architecture sees it. `present`: names of its tensors."""

    prefix: str
    fields: Mapping[str, Any]
    present: frozenset[str]

    def has(self, key: str) -> bool:
        return self.fields.get(f"{self.prefix}.{key}") is not None

    def number(self, key: str) -> Any:
        """Raises Unmapped when the key is missing or no single number."""
        value = self.fields.get(f"{self.prefix}.{key}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -1e38 < value < 1e38:
            raise Unmapped(f"its metadata has no single number {self.prefix}.{key}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        if default is not None and not self.has(key):
            return default
        value = int(self.number(key))
        if not 0 <= value < 1 << 31:
            raise Unmapped(f"its metadata says {self.prefix}.{key} = {value}")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        return default if default is not None and not self.has(key) else as_decimal(self.number(key))

    def rope_scaling(self) -> tuple[str, float]:
        """Kind and factor. As in llama.cpp a factor without a kind is linear, and may have its old name."""
        key = "rope.scaling.factor" if self.has("rope.scaling.factor") else "rope.scale_linear"
        factor = self.decimal(key, 1.0) or 1.0
        if factor < 0:
            raise Unmapped(f"its metadata says {self.prefix}.{key} = {factor}")
        kind = str(self.fields.get(f"{self.prefix}.rope.scaling.type") or "linear")
        return ("none", factor) if kind == "linear" and factor == 1.0 else (kind, factor)


def as_decimal(value: float) -> float:
    """A float32 of the metadata as the decimal that was meant (1e-05, not 9.999999747378752e-06)."""
    stored = struct.pack("<f", value)
    return next(short for digits in range(1, 18)
                if struct.pack("<f", short := float(f"{value:.{digits}g}")) == stored)


OUTER: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, kw_only=True)
class Biases:
    """Modules that have a bias together: always, or where the file has the first of them; `flag`: then set so."""

    modules: tuple[str, ...]
    flag: str = ""
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One GGUF architecture. `layer`: module of a layer -> its Hugging Face name, both without `.weight`.

    `rotary`: rows of q and k stand in llama.cpp's rotary order. `norm_shift`: is added to what the file has in norms.
    `extra(metadata, config)`: fields of config.json beyond the common ones. `reads`: keys of CHANGING that it maps.
    """

    hf_class: str
    model_type: str
    layer: Mapping[str, str]
    extra: Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]
    rotary: bool = False
    norm_shift: float = 0.0
    biases: tuple[Biases, ...] = ()
    reads: tuple[str, ...] = ()


_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_output": "self_attn.o_proj"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
               "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_PLAIN = _ATTENTION | _GATED | _PRE_NORMS
_QKV, _QKVO = ("attn_q", "attn_k", "attn_v"), ("attn_q", "attn_k", "attn_v", "attn_output")


CHANGING: Mapping[str, tuple[Any, ...]] = {
    "attention.scale": (0.0,), "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,), "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (), "attention.clamp_kqv": (0.0,), "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,), "attention.causal": (True,), "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1.0,), "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_attn_factor": (), "rope.scaling.yarn_ext_factor": (), "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,), "rope.dimension_sections": (), "expert_count": (0,),
    "leading_dense_block_count": (0,),
}
"""Keys that change what a model computes -> the values that change nothing. One that is not mapped refuses the file."""


def unmapped(arch: Architecture, m: Metadata, head_dim: int) -> str | None:
    """Why this file computes something that its architecture's mapping does not say, or None."""
    for key, neutral in CHANGING.items():
        value = m.fields.get(f"{m.prefix}.{key}")
        if value is not None and key not in arch.reads and value not in neutral:
            return f"its {m.prefix}.{key} = {str(value)[:40]!r} is not supported"
    if "rope.dimension_count" not in arch.reads and m.whole("rope.dimension_count", head_dim) != head_dim:
        return f"only {m.whole('rope.dimension_count')} of {head_dim} columns of its heads are rotated"
    return None


def _rms(m: Metadata) -> dict[str, Any]:
    return {"rms_norm_eps": m.decimal("attention.layer_norm_rms_epsilon")}


def _llama(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_rms(m), "hidden_act": "silu"}


def _granite(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if m.fields.get("granite.rope.scaling.finetuned") is False:  # llama.cpp's switch for this family alone
        raise Unmapped("Granite files without rotary positions are not supported")
    return {**_llama(m, config), "attention_multiplier": m.decimal("attention.scale", 1.0),
            "embedding_multiplier": m.decimal("embedding_scale", 1.0),
            "residual_multiplier": m.decimal("residual_scale", 1.0), "logits_scaling": m.decimal("logit_scale", 1.0)}


def _unbiased(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(m, config), "attention_bias": False}


def _gemma(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_rms(m), "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(config: Mapping[str, Any], largest: int) -> int:
    """What the scores are divided by the root of: the head's width but in the largest model of the family.

    The file does not say (source: llama.cpp's own rule, by the number of layers).
    """
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gemma(m, config), "sliding_window": m.whole("attention.sliding_window"),
            "attn_logit_softcapping": m.decimal("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": m.decimal("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": _query_scalar(config, 46)}


def _gemma3(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every sixth layer sees everything, the others a window, with rotary frequencies of their own."""
    window = m.whole("attention.sliding_window", 0)
    layers = range(int(config["num_hidden_layers"]))
    whole = {"rope_type": "default", "rope_theta": m.decimal("rope.freq_base", 1_000_000.0)}
    kind, factor = m.rope_scaling()
    if kind not in ("none", "linear"):
        raise Unmapped(f"rope scaling {kind!r} is not supported")
    if kind == "linear":
        whole |= {"rope_type": "linear", "factor": factor}
    local = {"rope_type": "default", "rope_theta": m.decimal("rope.freq_base_swa", 10000.0)}
    if not window:
        local = whole
    return {**_gemma(m, config), "sliding_window": window or 4096,
            "layer_types": ["sliding_attention" if window and (i + 1) % 6 else "full_attention" for i in layers],
            "rope_parameters": {"full_attention": whole, "sliding_attention": local},
            "final_logit_softcapping": m.decimal("final_logit_softcapping", 0.0) or None,
            "query_pre_attn_scalar": _query_scalar(config, 62)}


def _phi3(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = m.whole("rope.dimension_count", config["head_dim"])
    return {**_llama(m, config), "sliding_window": m.whole("attention.sliding_window", 0) or None,
            "partial_rotary_factor": rotated / int(config["head_dim"]),
            "original_max_position_embeddings":
                m.whole("rope.scaling.original_context_length", config["max_position_embeddings"]),
            "attention_bias": False}


def _stablelm(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if "blk.0.ffn_norm.weight" not in m.present:
        raise Unmapped("StableLM files with parallel layers are not supported")
    rotated = m.whole("rope.dimension_count", config["head_dim"])
    return {"layer_norm_eps": m.decimal("attention.layer_norm_epsilon"), "hidden_act": "silu",
            "partial_rotary_factor": rotated / int(config["head_dim"]), "use_parallel_residual": False,
            "qk_layernorm": False}


def _starcoder2(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_epsilon": m.decimal("attention.layer_norm_epsilon"), "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        hf_class="LlamaForCausalLM", model_type="llama", layer=_PLAIN, rotary=True, extra=_llama,
        reads=("attention.sliding_window",),  # of the first Mistral; llama.cpp passes over it as well
        biases=(Biases(modules=_QKVO, flag="attention_bias"), Biases(modules=tuple(_GATED), flag="mlp_bias"))),
    "qwen2": Architecture(hf_class="Qwen2ForCausalLM", model_type="qwen2", layer=_PLAIN, extra=_llama,
                          biases=(Biases(modules=_QKV, always=True),)),
    "qwen3": Architecture(hf_class="Qwen3ForCausalLM", model_type="qwen3", layer=_PLAIN | _HEAD_NORMS, extra=_unbiased),
    "gemma": Architecture(hf_class="GemmaForCausalLM", model_type="gemma", layer=_PLAIN, extra=_gemma,
                          norm_shift=-1.0),
    "gemma2": Architecture(hf_class="Gemma2ForCausalLM", model_type="gemma2", extra=_gemma2, norm_shift=-1.0,
                           reads=("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
                           layer=_ATTENTION | _GATED | _FOUR_NORMS),
    "gemma3": Architecture(hf_class="Gemma3ForCausalLM", model_type="gemma3_text", extra=_gemma3, norm_shift=-1.0,
                           reads=("attention.sliding_window", "final_logit_softcapping"),
                           layer=_ATTENTION | _GATED | _FOUR_NORMS | _HEAD_NORMS),
    "phi3": Architecture(
        hf_class="Phi3ForCausalLM", model_type="phi3", extra=_phi3,
        reads=("attention.sliding_window", "rope.scaling.attn_factor", "rope.dimension_count"),
        layer={"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj",
               "ffn_down": "mlp.down_proj"} | _PRE_NORMS),
    "granite": Architecture(
        hf_class="GraniteForCausalLM", model_type="granite", layer=_PLAIN, rotary=True, extra=_granite,
        reads=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        biases=(Biases(modules=_QKVO, flag="attention_bias"), Biases(modules=tuple(_GATED), flag="mlp_bias"))),
    "olmo2": Architecture(
        hf_class="Olmo2ForCausalLM", model_type="olmo2", extra=_unbiased,
        layer=_ATTENTION | _GATED | _HEAD_NORMS | {"post_attention_norm": "post_attention_layernorm",
                                                   "post_ffw_norm": "post_feedforward_layernorm"}),
    "stablelm": Architecture(
        hf_class="StableLmForCausalLM", model_type="stablelm", layer=_PLAIN, extra=_stablelm,
        reads=("rope.dimension_count",),
        biases=(Biases(modules=("attn_norm", "ffn_norm", "output_norm"), always=True),
                Biases(modules=_QKV, flag="use_qkv_bias"))),
    "starcoder2": Architecture(
        hf_class="Starcoder2ForCausalLM", model_type="starcoder2", extra=_starcoder2,
        layer=_ATTENTION | _PRE_NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases=(Biases(modules=("attn_norm", "ffn_norm", "output_norm"), always=True),
                Biases(modules=(*_QKVO, "ffn_up", "ffn_down"), flag="use_bias"))),
}
