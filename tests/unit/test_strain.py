"""Figures of a control group under strain, from files as the kernel writes them: v2, v1, none."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.probe.strain import read_strain, slow_governor, swapped_bytes
from appliance.probe.tree import Tree

V2 = {
    "proc/77/cgroup": "0::/system.slice/appliance.service\n",
    "proc/self/mountinfo": "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/system.slice/appliance.service/cpu.stat": "usage_usec 1\nnr_periods 1000\nnr_throttled 350\nthrottled_usec 9\n",
    "sys/fs/cgroup/system.slice/cpu.stat": "nr_periods 100\nnr_throttled 100\n",
    "sys/fs/cgroup/system.slice/appliance.service/memory.high": "3221225472\n",
    "sys/fs/cgroup/system.slice/memory.high": "max\n",
    "sys/fs/cgroup/system.slice/appliance.service/memory.events": "low 0\nhigh 12\nmax 0\noom 1\noom_kill 2\n",
    "sys/fs/cgroup/system.slice/appliance.service/memory.pressure":
        "some avg10=90.00 avg60=80.00 avg300=10.00 total=5\nfull avg10=70.00 avg60=62.50 avg300=1.00 total=3\n",
    "proc/pressure/memory": "full avg10=0.00 avg60=0.10 avg300=0.00 total=0\n",
}
V1 = {
    "proc/77/cgroup": "4:cpu,cpuacct:/a\n3:memory:/a\n0::/\n",
    "proc/self/mountinfo": "31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n32 25 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
    "sys/fs/cgroup/cpu/a/cpu.stat": "nr_periods 700\nnr_throttled 7\nthrottled_time 1\n",
    "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "proc/pressure/memory": "some avg10=0 avg60=0\nfull avg10=0.00 avg60=1.25 avg300=0.00 total=0\n",
}


def tree(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Tree(root=root)


def test_v2(tmp_path: Path) -> None:
    found = read_strain(tree(tmp_path, V2), pid=77)
    assert (found.throttled_share, found.stalled_percent, found.high_bytes, found.oom_kills) == (0.35, 62.5, 3221225472, 2)


def test_what_changes_between_two_looks(tmp_path: Path) -> None:
    heat = {f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle/{name}_throttle_count": f"{count}\n"
            for cpu, name, count in ((0, "core", 3), (0, "package", 9), (1, "core", 4), (1, "package", 9))}
    found = read_strain(tree(tmp_path, {**V2, **heat}), pid=77)
    assert (found.periods, found.too_hot) == (((1000, 350), (100, 100)), 16)
    assert read_strain(tree(tmp_path / "none", V1), pid=77).too_hot is None


def test_v1(tmp_path: Path) -> None:
    found = read_strain(tree(tmp_path, V1), pid=77)
    assert (found.throttled_share, found.stalled_percent, found.high_bytes, found.oom_kills) == (0.01, 1.25, None, 3)


def test_nothing_is_known(tmp_path: Path) -> None:
    found = read_strain(tree(tmp_path, {"proc/x": ""}), pid=77)
    assert (found.throttled_share, found.stalled_percent, found.high_bytes, found.oom_kills, found.governor) == (None,) * 5


@pytest.mark.parametrize(("governor", "driver", "preference", "slow"), [
    ("performance", "acpi-cpufreq", None, False), ("schedutil", "acpi-cpufreq", None, False), ("powersave", "acpi-cpufreq", None, True),
    ("powersave", "intel_pstate", "balance_performance", False), ("powersave", "intel_pstate", "power", True), ("powersave", "intel_cpufreq", None, True),
    ("powersave", "amd-pstate-epp", "balance_power", False), ("", "", None, False),
])
def test_powersave_is_ordinary_with_some_drivers(governor: str, driver: str, preference: str | None, slow: bool, tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {f"{folder}/scaling_governor": governor + "\n", f"{folder}/scaling_driver": driver + "\n"}
    if preference:
        files[f"{folder}/energy_performance_preference"] = preference + "\n"
    assert (slow_governor(tree(tmp_path, files)) is not None) == slow


def test_swap(tmp_path: Path) -> None:
    host = tree(tmp_path, {"proc/5/status": "Name:\tx\nVmSwap:\t    1024 kB\n", "proc/6/status": "Name:\ty\nVmSwap:\t       0 kB\n"})
    assert swapped_bytes(host, (5, 6, 7)) == 1 << 20
    assert swapped_bytes(host, (7,)) is None
    assert swapped_bytes(host, ()) is None
