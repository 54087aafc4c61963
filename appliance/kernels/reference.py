"""The slow obvious reference of the int4 format: fp64, one formula a function, nothing clever.

Every other kernel is compared with this one. It also writes test checkpoints. It does not choose good codes: that is
`appliance.quantize.grid`; here the plain min/max grid is enough.

Rules: w = (code - 8) * scale + zero; byte j of a row = code[2j] | code[2j+1] << 4; scale and zero are bf16. Tables may
have 8 bits: w = (code - 128) * scale + zero, one code a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Portable:
    """One weight [N, K] of 4 or 8 bits as the checkpoint stores it."""

    packed: Tensor
    """uint8 [N, K/2], or [N, K] with 8 bits"""
    scale: Tensor
    """bf16 [N, K/g]"""
    zero: Tensor
    """bf16 [N, K/g]"""
    bits: int = 4

    @property
    def n(self) -> int:
        return int(self.packed.shape[0])

    @property
    def k(self) -> int:
        return int(self.packed.shape[1]) * 8 // self.bits

    @property
    def group(self) -> int:
        return self.k // int(self.scale.shape[1])


def pack(codes: Tensor) -> Tensor:
    """Codes [N, K] of any integer type, 0..15, to bytes [N, K/2]."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [N, K/2] to uint8 codes [N, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1)


def quantize(weight: Tensor, group: int, bits: int = 4) -> Portable:
    """Min/max grid of a weight [N, K] of any float type; the codes are chosen against the rounded scale and zero."""
    n, k = weight.shape
    largest, middle = 2**bits - 1, 2 ** (bits - 1)
    w = weight.double().view(n, k // group, group)
    low, high = w.amin(dim=-1), w.amax(dim=-1)
    scale = ((high - low) / largest).to(torch.bfloat16)
    zero = (low + middle * scale.double()).to(torch.bfloat16)
    step = torch.where(scale == 0, 1.0, scale.double())[..., None]
    codes = ((w - zero.double()[..., None]) / step + middle).round().clamp(0, largest).view(n, k)
    packed = pack(codes) if bits == 4 else codes.to(torch.uint8)
    return Portable(packed=packed, scale=scale, zero=zero, bits=bits)


def dequantize(portable: Portable) -> Tensor:
    """The weight [N, K] in fp64."""
    codes = (unpack(portable.packed) if portable.bits == 4 else portable.packed).double()
    codes = codes.view(portable.n, -1, portable.group)
    w = (codes - 2 ** (portable.bits - 1)) * portable.scale.double()[..., None] + portable.zero.double()[..., None]
    return w.view(portable.n, portable.k)


def linear(x: Tensor, portable: Portable) -> Tensor:
    """x [M, K] of any float type times the weight, transposed: fp64 [M, N]."""
    return x.double() @ dequantize(portable).t()
