"""A host's control groups: one child of our own group in each hierarchy, so that this machine's accounting sees it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    """`label`: the controllers, empty for cgroup2. `options`: how the hierarchy is mounted."""

    label: str
    kind: str
    options: str | None
    folder: str


def hierarchies() -> list[Group]:
    """Each mounted hierarchy with the folder of this process's own group."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    found: list[Group] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        root, point = left.split()[3:5]
        kind, _, flags = right.split()
        label: str | None
        if kind == "cgroup2" and "" in own:
            label, options = "", None
        elif kind == "cgroup":
            label = next((c for c in own if c and set(c.split(",")) <= set(flags.split(","))), None)
            options = f"none,{label},xattr" if label and label.startswith("name=") else label
        else:
            continue
        if label is None or root not in ("/", own[label]) or any(group.label == label for group in found):
            continue
        found.append(Group(label, kind, options, point + (own[label] if root == "/" else "")))
    return found


def make_groups(name: str, limits: Mapping[str, object], devices: Sequence[str] = ()) -> list[Group]:
    groups = []
    for label, kind, options, folder in hierarchies():
        mine = Path(folder)
        if kind == "cgroup2" and (mine / "cgroup.controllers").read_text().split():
            # Controllers can only be handed down from a group without processes, which the root is exempt from.
            while (mine / "cgroup.type").exists() and (mine.parent / "cgroup.procs").exists():
                mine = mine.parent
            for controller in (mine / "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):
                    (mine / "cgroup.subtree_control").write_text(f"+{controller}")
        group = mine / f"testhost-{name}"
        group.mkdir(exist_ok=True)
        if label == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):  # empty in a new v1 cpuset: nobody could join
                (group / file).write_text((mine / file).read_text())
            (group / "cgroup.clone_children").write_text("1")
        if label == "devices" and devices:
            (group / "devices.deny").write_text("a")
            for rule in devices:
                (group / "devices.allow").write_text(rule)
        for key, value in limits.items():
            if (group / key).exists():
                (group / key).write_text(str(value))
        groups.append(Group(label, kind, options, str(group)))
    return groups


def remove_groups(groups: Iterable[Sequence[str]]) -> None:
    for group in groups:
        for folder, _, _ in os.walk(group[3], topdown=False):
            for _ in range(100):
                try:
                    os.rmdir(folder)  # noqa: PTH106
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.02)


def join(folders: Iterable[str]) -> None:
    for folder in folders:
        Path(folder, "cgroup.procs").write_text("0")


def kill_all(groups: Iterable[Sequence[str]]) -> None:
    """cgroup2: every process below, at once."""
    for group in groups:
        if (file := Path(group[3], "cgroup.kill")).exists():
            file.write_text("1")
