"""Which loaded models get fused decoder layers, and the exchange itself.

`fuse` replaces `forward` of the layers and of the last norm of one loaded model, and nothing else: scheduler, sampler,
attention and KV cache are vLLM's own.

Rules: all layers or none; what is not plainly known is refused by name and runs as vLLM wrote it; one line in the log
says what happened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.logger import init_logger

from appliance.kernels.registry import torch_host
from appliance.quantize.format import PLAIN_DECODERS
from appliance.vllm_plugin.attention import attention_refusal
from appliance.vllm_plugin.decoder import FusedLayer, FusedNorm

logger = init_logger("vllm.cpu_int4")

SUPPORTED_VLLM = "0.32."
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
MLPS = ("LlamaMLP", "Qwen2MLP")
NORMS = ("RMSNorm", "WideRMSNorm")


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
    plain_from = torch_host().library_rows
    for layer in model.model.layers:
        rope = layer.self_attn.rotary_emb
        if id(rope) not in tables:
            # vLLM rounds the angles to bf16; here they stay fp32, for the positions that can occur.
            table = rope._compute_cos_sin_cache().float()
            tables[id(rope)] = table[: vllm_config.model_config.max_model_len].clone()
        layer.forward = FusedLayer(layer, tables[id(rope)], plain_from).forward
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
    if reason := _not_one_of(model, PLAIN_DECODERS, "vllm.model_executor.models"):
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

    kind, ways = type(rope), ("forward_cpu", "forward_native", "forward_static")
    if not isinstance(rope, RotaryEmbedding) or any(getattr(kind, w) is not getattr(RotaryEmbedding, w) for w in ways):
        return f"{kind.__name__} does not rotate plainly"
    if not rope.is_neox_style or rope.rotary_dim > head_size or rope.rotary_dim % 2:
        return "the rotation is not in neox order"
    return None
