"""Kernel `native`: this project's own int4 kernels (appliance/kernels/native), on every x86-64 CPU.

One copy of the weight in blocks of 16 channels serves one row, many rows and the lookup of table rows. Activations are
int16 per group, sums are exact integers, results fp32: nearer to fp64 than torch's kernel, and the same for every
number of threads. No instruction touches AMX tiles, so no number of rows is dangerous and `threshold` is not asked.

On hosts with AMX the library GEMM in bf16 beats every integer kernel from `library_rows` rows on (64, or as measured):
there blocks of channels are dequantized and multiplied by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.kernels import blocked
from appliance.kernels.dequantize import channels_per_block
from appliance.kernels.host import TorchHost
from appliance.kernels.library import Loaded
from appliance.kernels.reference import Portable
from appliance.kernels.registry import LayerShape
from appliance.prepared import BLOCK, LAYOUT_ID
from appliance.quantize.format import group_refusal

NAME = "native"


@dataclass(frozen=True, kw_only=True)
class NativeKernel:
    """Tensor: `blocked` uint8 [bytes], layout `int4-b16-1`."""

    host: TorchHost
    loaded: Loaded
    name: str = NAME
    layout_id: str = LAYOUT_ID

    def why_not(self, layer: LayerShape, host: TorchHost) -> str | None:
        if self.loaded.refusal:
            return self.loaded.refusal
        if reason := group_refusal(layer.group):
            return reason
        if layer.k % layer.group:
            return f"{layer.k} columns are not whole groups of {layer.group}"
        return None

    def prepare(self, portable: Portable, *, direct: bool) -> dict[str, Tensor]:
        return {"blocked": blocked.pack(portable)}

    def linear(self, x: Tensor, tensors: Sequence[Tensor], layer: LayerShape, threshold: int, out: Tensor) -> None:
        if x.shape[0] >= self.host.library_rows:
            library_gemm(x, tensors[0], layer, self.host.gemm, out)
            return
        out.copy_(linear(x, tensors[0], layer, wide=out.dtype == torch.float32))

    def rows(self, ids: Tensor, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        return rows(ids, tensors[0], layer, wide=True)

    def whole(self, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        return rows(torch.arange(layer.n), tensors[0], layer, wide=self.host.gemm == torch.float32)


NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


def linear(x: Tensor, weight: Tensor, layer: LayerShape, bias: Tensor = NO_BIAS, *, wide: bool) -> Tensor:
    """x bf16 or fp32 [M, K], any strides, times a blocked weight, plus the bias: [M, N], fp32 if `wide`, else bf16."""
    out: Tensor = torch.ops.cpu_int4.linear(x, weight, bias, layer.n, layer.k, layer.group, layer.bits, wide)
    return out


def library_gemm(x: Tensor, weight: Tensor, layer: LayerShape, gemm: torch.dtype, out: Tensor) -> None:
    """out[M, N] = x[M, K] @ W.t() by torch's GEMM, on blocks of channels dequantized into a bounded scratch."""
    x = x.to(gemm)
    step = channels_per_block(layer.k, BLOCK)
    for first in range(0, layer.n, step):
        stop = min(first + step, layer.n)
        columns = torch.ops.cpu_int4.columns(weight, layer.n, layer.k, layer.group, layer.bits, first // BLOCK,
                                             -(-(stop - first) // BLOCK), gemm == torch.float32)
        out[:, first:stop].copy_(torch.mm(x, columns)[:, : stop - first])


def rows(ids: Tensor, weight: Tensor, layer: LayerShape, *, wide: bool) -> Tensor:
    """Channels `ids` (int64 [T]) of a blocked weight: [T, K], fp32 if `wide`, else bf16."""
    out: Tensor = torch.ops.cpu_int4.rows(ids, weight, layer.n, layer.k, layer.group, layer.bits, wide)
    return out
