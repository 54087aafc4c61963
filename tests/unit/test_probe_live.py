"""The probe on the machine that runs the tests: the proof child, its signals, denied mappings, locale."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.facts import TIERS
from appliance.probe import proof
from appliance.probe.cpu import parse_cpuinfo
from appliance.probe.evidence import ask_live
from appliance.probe.host import read_host

FLAGS = parse_cpuinfo(Path("/proc/cpuinfo").read_text())[2] or frozenset()
PROGRAM = str(Path(proof.__file__))
X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 machine code")

DENY_MAPPINGS = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0) != 0:  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
    sys.exit(77)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run_proof(*questions: str) -> Any:
    command = [sys.executable, "-I", "-S", PROGRAM, *questions]
    done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    return json.loads(done.stdout)


@X86
def test_live_tier_is_proven_and_agrees_with_cpuinfo() -> None:
    facts = read_host("/", store=Path("/nonexistent/store"), versions={"appliance": "1"})
    tiers = {tier.name: tier for tier in facts.cpu.tiers}
    assert tuple(tiers) == TIERS
    if "avx2" in FLAGS:
        assert tiers["avx2"].proven is True
        assert facts.cpu.tier != "scalar"
    if "avx512f" not in FLAGS:
        assert tiers["avx512"].flags is False
        assert facts.cpu.tier in ("scalar", "avx2")
    assert facts.software.executable_mappings is True
    assert facts.software.versions == {"appliance": "1"}
    assert set(facts.topology.allowed) <= os.sched_getaffinity(0)
    assert facts.topology.cores
    assert facts.memory.ceiling_bytes
    assert facts.disk.store_free_bytes is not None


def test_affinity_narrows_the_live_cores() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    os.sched_setaffinity(0, {one})
    try:
        topology = read_host("/").topology
    finally:
        os.sched_setaffinity(0, before)
    assert topology.allowed == (one,)
    assert [core.cpus for core in topology.cores] == [(one,)]


@X86
def test_case_042_forced_sigill_is_disproof() -> None:
    """The instructions are executed for real: a CPU without them kills the fork, and only the fork."""
    if "avx512f" in FLAGS:
        pytest.skip("this CPU has AVX-512")
    said = run_proof("avx512", "avx512_vnni", "avx512_bf16", "avx2")
    assert said["proof"] == {"avx512": False, "avx512_vnni": False, "avx512_bf16": False, "avx2": "avx2" in FLAGS}
    assert said["reasons"]["avx512"] == "the proof child was killed by SIGILL"


@X86
def test_wrong_value_is_disproof(monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2" not in FLAGS:
        pytest.skip("needs AVX2")
    assert proof.prove("avx2") == (True, "")
    monkeypatch.setitem(proof.CHECK, "avx2", (3, 25))
    assert proof.prove("avx2") == (False, "its instructions return a wrong value")


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs binutils")
@pytest.mark.parametrize(("name", "instructions"), [
    ("cpuid", "push mov mov mov cpuid mov mov mov mov pop ret"),
    ("xgetbv", "xor xgetbv shl or ret"),
    ("avx2", "vmovd vpbroadcastd vcvtdq2ps vfmadd213ps vcvtps2ph vcvtph2ps vcvtps2dq vpaddd vextracti128 vmovd "
             "vzeroupper ret"),
    ("avx512", "vpbroadcastd vpaddd vpaddw vandps vextracti64x2 vpaddd vmovd vzeroupper ret"),
    ("avx512_vnni", "vpbroadcastd vpxord vpdpbusd vextracti32x4 vmovd vzeroupper ret"),
    ("avx512_bf16", "vpbroadcastd vpxord vdpbf16ps vextracti32x4 vmovd vzeroupper ret"),
    ("amx", "mov ldtilecfg mov tileloadd tileloadd tilezero tdpbssd tilestored tilezero tdpbf16ps tilestored "
            "tilerelease mov add ret"),
])
def test_bytes_are_the_instructions_they_claim(tmp_path: Path, name: str, instructions: str) -> None:
    """The only check of the code of tiers that this CPU cannot execute."""
    (tmp_path / "code").write_bytes(bytes.fromhex(proof.CODE[name]))
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", str(tmp_path / "code")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    # A long instruction continues on a line without a mnemonic.
    assert re.findall(r"^ +[0-9a-f]+:\t[0-9a-f ]+\t(\w+)", listing, re.MULTILINE) == instructions.split()
    assert set(proof.CODE) == {"cpuid", "xgetbv", *TIERS[1:]}
    assert set(proof.CHECK) == set(TIERS[1:])


@pytest.mark.parametrize(("code", "proven", "text"), [
    (0, True, ""), (1, False, "wrong value"), (2, None, "could not run"), (3, False, "permission"),
    (-4, False, "SIGILL"), (-11, False, "SIGSEGV"), (-9, None, "SIGKILL"),
])
def test_verdict_of_an_exit_code(code: int, proven: bool | None, text: str) -> None:
    assert proof.verdict(code)[0] is proven
    assert text in proof.verdict(code)[1]


@X86
def test_cpuid_of_the_child_agrees_with_the_kernel() -> None:
    said = run_proof("cpuid")
    leaf0 = {name: int(value, 16) for name, value in said["cpuid"]["0.0"].items()}
    vendor = b"".join(leaf0[name].to_bytes(4, "little") for name in ("ebx", "edx", "ecx")).decode()
    assert vendor == parse_cpuinfo(Path("/proc/cpuinfo").read_text())[0]
    assert int(said["xgetbv"], 16) & 0x6 == (0x6 if "avx" in FLAGS else 0)
    assert "proof" not in said


@X86
def test_denied_executable_mappings_are_unknown() -> None:
    """Under MemoryDenyWriteExecute nothing is proven: unknown, the lower tier, and the fact that says why."""
    program = (
        "import json; from appliance.facts import to_json; from appliance.probe.host import read_host;"
        "print(json.dumps(to_json(read_host('/'))))"
    )
    command = [sys.executable, "-c", DENY_MAPPINGS, "-c", program]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["software"]["executable_mappings"] is False
    assert facts["cpu"]["tier"] == "scalar"
    avx2 = facts["cpu"]["tiers"][1]
    assert (avx2["os_enabled"], avx2["proven"]) == (None, None)
    assert "executable memory mappings are denied" in avx2["reason"]


def test_child_that_cannot_run_leaves_everything_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(sys, "executable", "/bin/false")

    def worth_proving(known: object) -> tuple[str, ...]:
        asked.append(known)
        return ("avx2",)

    evidence = ask_live(worth_proving)
    assert (evidence.xcr0, evidence.proof, evidence.executable_mappings) == (None, {}, None)
    assert len(asked) == 1


@pytest.mark.parametrize("locale", ["zh_CN.UTF-8", "zh_CN", "C"])
def test_case_050_locale_does_not_matter(locale: str) -> None:
    command = [sys.executable, "-m", "appliance.cli.main", "probe", "--json"]
    env = {**os.environ, "LANG": locale, "LC_ALL": locale, "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=env, capture_output=True, timeout=30, check=True)
    facts = json.loads(done.stdout)
    assert facts["topology"]["online"]
    assert facts["cpu"]["tier"] == read_host("/").cpu.tier


def test_forbidden_core_files_do_not_stop_the_proof() -> None:
    """A unit or a container may forbid core files altogether; the proof only wants to write none."""
    done = subprocess.run(["sh", "-c", f"ulimit -H -c 0; exec {sys.executable} -I -S {proof.__file__} cpuid"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["executable_mappings"] is True
