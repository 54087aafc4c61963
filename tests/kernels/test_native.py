"""The native kernel against the fp64 reference: every variant that this machine runs, odd shapes, and its promises."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from appliance.kernels import blocked, native, reference
from appliance.kernels.library import FILE, Library, load, open_library
from appliance.kernels.registry import LayerShape, choose, kernels, torch_host
from appliance.kernels.selftest import choose_variant

CHANNELS = (*range(16, 161, 16), 192, 576, 960, 2048, 3072, 49152)
COLUMNS = (64, 128, 192, 576, 896, 1536, 2048, 8192)
GROUPS = (32, 64, 128, 256)
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 64, 512)
LIMIT = 2e-4
"""Relative error before output rounding, the issue's limit; 2.5e-5 is what it is."""
LARGEST = 64 << 20
"""N * K * rows of one case: the reference multiplies in fp64."""

loaded = load()
VARIANTS = loaded.library.variants if loaded.library else ()


def cases() -> Iterator[tuple[int, int, int, int, int]]:
    """A sample of all shapes that holds each value of each dimension, the same in every run."""
    every = [case for case in itertools.product(CHANNELS, COLUMNS, GROUPS, ROWS, (4, 8))
             if case[1] % case[2] == 0 and case[0] * case[1] * case[3] <= LARGEST]
    chosen = random.Random(3).sample(every, 90)
    for dimension, values in enumerate((CHANNELS, COLUMNS, GROUPS, ROWS)):
        for value in values:
            if all(case[dimension] != value for case in chosen):
                chosen.append(next(case for case in every if case[dimension] == value))
    return iter(chosen)


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    """The library; the variant in use is put back."""
    assert loaded.library is not None, loaded.refusal
    before = loaded.library.variant
    yield loaded.library
    loaded.library.use(before)


def weight(n: int, k: int, group: int, bits: int = 4, seed: int = 0) -> tuple[reference.Portable, Tensor, LayerShape]:
    generator = torch.Generator().manual_seed(seed)
    portable = reference.quantize(torch.randn(n, k, generator=generator) * 0.1, group, bits)
    return portable, blocked.pack(portable), LayerShape(n=n, k=k, group=group, bits=bits)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_the_library_is_built_and_scalar_runs_everywhere() -> None:
    assert loaded.library is not None, loaded.refusal
    assert VARIANTS[-1] == "scalar"


@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_reference(library: Library, variant: str) -> None:
    library.use(variant)
    worst = {}
    for n, k, group, rows, bits in cases():
        if variant == "scalar" and n * k * rows > LARGEST // 16:
            continue
        portable, packed, layer = weight(n, k, group, bits)
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16()
        found = error(native.linear(x, packed, layer, wide=True), reference.linear(x, portable))
        if found > LIMIT:
            worst[n, k, group, rows, bits] = found
    assert worst == {}


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounded_results_are_at_the_rounding_floor(library: Library, variant: str) -> None:
    library.use(variant)
    portable, packed, layer = weight(576, 1536, 64)
    x = torch.randn(9, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = reference.linear(x, portable)
    floor = error(want.bfloat16(), want)
    assert error(native.linear(x, packed, layer, wide=False), want) <= 1.05 * floor


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_any_number_of_threads_gives_the_same_bits(library: Library, variant: str, rows: int) -> None:
    library.use(variant)
    _, packed, layer = weight(960, 576, 64)
    x = torch.randn(rows, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(native.linear(x, packed, layer, wide=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_a_row_with_nan_or_infinity_spoils_itself_alone(library: Library, variant: str, bad: float, rows: int) -> None:
    library.use(variant)
    portable, packed, layer = weight(48, 192, 64)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[rows // 2, 100] = bad
    out = native.linear(x, packed, layer, wide=True)
    assert not torch.isfinite(out[rows // 2]).any()
    others = [row for row in range(rows) if row != rows // 2]
    if others:
        assert error(out[others], reference.linear(x[others], portable)) < LIMIT


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_sizes_of_activations(library: Library, variant: str) -> None:
    library.use(variant)
    portable, packed, layer = weight(32, 128, 32)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(4))
    x[1] *= 1e30
    x[2] *= 1e-20
    x[3] = 0
    out = native.linear(x, packed, layer, wide=True)
    for row in (0, 1, 2):
        assert error(out[row], reference.linear(x[row : row + 1], portable)[0]) < LIMIT
    assert torch.equal(out[3], torch.zeros(32))


@pytest.mark.parametrize("kind", ["rows", "columns", "transposed", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_strided_and_empty_input(library: Library, kind: str, dtype: torch.dtype, compiled: bool) -> None:
    """Field case 25."""
    library.use(VARIANTS[0])
    _, packed, layer = weight(80, 192, 64)
    base = torch.randn(400, 400, generator=torch.Generator().manual_seed(5)).to(dtype)
    x = {"rows": base[::3, :192], "columns": base[:7, :384:2], "transposed": base[:192, :9].t(), "none": base[:0, :192]}[kind]

    def call(x: Tensor) -> Tensor:
        return native.linear(x, packed, layer, wide=True)

    run = torch.compile(call, backend="eager", dynamic=True, fullgraph=True) if compiled else call
    out = run(x)
    assert out.shape == (x.shape[0], 80)
    assert torch.equal(out, native.linear(x.contiguous(), packed, layer, wide=True))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("wide", [False, True])
def test_a_bias_is_added_once(library: Library, rows: int, wide: bool) -> None:
    portable, packed, layer = weight(48, 64, 32)
    x = torch.randn(rows, 64).bfloat16()
    bias = torch.randn(48).bfloat16()
    want = reference.linear(x, portable) + bias.double()
    assert error(native.linear(x, packed, layer, bias, wide=wide), want) < (LIMIT if wide else 3e-3)


@pytest.mark.parametrize("n", [1, 17, 40, 100])
def test_channels_that_fill_no_block(library: Library, n: int) -> None:
    portable, packed, layer = weight(n, 128, 64)
    for rows in (1, 18):
        x = torch.randn(rows, 128).bfloat16()
        assert error(native.linear(x, packed, layer, wide=True), reference.linear(x, portable)) < LIMIT


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_the_table_are_exact(library: Library, variant: str, bits: int) -> None:
    library.use(variant)
    portable, packed, layer = weight(576, 192, 64, bits)
    ids = torch.randint(0, 576, (300,), generator=torch.Generator().manual_seed(6))
    assert torch.equal(native.rows(ids, packed, layer, wide=True), reference.dequantize(portable)[ids].float())
    outside = native.rows(torch.tensor([-1, 576, 5]), packed, layer, wide=True)
    assert torch.equal(outside[:2], torch.zeros(2, 192))
    assert torch.equal(outside[2], reference.dequantize(portable)[5].float())


@pytest.mark.parametrize(("change", "message"), [
    ({"k": 128}, "not of its layer"), ({"n": 64}, "not of its layer"), ({"group": 32}, "not of its layer"),
    ({"group": 0}, "no kernel takes"), ({"group": 96}, "no kernel takes"), ({"bits": 5}, "no kernel takes"),
])
def test_a_wrong_shape_is_an_error_and_no_crash(library: Library, change: dict[str, int], message: str) -> None:
    _, packed, layer = weight(48, 192, 64)
    shape = LayerShape(**{"n": layer.n, "k": layer.k, "group": layer.group, **change})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message):
        native.linear(torch.randn(2, 192), packed, shape, wide=True)
    with pytest.raises(RuntimeError, match=message):
        native.rows(torch.tensor([0]), packed, shape, wide=True)
    with pytest.raises(RuntimeError, match="wants fp32 or bf16"):
        native.linear(torch.randn(2, 128), packed, layer, wide=True)


@pytest.mark.parametrize("bias", [torch.zeros(47).bfloat16(), torch.zeros(48)])
def test_a_wrong_bias_is_an_error(library: Library, bias: Tensor) -> None:
    _, packed, layer = weight(48, 192, 64)
    with pytest.raises(RuntimeError, match="not bf16 of its layer's width"):
        native.linear(torch.randn(2, 192), packed, layer, bias, wide=True)


def test_the_registry_prefers_it_and_says_why_not() -> None:
    host = torch_host()
    for layer in (LayerShape(n=2048, k=2048, group=64), LayerShape(n=49152, k=576, group=32, kind="table", bits=8)):
        assert choose(layer, host, kernels()).kernel.name == "native"
    assert choose(LayerShape(n=64, k=64, group=32), host, kernels(), "aten").kernel.name == "aten"
    odd = choose(LayerShape(n=64, k=96, group=48), host, kernels())
    assert odd.kernel.name == "portable"
    assert "48" in odd.refused["native"]


@pytest.mark.parametrize(("env", "reason"), [
    ({"APPLIANCE_KERNEL": "avx1024"}, "known are"),
    ({"APPLIANCE_KERNEL": "AVX2"}, "known are"),
])
def test_a_forced_variant_that_is_not_there_is_refused(env: dict[str, str], reason: str) -> None:
    found = open_library(FILE, env)
    assert found.library is None
    assert reason in (found.refusal or "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_environment_forces_a_variant(variant: str) -> None:
    code = "from appliance.kernels.library import load; print(load().library.variant)"
    env = {**os.environ, "APPLIANCE_KERNEL": variant}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == variant


def test_without_the_library_there_is_a_reason(tmp_path: object) -> None:
    missing = open_library(FILE.with_name("nothing.so"), {})
    assert missing.library is None
    assert "without a C++ compiler" in (missing.refusal or "")


def test_the_library_brings_no_openmp_runtime() -> None:
    """It uses the one that torch has loaded. In a process of its own: other packages (sentencepiece) bring one, unused."""
    code = """
import torch
from appliance.kernels import native
from appliance.kernels.library import load
from appliance.kernels.registry import LayerShape
layer = LayerShape(n=2048, k=2048, group=64)
assert load().library
native.linear(torch.randn(1, 2048), torch.zeros(128 * 32 * 576, dtype=torch.uint8), layer, wide=True)
maps = open("/proc/self/maps").read().splitlines()
print(*sorted({line.split()[-1] for line in maps if any(name in line for name in ("libgomp", "libiomp", "libomp"))}))
print(len(list(__import__("pathlib").Path("/proc/self/task").iterdir())))
"""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    runtimes, threads = done.stdout.splitlines()
    assert runtimes.endswith("torch/lib/libgomp.so.1")
    assert len(runtimes.split()) == 1
    assert int(threads) >= 2, "two threads computed"


def test_the_start_chooses_the_preferred_variant() -> None:
    code = ("from appliance.kernels.selftest import choose_variant; print(choose_variant({})); "
            "print(choose_variant({'APPLIANCE_KERNEL': 'scalar'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str((VARIANTS[0], [])), str(("scalar", []))]
    assert choose_variant({"APPLIANCE_KERNEL": "none"})[0] is None


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("n", "bits"), [(100, 4), (576, 8), (5000, 4)])
@pytest.mark.parametrize("gemm", [torch.float32, torch.bfloat16])
def test_the_library_gemm_route_of_amx_hosts(library: Library, variant: str, n: int, bits: int, gemm: torch.dtype) -> None:
    library.use(variant)
    portable, packed, layer = weight(n, 256, 64, bits)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(7)).bfloat16()
    out = torch.full((70, n), float("nan"))
    native.library_gemm(x, packed, layer, gemm, out)
    assert error(out, reference.linear(x, portable)) < (1e-5 if gemm == torch.float32 else 5e-3)
