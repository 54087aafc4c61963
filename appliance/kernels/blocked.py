"""The layout `int4-b16-1` in plain torch: from the checkpoint's tensors to blocks of 16 channels, and back.

For each block of 16 channels and each group of g columns one contiguous record: the codes, then 16 bf16 scales, then 16
bf16 zeros. The codes are dwords, one a channel, 16 beside each other: the checkpoint's own four bytes of that channel
(8 columns with 4 bits, 4 columns with 8). So packing moves bytes and computes nothing, a core reads one stream, and a
vector of 16 dwords holds the same columns of 16 channels.

Rules: missing channels of the last block are zero (code, scale and offset); whole blocks only, so weights that stand
one after the other along N are one weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.kernels.reference import Portable
from appliance.prepared import BLOCK, record_bytes, run_bytes


def pack(portable: Portable, channels: int | None = None) -> Tensor:
    """uint8 [bytes] of a weight; `channels` pads it with zero channels up to that number."""
    n, k, group, bits = channels or portable.n, portable.k, portable.group, portable.bits
    blocks, groups = -(-n // BLOCK), k // group
    codes = _padded(portable.packed, blocks).view(torch.int32).view(blocks, BLOCK, groups, -1).permute(0, 2, 3, 1)
    out = torch.empty(blocks, groups, record_bytes(group, bits), dtype=torch.uint8)
    coded = BLOCK * group * bits // 8
    out[..., :coded].view(torch.int32).view(codes.shape).copy_(codes)
    for first, values in ((coded, portable.scale), (coded + 2 * BLOCK, portable.zero)):
        words = _padded(values.view(torch.int16), blocks).view(blocks, BLOCK, groups).transpose(1, 2)
        out[..., first : first + 2 * BLOCK].view(torch.int16).copy_(words)
    return out.view(-1)


def unpack(blocked: Tensor, n: int, k: int, group: int, bits: int) -> Portable:
    """The first `n` channels as the checkpoint stores them; the inverse of `pack`."""
    if blocked.numel() != run_bytes(n, k, group, bits):
        raise ValueError(f"{blocked.numel()} bytes are not a weight of {n} x {k}, group {group}, {bits} bits")
    blocks, groups, coded = -(-n // BLOCK), k // group, BLOCK * group * bits // 8
    records = blocked.view(blocks, groups, -1)
    dwords = records[..., :coded].contiguous().view(torch.int32).view(blocks, groups, -1, BLOCK).permute(0, 3, 1, 2)
    packed = dwords.contiguous().view(blocks * BLOCK, -1).view(torch.uint8)[:n]

    def column(first: int) -> Tensor:
        words = records[..., first : first + 2 * BLOCK].contiguous().view(torch.bfloat16)
        return words.transpose(1, 2).reshape(blocks * BLOCK, groups)[:n]

    return Portable(packed=packed, scale=column(coded), zero=column(coded + 2 * BLOCK), bits=bits)


def _padded(values: Tensor, blocks: int) -> Tensor:
    missing = blocks * BLOCK - values.shape[0]
    if not missing:
        return values.contiguous()
    return torch.cat((values, values.new_zeros(missing, values.shape[1])))
