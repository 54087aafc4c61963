"""Reader of the packed layout that `torch.ops.aten._convert_weight_to_int4pack_for_cpu` writes.

The layout depends on the number of channels N and on the instruction set that ATen dispatched to, not on the number of
columns K: a weight is a run of blocks of C channels, each block [K][C/2] bytes, and every byte holds two channels of
one column. Which C, and which two channels, is measured: known codes are packed (the 4-bit digits of each nibble's
channel and column number) and found again. Nothing is assumed about the ISA.

Rules: a layout that is not understood, or that fails on random codes of another K, is None and the layer keeps its
portable copy. Reading is plain eager ATen (no compiler); 16-byte runs are moved as one element, which is what makes
it fast. Pure: `layout_of` caches one small value per N for the process, whose capability cannot change.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

MEASURED_K = 32
VERIFIED_K = 96
BLOCK_CHANNELS = (16, 32, 48, 64, 80, 96, 112, 128)
"""Block sizes looked for, smallest first; 16 is the packer's granularity."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """`blocks` equal blocks of `channels` channels, from channel `first` on.

    `halves`: byte d of a column holds channel d (low nibble) and d + channels/2 (high); else channels 2d and 2d + 1.
    """

    first: int
    blocks: int
    channels: int
    halves: bool

    @property
    def stop(self) -> int:
        return self.first + self.blocks * self.channels

    def take(self, first: int, stop: int) -> Run:
        """The part of this run that holds channels first..stop; both on block borders."""
        return Run(first=first, blocks=(stop - first) // self.channels, channels=self.channels, halves=self.halves)


Layout = tuple[Run, ...]


def pack(codes: Tensor) -> Tensor:
    """int32 codes [N, K] in torch's layout for this process: uint8 [N, K/2]."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
    return packed


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch is not typed in the agent
def layout_of(n: int) -> Layout | None:
    """The layout of a packed weight with `n` channels, measured once; None when it is not understood."""
    return _measured(n)


@functools.cache
def _measured(n: int) -> Layout | None:
    blocks = _measure(n)
    if blocks is None:
        return None
    layout = _runs(blocks)
    codes = torch.randint(0, 16, (n, VERIFIED_K), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    return layout if torch.equal(unpack(pack(codes), layout), codes) else None


def unpack(packed: Tensor, layout: Layout) -> Tensor:
    """Codes uint8 [N, K] of a packed weight uint8 [N, K/2]: slow, for tests and verification."""
    n, k = packed.shape[0], packed.shape[1] * 2
    codes = torch.empty(n, k, dtype=torch.uint8)
    for run in layout:
        data = run_bytes(packed, run)
        low, high = (data & 15), (data >> 4)
        pair = torch.stack((low, high), dim=2 if run.halves else 3)
        codes[run.first : run.stop] = pair.reshape(run.blocks, k, run.channels).transpose(1, 2).reshape(-1, k)
    return codes


def run_bytes(packed: Tensor, run: Run) -> Tensor:
    """View of the run's bytes: uint8 [blocks, K, channels/2]."""
    k = packed.shape[1] * 2
    # No properties of `run` here: torch.compile cannot trace them.
    area = packed.view(-1).narrow(0, run.first * k // 2, run.blocks * run.channels * k // 2)
    return area.view(run.blocks, k, run.channels // 2)


def column_major(data: Tensor, out: Tensor) -> Tensor:
    """Bytes [blocks, K, B] to [K, blocks * B], one row a column of the weight. `out`: uint8 scratch of that size."""
    blocks, k, b = data.shape
    if blocks == 1:
        return data[0]
    view = out.view(-1)[: data.numel()].view(k, blocks, b)
    # ATen copies a transposed tensor element by element, so make the elements as large as they can be.
    wide = torch.complex128 if b % 16 == 0 else torch.int64 if b % 8 == 0 else torch.uint8
    view.view(wide).copy_(data.view(wide).transpose(0, 1))
    return view.view(k, blocks * b)


def code_rows(packed: Tensor, layout: Layout, ids: Tensor) -> Tensor:
    """Codes uint8 [T, K] of the channels `ids` (int64 [T], each below N), straight from the packed weight."""
    k = packed.shape[1] * 2
    out = torch.empty(ids.numel(), k, dtype=torch.uint8)
    for run in layout:
        whole = len(layout) == 1
        where = None if whole else ((ids >= run.first) & (ids < run.stop)).nonzero()[:, 0]
        local = ids if where is None else ids[where] - run.first
        block, inside = local // run.channels, local % run.channels
        half = run.channels // 2
        byte, high = (inside % half, inside // half) if run.halves else (inside // 2, inside % 2)
        found = run_bytes(packed, run)[block, :, byte]
        codes = torch.where(high.bool()[:, None], found >> 4, found & 15)
        if where is None:
            return codes
        out[where] = codes
    return out


def _measure(n: int) -> tuple[tuple[int, bool], ...] | None:
    """(channels, halves) of every block in order, from packs of known codes."""
    k = MEASURED_K
    channel = torch.zeros(n * k // 2, 2, dtype=torch.int32)
    column = torch.zeros_like(channel)
    for target, index, count in ((channel, torch.arange(n).view(n, 1), n), (column, torch.arange(k).view(1, k), k)):
        shift = 0
        while (count - 1) >> shift:
            digit = ((index >> shift) & 15).to(torch.int32).expand(n, k)
            found = pack(digit).view(-1)
            target[:, 0] += (found & 15).to(torch.int32) << shift
            target[:, 1] += (found >> 4).to(torch.int32) << shift
            shift += 4
    blocks: list[tuple[int, bool]] = []
    first = 0
    while first < n:
        block = _block_at(channel, column, first, n)
        if block is None:
            return None
        blocks.append(block)
        first += block[0]
    return tuple(blocks)


def _block_at(channel: Tensor, column: Tensor, first: int, n: int) -> tuple[int, bool] | None:
    k = MEASURED_K
    for size in BLOCK_CHANNELS:
        if first + size > n:
            return None
        area = slice(first * k // 2, (first + size) * k // 2)
        if not torch.equal(column[area].view(k, size), torch.arange(k, dtype=torch.int32).view(k, 1).expand(k, size)):
            continue
        found = channel[area].view(k, size // 2, 2) - first
        order = torch.arange(size, dtype=torch.int32)
        for halves, want in ((True, order.view(2, size // 2).t()), (False, order.view(size // 2, 2))):
            if torch.equal(found, want.expand_as(found)):
                return size, halves
    return None


def _runs(blocks: tuple[tuple[int, bool], ...]) -> Layout:
    runs: list[Run] = []
    first = 0
    for (channels, halves), same in groupby(blocks):
        run = Run(first=first, blocks=len(list(same)), channels=channels, halves=halves)
        runs.append(run)
        first = run.stop
    return tuple(runs)


def pack_portable(packed: Tensor, chunk_bytes: int = 8 << 20) -> Tensor:
    """Checkpoint bytes [N, K/2] to torch's layout [N, K/2], with at most about `chunk_bytes` of int32 codes at a time.

    The packer wants int32 codes, 8 times the size of the bytes. Chunks of channels are packed one by one where the
    measured layouts say that the parts, one after the other, are the whole.
    """
    from appliance.kernels import reference

    n, half = packed.shape
    step = max(128, chunk_bytes // (8 * half) // 128 * 128)
    whole = layout_of(n)
    parts = [(i, min(i + step, n)) for i in range(0, n, step)]
    if whole is None or _blocks(whole) != sum((_blocks(layout_of(b - a) or ()) for a, b in parts), ()):
        parts = [(0, n)]
    out = torch.empty(n, half, dtype=torch.uint8)
    for a, b in parts:
        out[a:b] = pack(reference.unpack(packed[a:b])).view(b - a, half)
    return out


def _blocks(layout: Layout) -> tuple[tuple[int, bool], ...]:
    return tuple((run.channels, run.halves) for run in layout for _ in range(run.blocks))
