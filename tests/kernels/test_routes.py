"""Every kernel and route against the fp64 reference, and which rows reach torch's one-row kernel."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from appliance.kernels import dequantize, reference  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels.library import load  # noqa: E402
from appliance.kernels.registry import Kernel, LayerShape, kernel_named, kernels, torch_host  # noqa: E402
from appliance.kernels.selftest import ROWS, signal_db  # noqa: E402
from tests.kernels.recorder import Int4Calls, LargestTensor  # noqa: E402

pytestmark = pytest.mark.worker

CHANNELS = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 960)
COLUMNS = (64, 128, 192, 576)
GROUPS = (32, 64, 128, 256)


def _layer(n: int, k: int, group: int) -> tuple[reference.Portable, LayerShape]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k + group))
    return reference.quantize(weight, group), LayerShape(n=n, k=k, group=group)


def _routes(portable: reference.Portable, shape: LayerShape) -> Iterator[tuple[str, Kernel, list[Any]]]:
    for kernel in kernels():
        if kernel.why_not(shape, torch_host()) is None:
            for direct in (True, False):
                yield f"{kernel.name} {direct}", kernel, list(kernel.prepare(portable, direct=direct).values())


def _activations(rows: int, k: int) -> Any:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)


def _multiply(kernel: Kernel, x: Any, tensors: list[Any], shape: LayerShape, threshold: int = 2) -> Any:
    out = torch.full((x.shape[0], shape.n), float("nan"), dtype=torch.bfloat16)
    kernel.linear(x, tensors, shape, threshold, out)
    return out


@pytest.mark.parametrize("n", CHANNELS)
def test_case_023_every_route_equals_the_reference(n: int) -> None:
    for k, group in ((k, g) for k in COLUMNS for g in GROUPS if k % g == 0):
        portable, shape = _layer(n, k, group)
        names = [name for name, _, _ in _routes(portable, shape)]
        assert names == [f"{name} {direct}" for name in ("native", "aten", "portable") for direct in (True, False)]
        for name, kernel, tensors in _routes(portable, shape):
            for rows in (1, 2, 7):
                x = _activations(rows, k)
                got = _multiply(kernel, x, tensors, shape)
                assert signal_db(got, reference.linear(x, portable)) > 44, (name, n, k, group, rows)


@pytest.mark.parametrize("shape", [(23, 64, 32), (1, 64, 64), (40, 192, 64)])
def test_a_shape_torch_refuses_goes_the_portable_way(shape: tuple[int, int, int]) -> None:
    portable, layer = _layer(*shape)
    routes = list(_routes(portable, layer))
    assert {kernel.name for _, kernel, _ in routes} == {"native", "portable"}
    floor = 44 if torch_host().gemm == torch.float32 else 36  # one value from weights rounded to bf16
    for (name, kernel, tensors), rows in itertools.product(routes, (1, 3)):
        x = _activations(rows, layer.k)
        assert signal_db(_multiply(kernel, x, tensors, layer), reference.linear(x, portable)) > floor, name


def test_one_row_and_many_rows_agree() -> None:
    for n, k, group in ((576, 576, 64), (192, 1536, 32), (960, 576, 64)):
        portable, shape = _layer(n, k, group)
        for name, kernel, tensors in _routes(portable, shape):
            x = _activations(4, k)
            many = _multiply(kernel, x, tensors, shape)
            single = torch.cat([_multiply(kernel, x[i : i + 1].contiguous(), tensors, shape) for i in range(4)])
            assert signal_db(single, many) > 40, name


def test_rows_and_whole_weight_equal_the_reference_exactly() -> None:
    """Also with an odd number of groups, which the split-halves copy of the reference implementation could not do."""
    for n, k, group in ((80, 576, 64), (144, 192, 64), (64, 896, 128), (32, 96, 32)):
        portable, shape = _layer(n, k, group)
        want = reference.dequantize(portable)
        ids = torch.tensor([0, n - 1, 5, 5])
        for name, kernel, tensors in _routes(portable, shape):
            assert torch.equal(kernel.whole(tensors, shape).double(), want.to(torch_host().gemm).double()), name
            assert torch.equal(kernel.rows(ids, tensors, shape).double(), want[ids]), name


def test_only_one_row_reaches_the_tile_hazard() -> None:
    """The safety rule: at threshold 2, no call with more than one row reaches torch's kernel, whatever the route."""
    portable, shape = _layer(64, 128, 64)
    for _, kernel, tensors in _routes(portable, shape):
        with Int4Calls() as calls:
            for rows in (0, 1, 2, 7, 64):
                _multiply(kernel, _activations(rows, 128), tensors, shape)
        assert calls.rows == ([1] if kernel.name == "aten" else [])
    with Int4Calls() as calls:  # and the recorder does see a call that breaks the rule
        tensors = list(kernel_named("aten").prepare(portable, direct=True).values())
        _multiply(kernel_named("aten"), _activations(7, 128), tensors, shape, threshold=8)
    assert calls.rows == [7]


def test_the_scratch_is_bounded_whatever_the_number_of_channels() -> None:
    portable, shape = _layer(16384, 1024, 64)
    for name, kernel, tensors in _routes(portable, shape):
        recorder = LargestTensor()
        x = _activations(4, 1024)
        with recorder:
            _multiply(kernel, x, tensors, shape)
        assert recorder.bytes <= dequantize.SCRATCH_BYTES, name
        assert recorder.bytes * 8 < 4 * shape.n * shape.k, "the bound would be no bound"


def test_packing_holds_few_int32_codes() -> None:
    portable, _ = _layer(16384, 1024, 64)
    recorder = LargestTensor()
    with recorder:
        kernel_named("aten").prepare(portable, direct=True)
    assert recorder.bytes <= 9 << 20 < 4 * 16384 * 1024


@pytest.mark.parametrize("view", ["row slice", "column stride", "transposed", "empty"])
def test_case_025_strided_activations(view: str) -> None:
    from appliance.vllm_plugin.ops import int4_linear

    portable, shape = _layer(48, 192, 64)
    x = {
        "row slice": _activations(9, 192)[1:8:3],
        "column stride": _activations(3, 384)[:, ::2],
        "transposed": _activations(192, 3).t(),
        "empty": _activations(3, 192)[:0],
    }[view]
    for name, kernel, tensors in _routes(portable, shape):
        for rows in (x, x[:1]):
            got = int4_linear(rows, tensors, kernel.name, shape.n, shape.k, shape.group, 2, False)
            assert got.shape == (rows.shape[0], 48)
            assert torch.equal(got, int4_linear(rows.clone(memory_format=torch.contiguous_format), tensors, kernel.name,
                                                shape.n, shape.k, shape.group, 2, False)), name
            if rows.shape[0]:
                assert signal_db(got, reference.linear(rows, portable)) > 44, name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    portable, shape = _layer(32, 64, 32)
    for _, kernel, tensors in _routes(portable, shape):
        x = _activations(3, 64)
        x[1, 5] = value
        out = _multiply(kernel, x, tensors, shape)
        assert not torch.isfinite(out[1]).any()
        assert torch.isfinite(out[0]).all()
        assert torch.isfinite(out[2]).all()


def test_a_direct_layer_holds_no_second_copy() -> None:
    portable, _ = _layer(64, 256, 64)
    direct = kernel_named("aten").prepare(portable, direct=True)
    halves = kernel_named("aten").prepare(portable, direct=False)
    codes, groups = 64 * 256 // 2, 2 * 2 * 64 * 4
    assert sum(t.untyped_storage().nbytes() for t in direct.values()) == codes + groups
    assert sum(t.untyped_storage().nbytes() for t in halves.values()) == 2 * codes + groups


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_self_test_passes(capability: str) -> None:
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "appliance.kernels.selftest", "--json"], env=env, text=True,
                          cwd=Path(__file__).parents[2], capture_output=True, timeout=120)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["capability"].lower()) == (0, True, capability)
    native = load().library
    assert native is not None
    assert len(report["variants"]) == len(ROWS) * (2 * len(native.variants) + 2 + 1)
