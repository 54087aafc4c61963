"""The worker's control group on made-up trees: when it is taken, and that nothing is touched when it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.supervisor.leaf import claim

V2 = "0::/system.slice/appliance.service\n"
MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
GROUP = "sys/fs/cgroup/system.slice/appliance.service"


def tree(root: Path, *, cgroup: str = V2, mount: str = MOUNT, controllers: str = "memory pids") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mount)
    group = root / GROUP
    group.mkdir(parents=True)
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (group / name).write_text("")
    (group / "cgroup.controllers").write_text(controllers)
    return group


def test_two_groups_and_the_agent_steps_aside(tmp_path: Path) -> None:
    group = tree(tmp_path)
    leaf = claim(tmp_path)
    assert leaf is not None
    assert (group / "agent/cgroup.procs").read_text() == str(os.getpid())
    assert "memory" in (group / "cgroup.subtree_control").read_text() or "pids" in (group / "cgroup.subtree_control").read_text()
    assert leaf.enter(4711)
    assert leaf.members() == (4711,)
    (leaf.folder / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n")
    assert leaf.oom_kills() == 2
    assert leaf.kill()


@pytest.mark.parametrize("given", [
    {"cgroup": "4:memory:/system.slice/appliance.service\n"},
    {"cgroup": "0::/\n"},
    {"cgroup": ""},
    {"mount": "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"},
    {"controllers": "cpu pids"},
    {"cgroup": "0::/elsewhere\n"},
], ids=["v1", "root", "no-cgroups", "only-v1-mounted", "memory-not-delegated", "group-not-visible"])
def test_without_delegation_nothing_is_touched(tmp_path: Path, given: dict[str, str]) -> None:
    group = tree(tmp_path, **given)
    before = sorted(group.iterdir())
    assert claim(tmp_path) is None
    assert sorted(group.iterdir()) == before


def test_unknown_counters_are_unknown(tmp_path: Path) -> None:
    tree(tmp_path)
    leaf = claim(tmp_path)
    assert leaf is not None
    assert leaf.oom_kills() is None
