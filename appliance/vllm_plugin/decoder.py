"""The fused way through a decoder layer of Llama, Mistral, Qwen2 and Qwen3: two native operators around vLLM's attention.

vLLM in eager mode spends most of a small model's step between the operators. Here a layer is four calls: norm, qkv, head
norms and rotation (`cpu_int4::norm_qkv`); vLLM's own cache write and attention; output projection, norm and MLP
(`cpu_int4::out_mlp`). The residual stream and the hidden states are fp32 from the embedding to the head.

`fuse` replaces `forward` of the layers and of the last norm of one loaded model, and nothing else: scheduler, sampler,
attention and KV cache are vLLM's own, and its convention (hidden states and residual apart) is kept.

Rules: all layers or none; what is not plainly known is refused by name and runs as vLLM wrote it; buffers that layers
share live as long as one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from appliance.vllm_plugin.attention import CachedAttention

logger = init_logger("vllm.cpu_int4")

SUPPORTED_VLLM = "0.32."
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
MLPS = ("LlamaMLP", "Qwen2MLP")
NORMS = ("RMSNorm", "WideRMSNorm")
NONE = torch.empty(0)
"""Stands for an absent tensor: the operators take no optional ones."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """An int4 weight as the operators take it."""

    blob: Tensor
    group: int


@dataclass(frozen=True, kw_only=True)
class Norm:
    weight: Tensor
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """What all layers of one forward pass share: buffers for `rows` tokens, and the pass's attention metadata."""

    rows: int
    qkv: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attention: Tensor
    attention_heads: Tensor
    hidden: Tensor
    metadata: Any
    slots: Any


class FusedLayer:
    """`forward` of one decoder layer, with everything it needs at hand. Made after loading; see `why_not`."""

    def __init__(self, layer: Module, cos_sin: Tensor) -> None:
        part, mlp = layer.self_attn, layer.mlp
        self.attention = CachedAttention(part.attn)
        self.heads, self.key_heads, self.head_size = part.num_heads, part.num_kv_heads, part.head_dim
        self.width, self.inner = layer.hidden_size, mlp.down_proj.int4.shape.k
        self.step_name = f"cpu_int4.{self.heads}.{self.key_heads}.{self.head_size}.{self.width}"
        before, after = (_norm(n) for n in (layer.input_layernorm, layer.post_attention_layernorm))
        qkv, out, gate_up, down = (_weight(w) for w in (part.qkv_proj, part.o_proj, mlp.gate_up_proj, mlp.down_proj))
        bias = NONE if part.qkv_proj.bias is None else part.qkv_proj.bias.data
        query_norm, key_norm = getattr(part, "q_norm", None), getattr(part, "k_norm", None)
        self.qkv_arguments = (
            before.weight, before.epsilon, qkv.blob, qkv.group, bias,
            NONE if query_norm is None else query_norm.weight.data, NONE if key_norm is None else key_norm.weight.data,
            0.0 if query_norm is None else query_norm.variance_epsilon)
        self.heads_arguments = (cos_sin, self.heads, self.key_heads)
        self.mlp_arguments = (out.blob, out.group, after.weight, after.epsilon, gate_up.blob, gate_up.group, down.blob,
                              down.group, self.inner)
        self.norm_qkv = torch.ops.cpu_int4.norm_qkv.default
        self.out_mlp = torch.ops.cpu_int4.out_mlp.default

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """hidden_states and residual [T, width] to the same; the first layer's residual is None."""
        step = self.step(hidden_states.shape[0])
        if residual is None:
            residual = hidden_states.to(torch.float32, copy=True)
            hidden_states = NONE
        self.norm_qkv(hidden_states, residual, *self.qkv_arguments, positions, *self.heads_arguments, step.qkv)
        self.attention(step)
        self.out_mlp(step.attention, residual, *self.mlp_arguments, step.hidden)
        return step.hidden, residual

    def step(self, rows: int) -> Step:
        """The step of the pass that runs now; the first layer makes it."""
        context = get_forward_context()
        found = context.additional_kwargs.get(self.step_name)
        if isinstance(found, Step) and found.rows == rows:
            return found
        metadata = context.attn_metadata
        query, key = self.heads * self.head_size, self.key_heads * self.head_size
        qkv = torch.empty(rows, query + 2 * key, dtype=torch.bfloat16)
        heads = qkv.view(rows, -1, self.head_size)
        attention = torch.empty(rows, query, dtype=torch.bfloat16)
        made = Step(
            rows=rows, qkv=qkv, query=heads[:, : self.heads], key=heads[:, self.heads : self.heads + self.key_heads],
            value=heads[:, self.heads + self.key_heads :], attention=attention,
            attention_heads=attention.view(rows, self.heads, self.head_size),
            hidden=torch.empty(rows, self.width, dtype=torch.float32),
            metadata=metadata[0] if isinstance(metadata, list) else metadata, slots=context.slot_mapping)
        context.additional_kwargs[self.step_name] = made
        return made


class FusedNorm:
    """`forward` of the norm after the last layer: fp32 in, fp32 out."""

    def __init__(self, norm: Module) -> None:
        self.norm = _norm(norm)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.ops.cpu_int4.norm(hidden_states, residual, self.norm.weight, self.norm.epsilon)
        return out, residual


def fuse(model: Module, vllm_config: Any) -> str | None:
    """Fuse every layer of a loaded model. Returns why not, in which case the model is as before."""
    reason = model_refusal(model, vllm_config)
    if reason is None:
        for number, layer in enumerate(model.model.layers):
            if refusal := why_not(layer):
                reason = f"layer {number}: {refusal}"
                break
    if reason is not None:
        logger.info("decoder layers are not fused: %s", reason)
        return reason
    tables: dict[int, Tensor] = {}
    for layer in model.model.layers:
        rope = layer.self_attn.rotary_emb
        if id(rope) not in tables:
            # vLLM rounds the angles to bf16; here they stay fp32, for the positions that can occur.
            tables[id(rope)] = rope._compute_cos_sin_cache().float()[: vllm_config.model_config.max_model_len].contiguous()
        layer.forward = FusedLayer(layer, tables[id(rope)]).forward
    model.model.norm.forward = FusedNorm(model.model.norm).forward
    # The head's method takes fp32 hidden states; told a type, vLLM would cast them and the head's weight to it.
    model.logits_processor.head_dtype = None
    logger.info("decoder layers are fused: %d", len(model.model.layers))
    return None


def model_refusal(model: Module, vllm_config: Any) -> str | None:
    """Why no layer of this model can be fused in this configuration, or None."""
    from vllm.config import CompilationMode
    from vllm.version import __version__

    parallel = vllm_config.parallel_config
    if not __version__.startswith(SUPPORTED_VLLM):
        return f"vLLM {__version__} is not {SUPPORTED_VLLM}x"
    if reason := _not_one_of(model, MODELS, "vllm.model_executor.models"):
        return reason
    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        return "the model is compiled"
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        return "the model is split among processes"
    if vllm_config.lora_config is not None:
        return "LoRA replaces the linear layers"
    if vllm_config.speculative_config is not None or vllm_config.kv_transfer_config is not None:
        return "speculative decoding or KV transfer is on"
    if vllm_config.model_config.runner_type != "generate":
        return f"the model does not generate text ({vllm_config.model_config.runner_type})"
    if not hasattr(torch.ops.cpu_int4, "norm_qkv"):
        return "the native library is not loaded"
    return _norm_refusal(model.model.norm)


def why_not(layer: Module) -> str | None:
    """Why this decoder layer cannot be fused, or None."""
    from appliance.vllm_plugin.attention import attention_refusal

    if reason := _not_one_of(layer, LAYERS, "vllm.model_executor.models"):
        return reason
    part, mlp = layer.self_attn, layer.mlp
    for module, names in ((part, ATTENTIONS), (mlp, MLPS)):
        if reason := _not_one_of(module, names, "vllm.model_executor.models"):
            return reason
    if getattr(layer, "ada_rms_norm_t_cond", None) is not None or getattr(part, "do_llama_4_scaling", False):
        return "it scales by time or position"
    if reason := _not_one_of(mlp.act_fn, ("SiluAndMul",), "vllm.model_executor.layers.activation"):
        return reason
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(part, name) for name in ("q_norm", "k_norm") if hasattr(part, name)]
    for norm in norms:
        if reason := _norm_refusal(norm):
            return reason
    if len(norms) == 4 and norms[2].variance_epsilon != norms[3].variance_epsilon:
        return "query and key norms differ"
    for name, linear in (("qkv_proj", part.qkv_proj), ("o_proj", part.o_proj), ("gate_up_proj", mlp.gate_up_proj),
                         ("down_proj", mlp.down_proj)):
        if reason := _linear_refusal(linear, bias_allowed=name == "qkv_proj"):
            return f"{name} {reason}"
    return _rope_refusal(part.rotary_emb, part.head_dim) or attention_refusal(part.attn)


def _not_one_of(module: Module, names: tuple[str, ...], package: str) -> str | None:
    kind = type(module)
    known = kind.__name__ in names and kind.__module__.startswith((package, "appliance.vllm_plugin"))
    return None if known else f"{kind.__module__}.{kind.__name__} is not known"


def _norm_refusal(norm: Module) -> str | None:
    if reason := _not_one_of(norm, NORMS, "vllm.model_executor.layers.layernorm"):
        return reason
    if not norm.has_weight or norm.variance_size_override is not None or norm.weight.dtype != torch.bfloat16:
        return "a norm has no bf16 weight or is partial"
    return None


def _linear_refusal(linear: Module, *, bias_allowed: bool) -> str | None:
    known = ("QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear")
    if reason := _not_one_of(linear, known, "vllm.model_executor.layers.linear"):
        return reason
    packed = getattr(linear, "int4", None)
    if packed is None or packed.kernel.name != "native" or packed.shape.bits != 4:
        return "is not a native int4 layer"
    if linear.bias is not None and (not bias_allowed or linear.bias.dtype != torch.bfloat16):
        return "has a bias"
    return None


def _rope_refusal(rope: Module, head_size: int) -> str | None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kind = type(rope)
    if not isinstance(rope, RotaryEmbedding) or any(
        getattr(kind, name) is not getattr(RotaryEmbedding, name) for name in ("forward_cpu", "forward_native", "forward_static")
    ):
        return f"{kind.__name__} does not rotate plainly"
    if not rope.is_neox_style or rope.rotary_dim > head_size or rope.rotary_dim % 2:
        return "the rotation is not in neox order"
    return None


def _norm(norm: Module) -> Norm:
    return Norm(weight=norm.weight.data, epsilon=norm.variance_epsilon)


def _weight(linear: Module) -> Weight:
    (blob,) = linear.int4.tensors(linear)
    return Weight(blob=blob.data, group=linear.int4.shape.group)
