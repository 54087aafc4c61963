"""The fused way through decoder layers of Llama, Mistral, Qwen2 and Qwen3: native operators around vLLM's attention.

vLLM in eager mode spends most of a small model's step between the operators. Here a layer is four calls: norm, qkv,
head norms and rotation (`cpu_int4::norm_qkv`); vLLM's own cache write and attention; output projection, norm and MLP
(`cpu_int4::out_mlp`). The residual stream and the hidden states are fp32 from the embedding to the head.

vLLM's convention (hidden states and residual apart) is kept. Which models get this: `appliance.vllm_plugin.fusion`.
Rule: buffers that layers share live as long as one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.forward_context import get_forward_context

from appliance.vllm_plugin.attention import CachedAttention

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
    """`forward` of one decoder layer, with everything it needs at hand. Made after loading.

    From `plain_from` tokens on the layer runs as vLLM wrote it: the library GEMM of AMX hosts is faster there.
    """

    def __init__(self, layer: Module, cos_sin: Tensor, plain_from: int) -> None:
        self.plain, self.plain_from = layer.forward, plain_from
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
        if hidden_states.shape[0] >= self.plain_from:
            out: tuple[Tensor, Tensor] = self.plain(positions, hidden_states, residual)
            return out
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
    """`forward` of the norm after the last layer: fp32 in, fp32 out; as vLLM wrote it after plain layers."""

    def __init__(self, norm: Module) -> None:
        self.plain = norm.forward
        self.norm = _norm(norm)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if residual.dtype != torch.float32:
            plain: tuple[Tensor, Tensor] = self.plain(hidden_states, residual)
            return plain
        out = torch.ops.cpu_int4.norm(hidden_states, residual, self.norm.weight, self.norm.epsilon)
        return out, residual


def _norm(norm: Module) -> Norm:
    return Norm(weight=norm.weight.data, epsilon=norm.variance_epsilon)


def _weight(linear: Module) -> Weight:
    (blob,) = linear.int4.tensors(linear)
    return Weight(blob=blob.data, group=linear.int4.shape.group)
