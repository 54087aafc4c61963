"""Kernel `aten`: torch's own int4 kernel (tinygemm) for one row, the dequantize route for more.

Safety rule: with more than one row tinygemm leaves AMX tile state behind that kills a later attention call, so calls of
`threshold` rows or more never reach it; the plan keeps that threshold at 2. It applies to the vocabulary head as well.

The packed layout is read through `appliance.kernels.layout`; a layer whose layout is not understood is refused here and
served from its portable copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.kernels import dequantize, reference
from appliance.kernels.dequantize import Scratch
from appliance.kernels.host import TorchHost
from appliance.kernels.layout import code_rows, layout_of, pack_portable, run_bytes
from appliance.kernels.reference import Portable
from appliance.kernels.registry import LayerShape
from appliance.quantize.format import group_refusal

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class AtenKernel:
    """Tensors: `packed` uint8 [N, K/2] in torch's layout, `scale_zero` bf16 [G, N, 2]; `halves` uint8 [N, K/2] where a
    second copy was asked for."""

    host: TorchHost
    name: str = "aten"

    @property
    def layout_id(self) -> str:
        return f"aten-{self.host.torch_version.split('+')[0]}-{self.host.capability.lower()}"

    def why_not(self, layer: LayerShape, host: TorchHost) -> str | None:
        if host.int4_refusal:
            return host.int4_refusal
        if layer.bits != 4:
            return f"torch's kernel takes 4 bits, not {layer.bits}"
        if layer.n % 16:
            return f"{layer.n} channels: torch's kernel wants a multiple of 16"
        if reason := group_refusal(layer.group):
            return reason
        if layer.k % layer.group:
            return f"{layer.k} columns are not whole groups of {layer.group}"
        if layout_of(layer.n) is None:
            return f"the packed layout of {layer.n} channels under {host.capability} is not understood"
        return None

    def prepare(self, portable: Portable, *, direct: bool) -> dict[str, Tensor]:
        tensors = {
            "packed": pack_portable(portable.packed, CHUNK_BYTES),
            "scale_zero": torch.stack((portable.scale.t(), portable.zero.t()), dim=-1).contiguous(),
        }
        if not direct:
            tensors["halves"] = split_halves(portable.packed)
        return tensors

    def linear(self, x: Tensor, tensors: Sequence[Tensor], layer: LayerShape, threshold: int, out: Tensor) -> None:
        packed, scale_zero = tensors[0], tensors[1]
        if 0 < x.shape[0] < threshold:
            x = x.to(torch.bfloat16)  # the kernel's fp32 entry has no vector path
            out.copy_(torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, layer.group, scale_zero))
        elif len(tensors) > 2:
            halves = tensors[2]

            def rows(first: int, stop: int, scratch: Scratch) -> Tensor:
                return dequantize.halves_rows(halves, scale_zero, first, stop, scratch)

            dequantize.linear_rows(x, layer.n, rows, self.host.gemm, out)
        else:
            layout = layout_of(layer.n)
            assert layout is not None, "why_not lets no such layer through"
            dequantize.linear_packed(x, packed, scale_zero, layout, self.host.gemm, out)

    def rows(self, ids: Tensor, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        packed, scale_zero = tensors[0], tensors[1]
        layout = layout_of(layer.n)
        assert layout is not None, "why_not lets no such layer through"
        codes = code_rows(packed, layout, ids).view(ids.numel(), -1, layer.group).float()
        scale, offset = dequantize.scale_offset(scale_zero.view(torch.int32)[:, :, 0][:, ids].t()[..., None])
        return codes.mul_(scale).add_(offset).view(ids.numel(), layer.k)

    def whole(self, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        return whole_weight(tensors, layer, self.host.gemm)


def whole_weight(tensors: Sequence[Tensor], layer: LayerShape, gemm: torch.dtype) -> Tensor:
    """[N, K] in the GEMM type from the direct tensors or from the halves, in functional form."""
    packed, scale_zero = tensors[0], tensors[1]
    if len(tensors) > 2:
        codes = torch.cat((tensors[2] & 15, tensors[2] >> 4), dim=1)
    else:
        parts = []
        for run in layout_of(layer.n) or ():
            data = run_bytes(packed, run)
            pair = torch.stack((data & 15, data >> 4), dim=2 if run.halves else 3)
            parts.append(pair.reshape(run.blocks, layer.k, run.channels).transpose(1, 2).reshape(-1, layer.k))
        codes = torch.cat(parts)
    scale = scale_zero[..., 0].float().t()[..., None]
    offset = scale_zero[..., 1].float().t()[..., None] - 8 * scale
    weight = codes.view(layer.n, -1, layer.group).float() * scale + offset
    return weight.view(layer.n, layer.k).to(gemm)


def split_halves(packed: Tensor) -> Tensor:
    """Checkpoint bytes [N, K/2] to bytes j = w[j] | w[j + K/2] << 4, in bounded memory."""
    n, half = packed.shape
    out = torch.empty_like(packed)
    step = max(1, CHUNK_BYTES // (2 * half))
    for first in range(0, n, step):
        codes = reference.unpack(packed[first : first + step])
        out[first : first + step] = codes[:, :half] | (codes[:, half:] << 4)
    return out
