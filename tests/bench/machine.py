"""The machine that a figure was measured on: what it is, how fast it reads memory, whether it is quiet.

Does not judge; every result carries what is found here.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BANDWIDTH_SOURCE = Path(__file__).with_name("bandwidth.cpp")
BANDWIDTH = Path(__file__).parents[2] / "build/bench/bandwidth"
BANDWIDTH_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Repeats of one figure."""

    values: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"median": statistics.median(self.values), "min": min(self.values), "max": max(self.values),
                "values": [round(value, 5) for value in self.values]}


def ratio(a: Samples, b: Samples) -> Samples:
    """a over b, repeat by repeat: the two of a pair were measured one after the other."""
    return Samples(values=tuple(x / y for x, y in zip(a.values, b.values, strict=True)))


def facts() -> dict[str, Any]:
    """Processor, cores in use, memory, kernel, load: as the system names them."""
    cpu: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        cpu.setdefault(key.strip(), value.strip())
    flags = cpu.get("flags", "").split()
    wanted = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile")
    return {
        "cpu": cpu.get("model name"), "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in wanted if flag in flags],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3, 1),
        "kernel": platform.release(), "load_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "commit": commit(),
    }


def commit() -> str | None:
    """The checkout's commit, with a sign when it has changes; None outside a checkout."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True,
                          text=True, check=False)
    return done.stdout.strip() or None


def cpu_times() -> tuple[float, float, float]:
    """Seconds of all cores since boot: busy, idle, stolen by the hypervisor."""
    fields = [int(word) / os.sysconf("SC_CLK_TCK") for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle, steal = fields[3] + fields[4], fields[7]
    return sum(fields) - idle - steal, idle, steal


def wait_quiet(limit_s: float = 10.0) -> float:
    """Wait until the cores were 95 % idle for half a second; returns the last idle share (below 0.95: never quiet)."""
    end = time.monotonic() + limit_s
    while True:
        before = cpu_times()
        time.sleep(0.5)
        busy, idle, steal = (after - first for after, first in zip(cpu_times(), before, strict=True))
        share = idle / (busy + idle + steal)
        if share >= 0.95 or time.monotonic() > end:
            return round(share, 3)


def bandwidth(threads: int, repeats: int, pages: str) -> Samples | None:
    """GB/s of a sequential read with this many threads from `huge` or `small` pages; None without a C++ compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    if not BANDWIDTH.exists() or BANDWIDTH.stat().st_mtime < BANDWIDTH_SOURCE.stat().st_mtime:
        BANDWIDTH.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-O3", "-march=native", "-fopenmp", str(BANDWIDTH_SOURCE), "-o", str(BANDWIDTH)],
                       check=True)
    done = subprocess.run([str(BANDWIDTH), str(threads), str(BANDWIDTH_MIB), str(repeats + 1), pages], check=True,
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return Samples(values=tuple(map(float, done.stdout.split()))[1:])


def alternate(measures: dict[str, Callable[[int], float]], repeats: int) -> dict[str, Samples]:
    """Every measure once, then again, `repeats` times; every other round backwards, so that drift hits all alike."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(repeats):
        for name in list(measures) if number % 2 == 0 else reversed(list(measures)):
            values[name].append(measures[name](number))
    return {name: Samples(values=tuple(found)) for name, found in values.items()}
