"""vLLM's CPU attention of one layer, called without the Python between its layer and its operators.

What `Attention.forward`, `unified_kv_cache_update`, `unified_attention_with_output` and `CPUAttentionBackendImpl` do
for a plain decoder layer comes down to two operators of vLLM's C++ library. What is looked up on the way is looked up
once here. Not for encoders, shared caches, sinks or alibi: `attention_refusal` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from appliance.vllm_plugin.decoder import Step


class CachedAttention:
    """Writes a step's keys and values to the layer's cache and attends."""

    def __init__(self, layer: Module) -> None:
        impl = layer.impl
        self.layer = layer
        self.name: str = layer.layer_name
        self.scale, self.window, self.soft_cap = impl.scale, impl.sliding_window, impl.logits_soft_cap
        self.cache_type: str = impl.kv_cache_dtype
        self.cache: Tensor | None = None
        self.key_cache, self.value_cache = torch.empty(0), torch.empty(0)
        self.write = torch.ops._C.cpu_attn_reshape_and_cache.default
        self.attend = torch.ops._C.cpu_attention_with_kv_cache.default

    def __call__(self, step: Step) -> None:
        """Fill step.attention from step.query, step.key and step.value."""
        if step.metadata is None:  # vLLM sizes its memory without a cache
            step.attention.zero_()
            return
        layer, metadata = self.layer, step.metadata[self.name]
        if layer.kv_cache is not self.cache:
            self.bind(layer.kv_cache)
        slots = step.slots.get(self.name)
        if slots is not None:
            self.write(step.key, step.value, self.key_cache, self.value_cache, slots, layer.isa,
                       layer._k_scale_float, layer._v_scale_float, self.cache_type)
        query, out, rows = step.query, step.attention_heads, metadata.num_actual_tokens
        if rows != step.rows:
            query, out = query[:rows], out[:rows]
        self.attend(query, self.key_cache, self.value_cache, out, metadata.query_start_loc, metadata.seq_lens,
                    self.scale, metadata.causal, None, self.window, metadata.block_table, self.soft_cap,
                    metadata.scheduler_metadata, None, metadata.dynamic_causal, layer._k_scale_float,
                    layer._v_scale_float, self.cache_type)

    def bind(self, cache: Tensor) -> None:
        """Views of a cache [blocks, heads, block, 2 * size], as `CPUAttentionBackendImpl.forward` makes them."""
        blocks, heads, block, _ = cache.shape
        self.key_cache, self.value_cache = cache.view(blocks, heads, block * 2, -1).chunk(2, dim=2)
        self.cache = cache


def attention_refusal(layer: Module) -> str | None:
    """Why this attention layer is not a plain decoder's on the CPU, or None."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl: Any = getattr(layer, "impl", None)
    if type(layer) is not Attention or type(impl) is not CPUAttentionBackendImpl:
        return f"{type(layer).__name__} with {type(impl).__name__} is not known"
    if layer.attn_type != AttentionType.DECODER:
        return f"its attention is {layer.attn_type}"
    if impl.alibi_slopes is not None or impl.sinks is not None:
        return "its attention has alibi or sinks"
    if layer.kv_sharing_target_layer_name is not None or layer.query_quant is not None:
        return "its cache is shared or its queries are quantized"
    if layer.head_size_v != layer.head_size:
        return "its keys and values differ in size"
    return None
