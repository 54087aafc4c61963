"""The layout reader under every ATen capability. Packing under a forced AVX-512 works anywhere; its matmul does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from appliance.kernels import dequantize, layout, reference  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels.layout import Run  # noqa: E402
from tests.kernels.pack_everything import CHANNELS, COLUMNS  # noqa: E402

pytestmark = pytest.mark.worker

CASES = [(n, k) for n in CHANNELS for k in COLUMNS if n < 10_000 or k == COLUMNS[0]]


@pytest.fixture(scope="module", params=["default", "avx2", "avx512"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    out = tmp_path_factory.mktemp("packed") / "found.pt"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": request.param, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "tests.kernels.pack_everything", str(out)], env=env, check=True,
                   cwd=Path(__file__).parents[2], timeout=120)
    found: dict[Any, Any] = torch.load(out)
    assert found["capability"].lower() == request.param
    return found


def _runs(case: dict[str, Any]) -> tuple[Run, ...]:
    assert case["runs"] is not None, "the layout was not understood"
    return tuple(Run(**run) for run in case["runs"])


def test_case_023_codes_are_recovered(found: dict[Any, Any]) -> None:
    for key in CASES:
        case = found[key]
        assert torch.equal(layout.unpack(case["packed"], _runs(case)), case["codes"]), key
        assert torch.equal(case["rows"], case["codes"][case["ids"]]), key


def test_the_layout_does_not_depend_on_the_columns(found: dict[Any, Any]) -> None:
    for n in CHANNELS[:-1]:
        assert found[n, COLUMNS[0]]["runs"] == found[n, COLUMNS[1]]["runs"]
    assert not {layout.MEASURED_K, layout.VERIFIED_K} & set(COLUMNS), "else nothing would be proved"


def test_packing_in_chunks_gives_the_same_bytes(found: dict[Any, Any]) -> None:
    for key in CASES:
        assert torch.equal(found[key]["chunked"], found[key]["packed"]), key


@pytest.mark.parametrize("gemm", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_direct_dequant_equals_split_halves_bit_for_bit(found: dict[Any, Any], gemm: Any) -> None:
    """The layout of every capability is read here, in this host's own: reading is the same arithmetic everywhere."""
    from appliance.kernels.aten import split_halves

    for n, k in CASES[:-1]:
        case, group = found[n, k], 64  # 192 / 64 is an odd number of groups
        generator = torch.Generator().manual_seed(n)
        scale_zero = torch.randn(k // group, n, 2, generator=generator).to(torch.bfloat16)
        scratch = dequantize.Scratch(n, k, gemm)
        direct = torch.empty(n, k, dtype=gemm)
        for run in _runs(case):
            planes = dequantize.packed_planes(case["packed"], scale_zero, run, scratch)
            both = planes.view(2, k, run.blocks, run.channels // 2)
            order = (2, 0, 3, 1) if run.halves else (2, 3, 0, 1)
            direct[run.first : run.stop] = both.permute(order).reshape(-1, k)
        halves = split_halves(reference.pack(case["codes"]))
        assert torch.equal(direct, dequantize.halves_rows(halves, scale_zero, 0, n, scratch)), (n, k)
        portable = reference.Portable(packed=reference.pack(case["codes"]), scale=scale_zero[..., 0].t().contiguous(),
                                      zero=scale_zero[..., 1].t().contiguous())
        # Random signs make the offset lose bits that a real group keeps; still far below one step of the grid.
        error = (direct.double() - reference.dequantize(portable)).abs()
        limit = 2.0 ** (-22 if gemm == torch.float32 else -8)
        assert (error <= limit * 16 * (portable.scale.abs().amax() + portable.zero.abs().amax()).double()).all(), (n, k)


def test_direct_dequant_equals_split_halves_under_its_own_capability(found: dict[Any, Any]) -> None:
    """There, not here. The vector instructions of a forced AVX-512 may not exist: then SIGILL is the right answer."""
    capable = found["capability"] != "AVX512" or torch.cpu.get_capabilities().get("avx512_f")
    assert found["dequant"] in (("True",) if capable else ("True", "signal 4"))


def test_many_rows_multiply_through_every_layout(found: dict[Any, Any]) -> None:
    for n, k in CASES[:-1]:
        case = found[n, k]
        scale_zero = torch.rand(k // 32, n, 2, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)
        x = torch.randn(5, k, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)
        out = torch.empty(5, n, dtype=torch.bfloat16)
        dequantize.linear_packed(x, case["packed"], scale_zero, _runs(case), torch.float32, out)
        portable = reference.Portable(packed=reference.pack(case["codes"]), scale=scale_zero[..., 0].t(),
                                      zero=scale_zero[..., 1].t())
        want = reference.linear(x, portable)
        assert (out.double() - want).norm() < 0.003 * want.norm(), (n, k)


def test_a_layout_of_another_order_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that shuffles channels inside a block must end at the portable copy, not in wrong numbers."""
    packer = layout.pack
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(layout, "pack", lambda codes: packer(codes[order]))
    assert layout._measured.__wrapped__(32) is None
