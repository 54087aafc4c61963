"""The min/max grid: quality floor and groups that are hard to divide by."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import appliance.quantize.search as search_module  # noqa: E402  (after the skip)
from appliance.quantize.grid import dequantize, minmax, pack, searched, unpack, whole_range  # noqa: E402

pytestmark = pytest.mark.worker


def snr_db(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    exact = exact.double()
    return float(10 * torch.log10(exact.square().sum() / (exact - approximate.double()).square().sum()))


def bf16_step(values: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring bfloat16 numbers at these values (2^-133 below the normal range)."""
    exponent = torch.frexp(values.double().abs().clamp(min=2.0**-126)).exponent - 1
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - 7)


def test_pack_round_trip() -> None:
    codes = torch.randint(0, 16, (7, 64), dtype=torch.uint8)
    packed = pack(codes)
    assert torch.equal(unpack(packed), codes)
    assert packed[3, 5] == codes[3, 10] + 16 * codes[3, 11]


def test_extremes_come_back_before_rounding() -> None:
    w = torch.randn(16, 128, dtype=torch.float64).view(16, 2, 64)
    low, high = w.amin(-1), w.amax(-1)
    scale = (high - low) / 15
    zero = low + 8 * scale
    assert float(((0 - 8) * scale + zero - low).abs().max()) < 1e-5
    assert float(((15 - 8) * scale + zero - high).abs().max()) < 1e-5
    # What is stored is this, rounded to bfloat16.
    codes, stored_scale, stored_zero = minmax(w.view(16, 128).float(), 64)
    assert torch.equal(stored_scale, scale.float().to(torch.bfloat16))
    assert torch.equal(stored_zero, zero.float().to(torch.bfloat16))
    assert int(codes.min()) == 0
    assert int(codes.max()) == 15


@pytest.mark.parametrize(("group", "floor"), [(32, 20.5), (64, 19.0), (128, 17.5), (256, 16.5)])
def test_case_026_every_group_size_numerically(group: int, floor: float) -> None:
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    assert snr_db(w, dequantize(*minmax(w, group))) > floor


@pytest.mark.parametrize(("group", "floor"), [(32, 44.5), (64, 43.0), (128, 41.5), (256, 40.5)])
def test_eight_bits_are_sixteen_times_finer(group: int, floor: float) -> None:
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    codes, scale, zero = minmax(w, group, 8)
    assert snr_db(w, dequantize(codes, scale, zero, 8)) > floor
    assert torch.equal(pack(codes, 8), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_the_nearest_for_the_stored_scale_and_zero(bits: int) -> None:
    w = torch.randn(32, 64) * 0.1 + 0.3
    codes, scale, zero = minmax(w, 64, bits)
    every = (torch.arange(2**bits).view(-1, 1, 1) - 2 ** (bits - 1)) * scale.float() + zero.float()
    assert torch.equal((every - w).abs().amin(0), (dequantize(codes, scale, zero, bits) - w).abs())


CONSTANT = [0.0, -0.0, 0.37, -0.37, 1e-30, -1e30, 3.3e38, -3.38e38, 1.0, 2.0**-126, 65504.0]


@pytest.mark.parametrize("value", CONSTANT)
def test_case_036_constant_groups(value: float) -> None:
    w = torch.full((4, 128), value)
    codes, scale, zero = minmax(w, 64)
    back = dequantize(codes, scale, zero)
    assert bool(torch.isfinite(back.to(torch.bfloat16)).all())
    assert bool((scale.float() != 0).all())
    assert bool(((back.double() - w.double()).abs() <= bf16_step(w)).all())


@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1e-30), (0.37, 1e-30), (0.37, 1e-4), (-5.0, 1e-3), (1e30, 1e20)])
def test_case_036_tiny_spread(offset: float, spread: float) -> None:
    w = offset + spread * torch.rand(8, 64, generator=torch.Generator().manual_seed(0))
    codes, scale, zero = minmax(w, 64)
    assert bool((scale.float() != 0).all())
    error = (dequantize(codes, scale, zero).double() - w.double()).abs()
    assert bool((error <= bf16_step(w) + spread / 15).all())


def test_case_036_subnormal_values() -> None:
    w = torch.arange(64).view(1, 64) * 1e-40
    codes, scale, zero = minmax(w, 64)
    assert bool((scale.float() != 0).all())
    assert float((dequantize(codes, scale, zero) - w).abs().max()) <= 2.0**-126


def test_case_036_huge_groups_stay_finite() -> None:
    largest = float(torch.finfo(torch.bfloat16).max)
    w = torch.linspace(-1, 1, 64).view(1, 64) * largest
    codes, scale, zero = minmax(w, 64)
    back = dequantize(codes, scale, zero)
    assert bool(torch.isfinite(back.to(torch.bfloat16)).all())
    assert float((back.double() - w.double()).abs().max()) <= 2 * largest / 15


HARD = {
    "normal": lambda w: w * 0.02,
    "one value": lambda w: torch.full_like(w, 0.37),
    "zeros": torch.zeros_like,
    "far from zero": lambda w: w * 1e-3 + 5,
    "an outlier": lambda w: torch.cat([w[:, :1] * 100, w[:, 1:]], dim=1),
    "subnormal": lambda w: w * 1e-40,
    "huge": lambda w: w / w.abs().max() * float(torch.finfo(torch.bfloat16).max),
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("group", [32, 64, 256])
def test_search_is_never_worse_than_minmax(kind: str, group: int) -> None:
    w = HARD[kind](torch.randn(40, 512, generator=torch.Generator().manual_seed(2)))
    plain, found = (dequantize(*quantize(w, group)).double() for quantize in (minmax, searched))
    assert bool(torch.isfinite(found.to(torch.bfloat16)).all())
    errors = [(part - w.double()).view(-1, group).square().sum(-1) for part in (plain, found)]
    # Sums of float32 decide; what they cannot tell apart may differ by their rounding.
    assert bool((errors[1] <= errors[0] * 1.001 + 1e-60).all())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_search_on_normal_weights(group: int) -> None:
    """Narrower ranges and least squares win at least 0.7 dB where nothing stands out."""
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    gain = snr_db(w, dequantize(*searched(w, group))) - snr_db(w, dequantize(*minmax(w, group)))
    assert gain > 0.7


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("bits", [4, 8])
def test_native_search_gives_the_bits_of_torch(kind: str, bits: int) -> None:
    if search_module._native() is None:
        pytest.skip("no native library here")
    groups = HARD[kind](torch.randn(333, 64, generator=torch.Generator().manual_seed(4)))
    scale, zero = (part.float() for part in whole_range(groups, bits))
    others = scale.clone(), zero.clone()
    search_module.search(groups, scale, zero, bits)
    search_module._search(groups, *others, bits)
    assert torch.equal(scale, others[0])
    assert torch.equal(zero, others[1])
