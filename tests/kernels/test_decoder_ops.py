"""The fused operators of a decoder layer against fp64: every variant that this machine runs, and their promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from appliance.kernels import blocked, reference  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels.library import Library, load  # noqa: E402

pytestmark = pytest.mark.worker

loaded = load()
VARIANTS = loaded.library.variants if loaded.library else ()
ROWS = (0, 1, 2, 16, 17, 253, 300)
"""Both kernels for few rows and many, and more than the rows of one parallel region."""
NONE = torch.empty(0)
LIMIT = 2e-4
ROUNDED = 1.05
"""Times what bf16 rounding of the result alone costs."""
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Widths of a layer; `rotary` below `size` rotates a part of each head."""

    width: int
    inner: int
    heads: int
    key_heads: int
    size: int
    group: int
    rotary: int
    bias: bool = False
    head_norms: bool = False


CASES = {
    "llama": Case(width=192, inner=320, heads=3, key_heads=1, size=64, group=64, rotary=64),
    "qwen2": Case(width=128, inner=96, heads=4, key_heads=2, size=32, group=32, rotary=32, bias=True),
    "qwen3": Case(width=256, inner=512, heads=2, key_heads=2, size=128, group=128, rotary=128, head_norms=True),
    "partial rotation": Case(width=160, inner=64, heads=2, key_heads=1, size=80, group=32, rotary=32),
}


@pytest.fixture(autouse=True)
def library() -> Iterator[Library]:
    """The library; variant and threads are put back."""
    assert loaded.library is not None, loaded.refusal
    before, threads = loaded.library.variant, torch.get_num_threads()
    with torch.inference_mode():
        yield loaded.library
    loaded.library.use(before)
    torch.set_num_threads(threads)


class Layer:
    """Random weights of a case, their operators' arguments, and the same in fp64."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        self.case = case
        self.make = torch.Generator().manual_seed(seed)
        channels = (case.heads + 2 * case.key_heads) * case.size
        self.qkv, self.out = self.weight(channels, case.width), self.weight(case.width, case.heads * case.size)
        self.gate_up, self.down = self.weight(2 * case.inner, case.width), self.weight(case.width, case.inner)
        self.norm = self.normal(case.width, around=1)
        self.bias = self.normal(channels) if case.bias else None
        self.head_norms = [self.normal(case.size, around=1) for _ in range(2)] if case.head_norms else [None, None]
        angles = torch.randn(400, case.rotary // 2, generator=self.make)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def weight(self, n: int, k: int) -> reference.Portable:
        return reference.quantize(torch.randn(n, k, generator=self.make) * k**-0.5, self.case.group)

    def normal(self, *shape: int, around: float = 0) -> Any:
        return (torch.randn(*shape, generator=self.make) * 0.3 + around).bfloat16()

    def norm_qkv(self, hidden: Any, residual: Any, positions: Any) -> Any:
        qkv = torch.empty(residual.shape[0], self.qkv.n, dtype=torch.bfloat16)
        torch.ops.cpu_int4.norm_qkv(
            hidden, residual, self.norm, EPSILON, blocked.pack(self.qkv), self.case.group,
            NONE if self.bias is None else self.bias, *(NONE if n is None else n for n in self.head_norms), EPSILON, positions,
            self.cos_sin, self.case.heads, self.case.key_heads, qkv)
        return qkv

    def norm_qkv_reference(self, residual: Any, positions: Any) -> Any:
        case = self.case
        x = reference.linear(normalized(residual, self.norm), self.qkv)
        if self.bias is not None:
            x = x + self.bias.double()
        heads = x.view(-1, case.heads + 2 * case.key_heads, case.size).clone()
        borders = (0, case.heads, case.heads + case.key_heads)
        for first, stop, norm in zip(borders, borders[1:], self.head_norms, strict=False):
            part = heads[:, first:stop]
            if norm is not None:
                part = normalized(part, norm)
            cosine, sine = self.cos_sin.double()[positions].chunk(2, dim=-1)
            a, b, rest = part.split((case.rotary // 2, case.rotary // 2, case.size - case.rotary), dim=-1)
            cosine, sine = cosine[:, None], sine[:, None]
            heads[:, first:stop] = torch.cat((a * cosine - b * sine, b * cosine + a * sine, rest), dim=-1)
        return heads.flatten(1)

    def out_mlp(self, attention: Any, residual: Any) -> Any:
        group, hidden = self.case.group, torch.empty_like(residual)
        torch.ops.cpu_int4.out_mlp(
            attention, residual, blocked.pack(self.out), group, self.norm, EPSILON, blocked.pack(self.gate_up), group,
            blocked.pack(self.down), group, self.case.inner, hidden)
        return hidden

    def out_mlp_reference(self, attention: Any, residual: Any) -> tuple[Any, Any]:
        total = residual.double() + reference.linear(attention, self.out)
        gate, up = reference.linear(normalized(total, self.norm), self.gate_up).chunk(2, dim=-1)
        return reference.linear(torch.nn.functional.silu(gate) * up, self.down), total


def normalized(x: Any, weight: Any) -> Any:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def error(got: Any, want: Any) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def inputs(case: Case, rows: int) -> tuple[Any, Any, Any, Any]:
    make = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, case.width, generator=make) * 3, torch.randn(rows, case.width, generator=make) * 20,
            torch.randint(0, 400, (rows,), generator=make),
            torch.randn(rows, case.heads * case.size, generator=make).bfloat16())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_norm_qkv_agrees_with_fp64(library: Library, variant: str, case: Case) -> None:
    library.use(variant)
    layer = Layer(case)
    for rows in ROWS:
        hidden, residual, positions, _ = inputs(case, rows)
        for added in (hidden, NONE):
            total = residual.clone()
            got = layer.norm_qkv(added, total, positions)
            want = residual + hidden if added is hidden else residual
            assert torch.equal(total, want), "the residual stream is the sum, in fp32"
            if rows:
                exact = layer.norm_qkv_reference(want, positions)
                assert error(got, exact) < ROUNDED * error(exact.bfloat16(), exact)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_out_mlp_agrees_with_fp64(library: Library, variant: str, case: Case) -> None:
    library.use(variant)
    layer = Layer(case)
    for rows in ROWS:
        _, residual, _, attention = inputs(case, rows)
        total = residual.clone()
        hidden = layer.out_mlp(attention, total)
        if rows:
            want, want_total = layer.out_mlp_reference(attention, residual)
            assert error(hidden, want) < LIMIT
            assert error(total, want_total) < LIMIT / 10, "the residual stream is fp32"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_last_norm_agrees_with_fp64(library: Library, variant: str, rows: int) -> None:
    library.use(variant)
    hidden, residual, _, _ = inputs(CASES["llama"], rows)
    weight = Layer(CASES["llama"]).norm
    got = torch.ops.cpu_int4.norm(hidden, residual.clone(), weight, EPSILON)
    assert got.dtype == torch.float32
    assert error(got, normalized(hidden + residual, weight)) < 1e-6


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_any_number_of_threads_gives_the_same_bits(rows: int) -> None:
    layer = Layer(CASES["llama"])
    hidden, residual, positions, attention = inputs(layer.case, rows)
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        total = residual.clone()
        results.append((layer.norm_qkv(hidden, total, positions), layer.out_mlp(attention, total), total))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(library: Library, variant: str, value: float) -> None:
    library.use(variant)
    layer = Layer(CASES["llama"])
    for rows in (3, 20):
        hidden, residual, positions, attention = inputs(layer.case, rows)
        residual[1, 5] = value
        total = residual.clone()
        results = (layer.norm_qkv(hidden, total, positions), layer.out_mlp(attention, total))
        for result in results:
            finite = torch.isfinite(result.float())
            assert not finite[1].any()
            assert finite[0].all()
            assert finite[2:].all()


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer(CASES["llama"])
    hidden, residual, positions, attention = inputs(layer.case, 2)
    with pytest.raises(RuntimeError, match="a position is too large"):
        layer.norm_qkv(hidden, residual, positions + 400)
    with pytest.raises(RuntimeError, match="not dense rows"):
        layer.norm_qkv(hidden.bfloat16(), residual, positions)
    with pytest.raises(RuntimeError, match="not of its layer's shape"):
        layer.out_mlp(torch.cat((attention, attention), dim=1), residual)
