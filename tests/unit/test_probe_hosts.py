"""Every folder of tests/hosts gives the facts of its expect.json, and both outputs of the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.errors import UsageError
from appliance.facts import HostFacts, to_json
from appliance.probe.host import read_host

HOSTS = Path(__file__).parents[1] / "hosts"
NAMES = sorted(path.parent.name for path in HOSTS.glob("*/expect.json"))


def differences(expected: Any, found: Any, place: str = "") -> list[str]:
    """Where `found` departs from `expected`; keys that are not expected do not count, list lengths do."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [d for key, value in expected.items() for d in differences(value, found.get(key, "?"), f"{place}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [d for i, (want, got) in pairs for d in differences(want, got, f"{place}[{i}]")]
    return [] if expected == found else [f"{place}: expected {expected!r}, found {found!r}"]


def observed(facts: HostFacts) -> dict[str, Any]:
    """The facts as JSON, with the counts, reasons and proofs that expect.json may name."""
    kinds = [core.kind for core in facts.topology.cores]
    return {
        **to_json(facts),
        "count": {"cores": len(kinds), **{kind: kinds.count(kind) for kind in ("performance", "efficiency")}},
        "why": {tier.name: tier.reason for tier in facts.cpu.tiers},
        "proven": {tier.name: tier.proven for tier in facts.cpu.tiers},
    }


@pytest.mark.parametrize("name", NAMES)
def test_expected_facts(name: str) -> None:
    expected = json.loads((HOSTS / name / "expect.json").read_text())
    assert expected
    assert differences(expected, observed(read_host(HOSTS / name))) == []


@pytest.mark.parametrize("name", NAMES)
def test_invariants_and_output(name: str) -> None:
    """case_050: threads only on online and allowed CPUs, no exception. case_042: no tier beyond three witnesses."""
    facts = read_host(HOSTS / name)
    topology = facts.topology
    assert set(topology.allowed) <= set(topology.online)
    assert sorted(cpu for core in topology.cores for cpu in core.cpus) == list(topology.allowed)
    for tier in facts.cpu.tiers:
        assert tier.usable or tier.reason, tier.name
        if tier.name == facts.cpu.tier:
            break
        assert tier.usable, tier.name

    text = CliRunner().invoke(cli, ["probe", "--root", str(HOSTS / name)])
    assert text.exit_code == 0, text.output
    assert all(title in text.output.splitlines() for title in ("CPU", "Cores", "Memory", "Software", "Disk"))
    assert "None" not in text.output

    printed = CliRunner().invoke(cli, ["probe", "--json", "--root", str(HOSTS / name)])
    assert json.loads(printed.output) == {**to_json(facts), "fingerprint": facts.fingerprint}


def test_case_042_tier_never_exceeds_the_witnesses() -> None:
    expected = {
        "avx2-no-xsave": "scalar", "avx2-vm": "avx2", "avx512-cpuid-masked": "avx2", "avx512-no-os-state": "avx2",
        "avx512-sigill": "avx2", "spr-amx": "amx", "spr-amx-refused": "avx512_bf16", "zen4": "avx512_bf16",
        "amx-masked-vm": "avx512_bf16", "amx-no-os-state": "avx512_bf16", "sapphire-rapids-metal": "amx",
    }
    assert {name: read_host(HOSTS / name).cpu.tier for name in expected} == expected


@pytest.mark.parametrize(("name", "performance_cores"), [
    ("hybrid-8p12e", 8), ("hybrid-6p8e-smt", 6), ("no-smt-16", 16), ("vm-flat-8", 8), ("single-core", 1),
    ("alder-lake-8p8e", 8), ("meteor-lake-2p8e2l", 2), ("n100", 4), ("granite-rapids-256", 256),
])
def test_case_049_physical_performance_cores(name: str, performance_cores: int) -> None:
    cores = read_host(HOSTS / name).topology.cores
    assert sum(core.kind != "efficiency" for core in cores) == performance_cores


def test_case_044_quota_and_cpuset() -> None:
    quota = read_host(HOSTS / "v2-quota").topology
    both = read_host(HOSTS / "v2-cpuset-and-quota").topology
    v1 = read_host(HOSTS / "v1-quota").topology
    assert quota.quota
    assert both.quota
    assert v1.quota
    assert (quota.quota.cpus, len(quota.allowed)) == (4.0, 8)
    assert (both.quota.cpus, both.allowed) == (6.0, (0, 1, 2, 3))
    assert v1.quota.cpus == 4.0  # the parent is tighter than the own group's 6


def test_case_048_soft_limit_is_the_ceiling_without_swap() -> None:
    memory = read_host(HOSTS / "v2-high-below-max").memory
    assert (memory.ceiling_bytes, memory.swap_total_bytes) == (3 << 30, 0)
    assert [limit.soft for limit in memory.limits if limit.bytes == memory.ceiling_bytes] == [True]


def test_case_046_changed_limit_is_seen(tmp_path: Path) -> None:
    """The parent's limit counts although the own group says max, and the next reading sees a change."""
    import shutil

    root = shutil.copytree(HOSTS / "v2-parent-limit", tmp_path / "host")
    limit = root / "sys/fs/cgroup/edge.slice/memory.max"
    assert read_host(root).memory.ceiling_bytes == 4 << 30
    limit.write_text("2147483648\n")
    assert read_host(root).memory.ceiling_bytes == 2 << 30
    limit.write_text("max\n")
    assert read_host(root).memory.ceiling_source == "/proc/meminfo MemTotal"


@pytest.mark.parametrize("missing", ["proc/cpuinfo", "proc/self/mountinfo", "proc/self/cgroup", "captured.json", "sys"])
def test_case_050_missing_parts_are_unknown(tmp_path: Path, missing: str) -> None:
    import shutil

    root = shutil.copytree(HOSTS / "smt-desktop", tmp_path / "host")
    gone = root / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    facts = read_host(root)
    assert facts.topology.allowed == tuple(range(8))
    assert facts.memory.total_bytes == int(15.5 * (1 << 20)) * 1024
    if missing in ("proc/cpuinfo", "captured.json"):
        assert facts.cpu.tier == "scalar"
        assert {tier.usable for tier in facts.cpu.tiers[1:]} == {False}


def test_bad_root_is_one_line() -> None:
    with pytest.raises(UsageError, match="is not a host: there is no such folder") as caught:
        read_host("/nonexistent")
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="neither proc/ nor sys/"):
        read_host(HOSTS)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cpuid": 3}', '{"affinity": ["x"]}', '{"xgetbv": "lots"}'])
def test_broken_captured_json_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "captured.json").write_text(text)
    with pytest.raises(UsageError, match=r"cannot read .*captured\.json"):
        read_host(tmp_path)


def test_folders_are_what_make_writes(tmp_path: Path) -> None:
    """The committed folders come from tests/hosts/make.py; run it and review the diff when this fails."""
    subprocess.run([sys.executable, "-B", str(HOSTS / "make.py"), str(tmp_path)], check=True, timeout=60)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    folders = {path.parts[0] for path in made}
    assert len(folders) >= 14
    kept = {path.relative_to(HOSTS) for name in folders for path in (HOSTS / name).rglob("*") if path.is_file()}
    assert kept == set(made)
    assert [str(path) for path, data in made.items() if (HOSTS / path).read_bytes() != data] == []
