"""The grids: choose the scale, the offset and the 4-bit (for tables also 8-bit) codes of groups of weights.

Works on one block of rows at a time; the caller bounds the block. Runs in the worker's environment (torch imported
inside functions). Rules: codes are chosen against the bf16-rounded scale and zero that are stored, never the exact
ones; every stored scale is non-zero and every dequantized value is finite in bfloat16; a group whose spread is smaller
than the rounding of its offset gets the smallest step that still covers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SMALLEST_STEP = 2.0**-126
"""The smallest normal bfloat16: never zero, and multiplied by 255 still nothing."""


def middle(bits: int) -> int:
    """The code that stands for the offset itself: 8 of 0..15, 128 of 0..255."""
    return int(1 << (bits - 1))


def minmax(weights: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize float32 weights [n, K], all finite in bfloat16, in groups of `group` columns (K % group == 0).

    Returns codes uint8 [n, K] of `bits` bits, scale bf16 [n, K/group], zero bf16 [n, K/group]. With 4 bits:
    scale = (max - min) / 15 and zero = min + 8 * scale before rounding, so both ends of a group come back exactly.
    """
    n, k = weights.shape
    groups = weights.reshape(n, k // group, group)
    scale, zero = whole_range(groups, bits)
    return nearest(groups, scale, zero, bits).view(n, k), scale, zero


def searched(weights: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with the scale and zero of the smallest squared error (`appliance.quantize.search`)."""
    import torch

    from appliance.quantize.search import search

    n, k = weights.shape
    groups = weights.reshape(-1, group)
    scale, zero = (part.float() for part in whole_range(groups, bits))
    search(groups, scale, zero, bits)
    found, offset = (part.to(torch.bfloat16) for part in (scale, zero))
    codes = nearest(groups, found, offset, bits)
    return codes.view(n, k), found.view(n, -1), offset.view(n, -1)


def whole_range(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero bf16 of groups [..., g] that reach from the smallest to the largest value."""
    import torch

    largest, offset_code = (1 << bits) - 1, middle(bits)
    # In float64: the difference of two huge values, and a multiple of it, overflow float32.
    low, high = groups.amin(dim=-1).double(), groups.amax(dim=-1).double()
    step = (high - low) / largest
    exact = low + offset_code * step
    zero = exact.to(torch.bfloat16)
    offset = zero.double()
    # A spread that drowns in the rounding of the offset (0.37, 0.37, ...): cover it from the rounded offset instead.
    covering = torch.maximum((offset - low) / offset_code, (high - offset) / (largest - offset_code))
    drowned = (offset - exact).abs() > step / 2
    return torch.where(drowned, covering, step).clamp(min=SMALLEST_STEP).to(torch.bfloat16), zero


def nearest(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 of groups [..., g]: those whose values are nearest and finite in bfloat16."""
    import torch

    largest, offset_code = (1 << bits) - 1, middle(bits)
    codes = (groups - zero.float().unsqueeze(-1)).div_(scale.float().unsqueeze(-1))
    codes.round_().add_(offset_code).clamp_(0, largest)
    _stay_finite(codes, scale, zero, bits)
    return codes.to(torch.uint8)


def _stay_finite(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> None:
    """Move codes [n, G, g] one step inwards where rounding took the value beyond bfloat16's range (in place)."""
    import torch

    extreme = scale.float().mul(middle(bits)).abs() + zero.float().abs()
    largest = torch.finfo(torch.bfloat16).max
    if not bool((extreme >= largest / 2).any()):
        return
    for _ in range(2):
        values = (codes - middle(bits)) * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
        beyond = torch.isinf(values.to(torch.bfloat16))
        codes -= torch.where(beyond, values.sign(), torch.zeros_like(values))
    codes.clamp_(0, (1 << bits) - 1)


def pack(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Codes uint8 [n, K] -> packed uint8 [n, K/2]: byte j = code[2j] | code[2j+1] << 4; 8 bits stay as they are."""
    if bits == 8:
        return codes
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Packed uint8 [n, K/2] -> codes uint8 [n, K]; the inverse of `pack`."""
    import torch

    return torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], -1)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """(code - 8) * scale + zero in float32, - 128 with 8 bits: codes [n, K], scale and zero [n, G] -> [n, K]."""
    n, k = codes.shape
    grouped = codes.view(n, scale.shape[1], -1).float().sub_(middle(bits))
    return grouped.mul_(scale.float().unsqueeze(-1)).add_(zero.float().unsqueeze(-1)).view(n, k)
