"""Writes one host folder: the files of /proc and /sys, captured.json and expect.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cgroups
from cpus import Cpu

GIB = 1 << 30
CPU_FOLDER, NODE_FOLDER = "sys/devices/system/cpu", "sys/devices/system/node"


def ranges(numbers: Iterable[int]) -> str:
    """The kernel's list format."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def cpuinfo(cpu: Cpu, cores: Sequence[Sequence[int]], online: Sequence[int]) -> str:
    blocks = []
    for number in online:
        core = next(i for i, threads in enumerate(cores) if number in threads)
        blocks.append(
            f"processor\t: {number}\nvendor_id\t: {cpu.vendor}\ncpu family\t: {cpu.family}\nmodel\t\t: {cpu.model}\n"
            f"model name\t: {cpu.name}\nstepping\t: {cpu.stepping}\nphysical id\t: 0\nsiblings\t: {len(online)}\n"
            f"core id\t\t: {core}\ncpu cores\t: {len(cores)}\nfpu\t\t: yes\nflags\t\t: {cpu.flags}\n\n"
        )
    return "".join(blocks)


def topology(cores: Sequence[Sequence[int]], online: Sequence[int]) -> dict[str, str]:
    """sysfs as it is for these cores (tuples of threads); offline CPUs have no topology folder."""
    present = sorted(cpu for core in cores for cpu in core)
    files = {
        f"{CPU_FOLDER}/possible": ranges(present), f"{CPU_FOLDER}/present": ranges(present),
        f"{CPU_FOLDER}/online": ranges(online),
        f"{CPU_FOLDER}/offline": ranges(cpu for cpu in present if cpu not in online),
    }
    for core in cores:
        threads = [cpu for cpu in core if cpu in online]
        for cpu in threads:
            files[f"{CPU_FOLDER}/cpu{cpu}/topology/core_cpus_list"] = ranges(threads)
    return files


def node(number: int, cpu_list: str, gib: float) -> dict[str, str]:
    kib = int(gib * (1 << 20))
    return {
        f"{NODE_FOLDER}/node{number}/cpulist": cpu_list,
        f"{NODE_FOLDER}/node{number}/meminfo": f"Node {number} MemTotal:       {kib} kB\n"
        f"Node {number} MemFree:        {kib // 2} kB",
    }


def meminfo(total_gib: float, available_gib: float, swap_gib: float = 0) -> str:
    def kib(gib: float) -> int:
        return int(gib * (1 << 20))

    return (
        f"MemTotal:       {kib(total_gib)} kB\nMemFree:        {kib(available_gib / 2)} kB\n"
        f"MemAvailable:   {kib(available_gib)} kB\nBuffers:          152340 kB\n"
        f"Cached:         {kib(available_gib / 3)} kB\n"
        f"SwapTotal:      {kib(swap_gib)} kB\nSwapFree:       {kib(swap_gib)} kB\nHugePages_Total:       0"
    )


DEBIAN = {
    "proc/sys/kernel/osrelease": "6.1.0-28-amd64",
    "var/lib/dpkg/status": "Package: dpkg\nStatus: install ok installed\nPriority: required\nArchitecture: amd64\n"
    "Version: 1.21.22\n\nPackage: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u9\n",
    "usr/bin/g++": "", "usr/bin/lscpu": "", "usr/include/python3.11/Python.h": "",
    "usr/lib/x86_64-linux-gnu/libnuma.so.1": "", "usr/lib/x86_64-linux-gnu/libgomp.so.1": "",
    "usr/lib/x86_64-linux-gnu/libc.so.6": "",
}


def host(
    out: Path, name: str, *, cpu: Cpu, cores: Sequence[Sequence[int]], expect: Mapping[str, Any],
    online: Sequence[int] | None = None, files: Mapping[str, str | None] = {}, captured: Mapping[str, Any] = {},
    proven: Sequence[str] = ("avx2",),
) -> None:
    """Write one folder. `files` overrides the usual ones (None removes); `proven`: tiers that the child confirmed."""
    alive = sorted(cpu for core in cores for cpu in core) if online is None else online
    everything: dict[str, str | None] = {
        "proc/cpuinfo": cpuinfo(cpu, cores, alive),
        "proc/meminfo": meminfo(16, 14),
        **topology(cores, alive), **node(0, ranges(alive), 16), **cgroups.service(), **DEBIAN, **files,
    }
    answers = {
        "architecture": "x86_64", "cpuid": cpu.cpuid, "xgetbv": cpu.xgetbv, "amx_permission": None,
        "proof": dict.fromkeys(proven, True), "executable_mappings": True, "affinity": alive, **captured,
    }
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in everything.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text if text.endswith("\n") or not text else text + "\n")
    for file, value in (("captured.json", answers), ("expect.json", expect)):
        (folder / file).write_text(json.dumps(value, indent=1) + "\n")
