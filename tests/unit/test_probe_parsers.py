"""The pure parsers of the probe, on texts that field machines produced."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from appliance.probe.cgroup import (
    find_hierarchy,
    parse_cgroup,
    parse_limit,
    parse_mountinfo,
    parse_quota,
    parse_stat,
)
from appliance.probe.cpu import parse_cpuinfo
from appliance.probe.evidence import Evidence, parse_evidence
from appliance.probe.memory import parse_meminfo
from appliance.probe.software import parse_dpkg_status, parse_elf_machine, parse_ld_conf
from appliance.probe.topology import parse_allowed
from appliance.probe.tree import Tree, parse_cpu_list


@pytest.mark.parametrize(("text", "cpus"), [
    ("0-3\n", (0, 1, 2, 3)), ("0,4", (0, 4)), ("0-1,8-9,16", (0, 1, 8, 9, 16)), ("", ()), ("\n", ()),
    (None, None), ("-", None), ("null", None), ("3-", None), ("0-3:1/2", None),
])
def test_cpu_list(text: str | None, cpus: tuple[int, ...] | None) -> None:
    assert parse_cpu_list(text) == cpus


def test_cpuinfo_takes_flags_that_all_cpus_have() -> None:
    first = "processor: 0\nvendor_id : A\nmodel name: M : x\nflags\t: sse avx2 lm\n\n"
    text = first + "processor: 1\nvendor_id: A\nflags: sse lm\n"
    assert parse_cpuinfo(text) == ("A", "M : x", frozenset({"sse", "lm"}))
    assert parse_cpuinfo(None) == (None, None, None)
    assert parse_cpuinfo("processor : 0\nvendor_id :\n") == (None, None, None)


@pytest.mark.parametrize(("text", "limit"), [
    ("max\n", None), ("4294967296\n", 1 << 32), ("0", 0), ("9223372036854771712", None), ("", None),
    (None, None), ("-1", None),
])
def test_memory_limit(text: str | None, limit: int | None) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize(("text", "cpus"), [
    ("400000 100000", 4.0), ("max 100000", None), ("-1 100000", None), ("50000\n 100000\n", 0.5), ("150000", 1.5),
    ("", None), (None, None), ("100000 0", None),
])
def test_cpu_quota(text: str | None, cpus: float | None) -> None:
    assert parse_quota(text) == cpus


def test_cgroup_lines_of_v1_v2_and_hybrid() -> None:
    text = "12:cpu,cpuacct:/a\n3:memory:/b:c\n1:name=systemd:/a\n0::/user.slice\n"
    assert parse_cgroup(text) == {
        "cpu": "/a", "cpuacct": "/a", "memory": "/b:c", "name=systemd": "/a", "": "/user.slice",
    }
    assert parse_cgroup(None) == {}


V2 = "32 24 0:28 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.mark.parametrize(("path", "mounts", "folders"), [
    ("/a/b", V2.format(root="/", point="/sys/fs/cgroup"), ("/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup")),
    ("/", V2.format(root="/", point="/sys/fs/cgroup"), ("/sys/fs/cgroup",)),
    ("/k/pod/x", V2.format(root="/k/pod", point="/sys/fs/cgroup"), ("/sys/fs/cgroup/x", "/sys/fs/cgroup")),
    ("/k/pod", V2.format(root="/k/pod", point="/sys/fs/cgroup"), ("/sys/fs/cgroup",)),
    ("/k/podium", V2.format(root="/k/pod", point="/m"), ("/m/k/podium", "/m/k", "/m")),
    ("/../x", V2.format(root="/", point="/sys/fs/cgroup"), ("/sys/fs/cgroup/x", "/sys/fs/cgroup")),
    ("/a", V2.format(root="/other", point="/o") + "\n" + V2.format(root="/", point="/m"), ("/m/a", "/m")),
    ("/a", V2.format(root="/", point="/with\\040space"), ("/with space/a", "/with space")),
    ("/a", "", ("/sys/fs/cgroup/a", "/sys/fs/cgroup")),
])
def test_case_046_folders_from_own_group_to_mount(path: str, mounts: str, folders: tuple[str, ...]) -> None:
    found = find_hierarchy("memory", {"": path}, parse_mountinfo(mounts))
    assert (found.version, found.folders) == (2, folders)


def test_v1_controller_wins_over_v2() -> None:
    mounts = parse_mountinfo(
        "35 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" + V2.format(root="/", point="/unified")
    )
    memory = find_hierarchy("memory", {"memory": "/m", "": "/x"}, mounts)
    cpu = find_hierarchy("cpu", {"memory": "/m", "": "/x"}, mounts)
    assert (memory.version, memory.folders[0]) == (1, "/sys/fs/cgroup/memory/m")
    assert (cpu.version, cpu.folders[0]) == (2, "/unified/x")
    assert parse_mountinfo("garbage\n36 35 98:0 / /mnt rw - ext4 /dev/root rw\n") == ()


def test_sizes_and_stats() -> None:
    assert parse_meminfo("MemTotal:  16 kB\nHugePages_Total:  0\nbad\n") == {"MemTotal": 16384}
    assert parse_meminfo("Node 1 MemTotal:       8 kB\n") == {"MemTotal": 8192}
    assert parse_meminfo(None) == {}
    assert parse_stat("anon 5\nfile 7\nodd line here\n") == {"anon": 5, "file": 7}
    assert parse_allowed("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-1,4\n") == (0, 1, 4)
    assert parse_allowed(None) is None


def test_case_052_userland_architecture() -> None:
    status = "Package: dpkg-dev\nStatus: install ok installed\nArchitecture: all\n\n" \
             "Package: dpkg\nStatus: install ok installed\nDescription: manager\n more: text\nArchitecture: armhf\n\n" \
             "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\n"
    assert parse_dpkg_status(status, "dpkg")["Architecture"] == "armhf"
    assert parse_dpkg_status(status, "gone") == {}
    assert parse_dpkg_status(None, "dpkg") == {}

    def elf(machine: int, word: int) -> bytes:
        return b"\x7fELF" + bytes([word, 1, 1]) + bytes(9) + struct.pack("<HH", 3, machine)

    found = [parse_elf_machine(elf(machine, word)) for machine, word in ((62, 2), (62, 1), (3, 1), (40, 1), (183, 2))]
    assert found == ["amd64", "x32", "i386", "armhf", "arm64"]
    assert parse_elf_machine(b"#!/bin/sh") is None
    assert parse_ld_conf("# libc\n/usr/local/lib\ninclude x\n /no\n") == ("/usr/local/lib",)


def test_evidence_keys_and_missing_ones() -> None:
    said = parse_evidence(
        '{"cpuid": {"d.0": {"eax": "0x7"}}, "xgetbv": 7, "affinity": [1, 0], "amx_permission": false}'
    )
    assert said == Evidence(cpuid={(13, 0): {"eax": 7}}, xcr0=7, affinity=(0, 1), amx_permission=False)
    assert parse_evidence("{}") == Evidence()


def test_tree_stays_below_its_root(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "secret").write_text("1")
    tree = Tree(root=tmp_path / "host")
    assert tree.read("/../secret") is None
    assert tree.path("/proc/../../../secret") == tmp_path / "host" / "secret"
    assert (tree.names("/none"), tree.head("/none", 4), tree.read_int("/none")) == ([], None, None)
    assert not tree.is_file("/none")


def test_what_is_no_file_in_a_captured_folder_is_unknown(tmp_path: Path) -> None:
    """A folder, a pipe or a link to itself in the place of each file that is read."""
    for name, make in {"folder": os.mkdir, "pipe": os.mkfifo, "loop": lambda path: path.symlink_to(path)}.items():
        make(tmp_path / name)
        assert Tree(root=tmp_path).read(f"/{name}") is None
