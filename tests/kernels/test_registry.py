"""Who refuses what, with which words; and the format's quality floor for the reference grid."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from appliance.errors import ConfigError  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels import NAMES, reference, selftest  # noqa: E402
from appliance.kernels.host import MM_OP, PACK_OP, gemm_dtype, int4_refusal, library_rows, read_torch_host  # noqa: E402
from appliance.kernels.library import load  # noqa: E402
from appliance.kernels.registry import LayerShape, choose, kernel_named, kernels, torch_host  # noqa: E402

pytestmark = pytest.mark.worker


def test_names_match_the_registry() -> None:
    assert tuple(kernel.name for kernel in kernels()) == NAMES


def test_case_024_a_torch_without_the_packer_is_refused_with_versions() -> None:
    reason = int4_refusal(SimpleNamespace(**{MM_OP: getattr(torch.ops.aten, MM_OP)}), "2.4.1")
    assert reason == f"torch has no operator {PACK_OP} (found torch 2.4.1, supported is 2.13)"


def test_case_024_a_packer_of_another_input_type_is_refused() -> None:
    real = getattr(torch.ops.aten, PACK_OP)

    def wants_bytes(codes: Any, tiles: int) -> Any:
        if codes.dtype != torch.uint8:
            raise RuntimeError("expected uint8 weight")
        return real(codes.int(), tiles)

    aten = SimpleNamespace(**{PACK_OP: wants_bytes, MM_OP: getattr(torch.ops.aten, MM_OP)})
    reason = int4_refusal(aten, "2.14.0")
    assert reason is not None
    assert "does not take int32 codes: expected uint8 weight" in reason
    assert "found torch 2.14.0, supported is 2.13" in reason


def test_case_024_a_packer_of_another_result_is_refused() -> None:
    aten = SimpleNamespace(**{PACK_OP: lambda codes, tiles: codes, MM_OP: None})
    assert "returns torch.int32 x 512, expected uint8 x 256" in str(int4_refusal(aten, "2.5"))


def test_case_024_the_refusal_ends_the_self_test_and_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(torch_host(), int4_refusal="torch has no operator x (found torch 2.4.1, supported is 2.13)")
    variants = list(selftest.run(host, kernels()))
    assert [v.line for v in variants if not v.ok] == [f"aten: FAILED: {host.int4_refusal}"]
    monkeypatch.setattr(selftest, "torch_host", lambda: host)
    with pytest.raises(ConfigError, match=r"found torch 2\.4\.1, supported is 2\.13"):
        selftest.check_at_start()


def test_the_installed_torch_is_not_refused() -> None:
    assert read_torch_host().int4_refusal is None


@pytest.mark.parametrize(("shape", "reason"), [
    ((24, 64, 32), "multiple of 16"),
    ((32, 96, 64), "not whole groups of 64"),
    ((32, 96, 48), "group size 48 is not one of 32, 64, 128, 256"),
])
def test_a_refused_layer_says_why_and_goes_to_the_next(shape: tuple[int, int, int], reason: str) -> None:
    n, k, group = shape
    choice = choose(LayerShape(n=n, k=k, group=group), torch_host(), kernels())
    assert choice.kernel.name == ("portable" if k % group or group == 48 else "native")
    aten = choose(LayerShape(n=n, k=k, group=group), torch_host(), kernels(), "aten")
    assert reason in aten.refused["aten"]


def test_the_wanted_kernel_is_asked_first() -> None:
    shape = LayerShape(n=64, k=64, group=32)
    assert choose(shape, torch_host(), kernels()).kernel.name == "native"
    assert choose(shape, torch_host(), kernels(), "portable").kernel.name == "portable"
    assert choose(shape, torch_host(), kernels(), "aten").kernel.name == "aten"
    choice = choose(shape, torch_host(), kernels()[1:], "native")
    assert (choice.kernel.name, choice.refused) == ("aten", {"native": "this build has no such kernel"})


def test_an_unknown_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.kernels import aten

    monkeypatch.setattr(aten, "layout_of", lambda n: None)
    choice = choose(LayerShape(n=64, k=64, group=32), torch_host(), kernels(), "aten")
    assert choice.kernel.name == "portable"
    assert "the packed layout of 64 channels" in choice.refused["aten"]


def test_the_gemm_type_follows_cpu_and_capability() -> None:
    assert gemm_dtype("AVX2", {"avx2": True}) == torch.float32
    assert gemm_dtype("AVX512", {"avx512_f": True}) == torch.float32
    assert gemm_dtype("AVX512", {"avx512_bf16": True}) == torch.bfloat16
    assert gemm_dtype("AVX512", {"amx_tile": True}) == torch.bfloat16
    assert gemm_dtype("AVX2", {"avx512_bf16": True, "amx_tile": True}) == torch.float32


@pytest.mark.parametrize(("amx", "measured", "rows"), [
    (False, "", sys.maxsize), (False, "16", sys.maxsize), (True, "", 64), (True, "16", 16), (True, "0", sys.maxsize), (True, "x", 64)])
def test_rows_from_which_the_library_multiplies(amx: bool, measured: str, rows: int) -> None:
    assert library_rows(amx, measured) == rows


def test_a_measured_type_may_lower_the_gemm_never_raise_it() -> None:
    own = read_torch_host(env={}).gemm
    assert read_torch_host(env={"APPLIANCE_GEMM": "fp32"}).gemm == torch.float32
    assert read_torch_host(env={"APPLIANCE_GEMM": "bf16"}).gemm == own


def test_the_layout_id_names_the_capability_and_the_release() -> None:
    release = torch.__version__.split("+")[0]
    assert kernel_named("aten").layout_id == f"aten-{release}-{torch.backends.cpu.get_cpu_capability().lower()}"


def start_check(before: str = "") -> subprocess.CompletedProcess[str]:
    """The check at start in a process of its own, as in the worker: it forks, and this process has run OpenMP."""
    code = f"from appliance.kernels import reference, selftest\n{before}\nselftest.check_at_start()\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)


def test_a_kernel_that_is_wrong_ends_the_start() -> None:
    done = start_check("real = reference.linear\nreference.linear = lambda x, portable: real(x, portable) * 1.01")
    assert done.returncode == 1
    assert "CpuNotSupported: the int4 kernels cannot run here" in done.stderr
    assert "native avx2, 4 bits, 2 rows: FAILED" in done.stdout or "native scalar, 4 bits, 2 rows: FAILED" in done.stdout
    assert "aten direct, 4 bits, 2 rows: FAILED" in done.stdout


def test_a_native_variant_that_is_wrong_or_dies_is_left_out(tmp_path: Path) -> None:
    """The next one is used, the log and the agent's record say so."""
    best, second, third = load().library.variants[:3]  # type: ignore[union-attr]
    before = f"""
import os
os.environ[selftest.TRIAL_ENV] = {str(tmp_path / "kernels.json")!r}
real = selftest._native_results
def results(variant, *, quick):
    if variant == {best!r}:
        os.kill(os.getpid(), 4)
    if variant == {second!r}:
        return [selftest.Variant(name="native " + variant, ok=False, worst_db=3.0, shapes=1)]
    return real(variant, quick=quick)
selftest._native_results = results"""
    done = start_check(before)
    assert done.returncode == 0, done.stderr
    assert f"int4 kernel left out: native {best}: died by SIGILL" in done.stdout
    assert f"int4 kernel left out: native {second}: wrong results" in done.stdout
    assert f"agree with the reference (native, {third}" in done.stdout
    assert json.loads((tmp_path / "kernels.json").read_text()) == {
        "variant": third, "left_out": [f"native {best}: died by SIGILL", f"native {second}: wrong results"]}


def test_the_start_prints_one_line() -> None:
    done = start_check()
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith("int4 kernels agree with the reference (")


def test_a_check_that_hangs_is_ended() -> None:
    done = start_check("import time\nselftest.DEADLINE_S = 0.2\nselftest._native_results = lambda *_, **__: time.sleep(60)")
    assert "TransientError: the int4 self-test did not end" in done.stderr


def test_the_reference_keeps_the_quality_floor() -> None:
    codes = torch.randint(0, 16, (7, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reference.unpack(reference.pack(codes)), codes)
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    portable = reference.quantize(weight, 64)
    assert selftest.signal_db(reference.dequantize(portable), weight) > 19
    assert reference.unpack(portable.packed).max() <= 15
