"""Kernel `portable`: any shape on any torch, from the checkpoint's own packing by plain ATen expressions.

The fallback: it refuses nothing, tables of 8 bits included, has no fast path for one row, and keeps exactly the
checkpoint's bytes.
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
    """Tensors: `packed` uint8 [N, K/2] or, with 8 bits, [N, K]; `scale` and `zero` bf16 [N, K/g]: as stored."""

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
        one_a_byte = packed.shape[1] == layer.k

        def rows(first: int, stop: int, scratch: Scratch) -> Tensor:
            read = dequantize.byte_rows if one_a_byte else dequantize.portable_rows
            return read(packed, scale, zero, first, stop, scratch)

        dequantize.linear_rows(x if one_a_byte else dequantize.even_odd(x), layer.n, rows, self.host.gemm, out)

    def rows(self, ids: Tensor, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        packed, scale, zero = (t[ids] for t in tensors)
        return _weight(packed, scale, zero, layer.k)

    def whole(self, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        packed, scale, zero = tensors
        return _weight(packed, scale, zero, layer.k).to(self.host.gemm)


def _weight(packed: Tensor, scale: Tensor, zero: Tensor, k: int) -> Tensor:
    one_a_byte = packed.shape[1] == k
    codes = packed if one_a_byte else reference.unpack(packed)
    factor = scale.float()[..., None]
    offset = zero.float()[..., None] - (128 if one_a_byte else 8) * factor
    return (codes.view(*scale.shape, -1).to(torch.float32) * factor + offset).view(packed.shape[0], -1)
