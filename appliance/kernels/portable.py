"""Kernel `portable`: any shape on any torch, from the checkpoint's own packing by plain ATen expressions.

The fallback: it refuses nothing, has no fast path for one row, and keeps exactly the checkpoint's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.kernels import dequantize, reference
from appliance.kernels.dequantize import Scratch
from appliance.kernels.host import TorchHost
from appliance.kernels.reference import Portable
from appliance.kernels.registry import LayerShape


@dataclass(frozen=True, kw_only=True)
class PortableKernel:
    """Tensors: `packed` uint8 [N, K/2], `scale` and `zero` bf16 [N, K/g], as stored."""

    host: TorchHost
    name: str = "portable"

    @property
    def layout_id(self) -> str:
        return "portable-1"

    def why_not(self, layer: LayerShape, host: TorchHost) -> str | None:
        return None

    def prepare(self, portable: Portable, *, direct: bool) -> dict[str, Tensor]:
        return {"packed": portable.packed, "scale": portable.scale, "zero": portable.zero}

    def linear(self, x: Tensor, tensors: Sequence[Tensor], layer: LayerShape, threshold: int, out: Tensor) -> None:
        packed, scale, zero = tensors

        def rows(first: int, stop: int, scratch: Scratch) -> Tensor:
            return dequantize.portable_rows(packed, scale, zero, first, stop, scratch)

        dequantize.linear_rows(dequantize.even_odd(x), layer.n, rows, self.host.gemm, out)

    def rows(self, ids: Tensor, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        packed, scale, zero = (t[ids] for t in tensors)
        return _weight(packed, scale, zero)

    def whole(self, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        packed, scale, zero = tensors
        return _weight(packed, scale, zero).to(self.host.gemm)


def _weight(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    codes = reference.unpack(packed).view(*scale.shape, -1).to(torch.float32)
    factor = scale.float()[..., None]
    return (codes * factor + (zero.float()[..., None] - 8 * factor)).view(packed.shape[0], -1)
