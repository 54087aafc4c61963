"""RMSNorm for `wide_residual`: what comes in as fp32 goes out as fp32, and so does the residual stream.

vLLM's own RMSNorm rounds the residual sum and the result to bf16 in each layer. In a compiled graph the two are fused
element-wise work, so fp32 fits there, and the many-row route takes fp32 activations anyway. A quarter of the error
of the served model against an fp32 reference goes (docs/benchmarks.md). Outside a compiled graph, and for bf16 input
(query and key norms), vLLM's own code runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm


class WideRMSNorm(RMSNorm):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's RMSNorm with an fp32 way through."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., hidden]; with a residual returns the pair (normalized, sum)."""
        if x.dtype != torch.float32 or self.variance_size_override is not None:
            out: Tensor | tuple[Tensor, Tensor] = super().forward_native(x, residual)
            return out
        total = x if residual is None else x + residual.to(torch.float32)
        normalized = total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon)
        if self.has_weight:
            normalized = normalized * self.weight.to(torch.float32)
        return normalized if residual is None else (normalized, total)


def register_norm() -> None:
    """Make vLLM build this norm in place of its own from now on; a second call changes nothing."""
    if "RMSNorm" not in op_registry_oot:
        CustomOp.register_oot(WideRMSNorm, name="RMSNorm")
