"""The many-row route: blocks of channels dequantized into a bounded scratch, then the library GEMM on each block.

Plain eager ATen, so no compiler is needed at run time. One arithmetic everywhere, so that every route gives the same
bits: w = code * scale + (zero - 8 * scale) in fp32 (exact but for the last sum), then one rounding to the GEMM type.

Three sources: torch's packed layout (two planes [K, n] of the low and the high nibbles: the transposed weight that a
GEMM wants, so nothing is de-interleaved), the split-halves copy (byte j = w[j] | w[j + K/2] << 4) and the checkpoint's
own packing (even columns, then odd columns; the activations are permuted instead of the weights).

Rules: the scratch of one call is a few MiB whatever N is; the activations are converted once; 0 rows give (0, N).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from appliance.kernels.layout import Layout, Run, column_major, run_bytes

SCRATCH_BYTES = 4 << 20
"""Size of the fp32 scratch of one block; the byte scratch is a quarter, a bf16 copy half of it."""


def channels_per_block(k: int, granularity: int) -> int:
    """Channels of one block, a multiple of `granularity`."""
    return max(1, SCRATCH_BYTES // (4 * k) // granularity) * granularity


class Scratch:
    """Buffers of one call, reused by all its blocks."""

    def __init__(self, channels: int, k: int, gemm: torch.dtype) -> None:
        self.codes = torch.empty(channels * k // 2, dtype=torch.uint8)
        self.moved = torch.empty(channels * k // 2, dtype=torch.uint8)
        self.weight = torch.empty(channels * k, dtype=torch.float32)
        self.rounded = torch.empty(channels * k, dtype=gemm) if gemm != torch.float32 else None

    def result(self, shape: tuple[int, ...]) -> Tensor:
        """The first elements of the fp32 buffer, in the GEMM type."""
        size = torch.Size(shape).numel()
        if self.rounded is None:
            return self.weight[:size].view(shape)
        return self.rounded[:size].view(shape).copy_(self.weight[:size].view(shape))


def nibbles(data: Tensor, low: Tensor, high: Tensor, codes: Tensor) -> None:
    """Both nibbles of the bytes `data` as floats into `low` and `high`, by way of the byte scratch `codes`."""
    small = codes[: data.numel()].view(data.shape)
    torch.bitwise_and(data, 15, out=small)
    low.copy_(small)
    torch.bitwise_right_shift(data, 4, out=small)
    high.copy_(small)


def scale_offset(pair: Tensor) -> tuple[Tensor, Tensor]:
    """From int32 words that hold (scale, zero) as two bf16: fp32 scale, and fp32 zero - 8 * scale.

    A bf16 is the upper half of an fp32, so two integer operations widen both (x86 is little-endian).
    """
    scale = (pair << 16).view(torch.float32)
    zero = (pair & -65536).view(torch.float32)
    return scale, zero.sub_(scale, alpha=8)


def packed_planes(packed: Tensor, scale_zero: Tensor, run: Run, scratch: Scratch) -> Tensor:
    """[2, K, n/2] in the GEMM type: the low-nibble and the high-nibble channels of (a part of) one run."""
    k, groups = packed.shape[1] * 2, scale_zero.shape[0]
    half = run.channels // 2
    width = run.blocks * half
    data = column_major(run_bytes(packed, run), scratch.moved)
    planes = scratch.weight[: 2 * k * width].view(2, k, width)
    nibbles(data, planes[0], planes[1], scratch.codes)
    words = scale_zero.view(torch.int32)[:, run.first : run.stop, 0]
    if run.halves:
        words = words.reshape(groups, run.blocks, 2, half).permute(2, 0, 1, 3)
    else:
        words = words.reshape(groups, run.blocks, half, 2).permute(3, 0, 1, 2)
    scale, offset = scale_offset(words.reshape(2, groups, 1, width))
    grouped = planes.view(2, groups, k // groups, width)
    torch.addcmul(offset, grouped, scale, out=grouped)
    return scratch.result((2, k, width))


def halves_rows(halves: Tensor, scale_zero: Tensor, first: int, stop: int, scratch: Scratch) -> Tensor:
    """[n, K] in the GEMM type from the split-halves copy. Scales come after joining, so odd group counts work."""
    n, k, groups = stop - first, halves.shape[1] * 2, scale_zero.shape[0]
    w = scratch.weight[: n * k].view(n, 2, k // 2)
    nibbles(halves[first:stop], w[:, 0], w[:, 1], scratch.codes)
    scale, offset = scale_offset(scale_zero.view(torch.int32)[:, first:stop, 0].t().contiguous()[..., None])
    w.view(n, groups, k // groups).mul_(scale).add_(offset)
    return scratch.result((n, k))


def portable_rows(packed: Tensor, scale: Tensor, zero: Tensor, first: int, stop: int, scratch: Scratch) -> Tensor:
    """[n, K] in the GEMM type from the checkpoint's packing, columns in the order 0, 2, 4, ... 1, 3, 5, ..."""
    n, k, groups = stop - first, packed.shape[1] * 2, scale.shape[1]
    w = scratch.weight[: n * k].view(n, 2, k // 2)
    nibbles(packed[first:stop], w[:, 0], w[:, 1], scratch.codes)
    factor = scale[first:stop].float().view(n, 1, groups, 1)
    offset = zero[first:stop].float().view(n, 1, groups, 1).sub_(factor, alpha=8)
    w.view(n, 2, groups, k // groups // 2).mul_(factor).add_(offset)
    return scratch.result((n, k))


def byte_rows(packed: Tensor, scale: Tensor, zero: Tensor, first: int, stop: int, scratch: Scratch) -> Tensor:
    """[n, K] in the GEMM type from 8-bit codes [N, K], columns in their own order."""
    n, k, groups = stop - first, packed.shape[1], scale.shape[1]
    w = scratch.weight[: n * k].view(n, k).copy_(packed[first:stop])
    factor = scale[first:stop].float()[..., None]
    w.view(n, groups, k // groups).mul_(factor).add_(zero[first:stop].float()[..., None].sub_(factor, alpha=128))
    return scratch.result((n, k))


def even_odd(x: Tensor) -> Tensor:
    """Activations [M, K] in the column order of `portable_rows`."""
    return x.view(x.shape[0], x.shape[1] // 2, 2).transpose(1, 2).reshape(x.shape)


def linear_packed(
    x: Tensor, packed: Tensor, scale_zero: Tensor, layout: Layout, gemm: torch.dtype, out: Tensor
) -> None:
    """out[M, N] = x[M, K] @ W.t(), straight from torch's packed layout."""
    rows, k = x.shape
    if not rows:
        return
    x = x.to(gemm)
    scratch: Scratch | None = None
    for run in layout:
        step = min(channels_per_block(k, run.channels), run.blocks * run.channels)
        if scratch is None or scratch.weight.numel() < step * k:
            scratch = Scratch(step, k, gemm)
        for first in range(run.first, run.stop, step):
            part = run.take(first, min(first + step, run.stop))
            half = part.channels // 2
            planes = packed_planes(packed, scale_zero, part, scratch)
            shape = (rows, part.blocks, 2, half) if part.halves else (rows, part.blocks, half, 2)
            target = out[:, part.first : part.stop].view(shape)
            for i in (0, 1):
                product = torch.mm(x, planes[i]).view(rows, part.blocks, half)
                target.select(2 if part.halves else 3, i).copy_(product)


Rows = Callable[[int, int, Scratch], Tensor]


def linear_rows(x: Tensor, n: int, weight: Rows, gemm: torch.dtype, out: Tensor) -> None:
    """out[M, N] = x[M, K] @ W.t() where `weight(first, stop, scratch)` gives those channels of W."""
    k = x.shape[1]
    if not x.shape[0]:
        return
    x = x.to(gemm)
    step = min(channels_per_block(k, 16), n)
    scratch = Scratch(step, k, gemm)
    for first in range(0, n, step):
        stop = min(first + step, n)
        out[:, first:stop].copy_(torch.mm(x, weight(first, stop, scratch).t()))


def linear_bf16(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out fp32 [M, N] = x[M, K] @ W.t() for a bf16 weight that was never quantized, widened block by block."""

    def rows(first: int, stop: int, scratch: Scratch) -> Tensor:
        block = weight[first:stop]
        return scratch.weight[: block.numel()].view(block.shape).copy_(block)

    linear_rows(x, weight.shape[0], rows, torch.float32, out)
