"""Resource limits of this process's control group and of every parent up to the mount: v1, v2 and hybrid.

The path comes from /proc/self/cgroup, the place from /proc/self/mountinfo. A controller that has a v1 hierarchy is
read there, any other in the v2 one. In a container the path may name a folder that is not visible because the mount
already is the own group (a cgroup namespace, or a bind mount): folders that do not exist are skipped and the walk
always ends at the mount point itself, so that its files are found either way.

Rules: the tightest limit of all levels counts, whichever level sets it; `max`, -1 and v1's huge default are no limit;
a file that is missing or cannot be parsed is no limit either. Sources are named by the path that the host sees.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from appliance.facts import CpuQuota, MemoryLimit
from appliance.probe.tree import Tree, parse_cpu_list

DEFAULT_MOUNT = "/sys/fs/cgroup"
NO_LIMIT_BYTES = 1 << 60
"""v1 writes its "no limit" as LONG_MAX rounded down to a page; nothing real is that large."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A cgroup mount: `root` is the group that appears at `point`."""

    version: int
    root: str
    point: str
    controllers: frozenset[str]
    """v1 only; empty for v2."""


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """The folders of one controller from the own group up to the mount, existing or not."""

    version: int
    folders: tuple[str, ...]


def parse_cgroup(text: str | None) -> dict[str, str]:
    """/proc/self/cgroup as controller -> path; the key of the v2 hierarchy is the empty string."""
    paths: dict[str, str] = {}
    for line in (text or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator:
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def parse_mountinfo(text: str | None) -> tuple[Mount, ...]:
    """The cgroup mounts of /proc/self/mountinfo."""
    mounts = []
    for line in (text or "").splitlines():
        left, separator, right = line.partition(" - ")
        fields, super_fields = left.split(" "), right.split(" ")
        if separator and len(fields) >= 5 and len(super_fields) >= 3 and super_fields[0] in ("cgroup", "cgroup2"):
            version = 2 if super_fields[0] == "cgroup2" else 1
            controllers = frozenset(super_fields[2].split(",")) if version == 1 else frozenset()
            mounts.append(
                Mount(version=version, root=_unescape(fields[3]), point=_unescape(fields[4]), controllers=controllers)
            )
    return tuple(mounts)


def find_hierarchy(controller: str, paths: Mapping[str, str], mounts: tuple[Mount, ...]) -> Hierarchy:
    """Where to read `controller`. Without mount information the usual places are assumed."""
    version = 1 if controller in paths else 2
    path = paths.get(controller if version == 1 else "", "/")
    candidates = [m for m in mounts if m.version == version and (version == 2 or controller in m.controllers)]
    if not candidates:
        point = posixpath.join(DEFAULT_MOUNT, controller) if version == 1 else DEFAULT_MOUNT
        candidates = [Mount(version=version, root="/", point=point, controllers=frozenset())]
    # The same hierarchy may be mounted twice; one that shows the own group is the better view.
    mount = max(candidates, key=lambda m: len(m.root) if _below(path, m.root) is not None else -1)
    relative = _below(path, mount.root)
    parts = [part for part in (path if relative is None else relative).split("/") if part not in ("", "..")]
    folders = tuple(posixpath.join(mount.point, *parts[:depth]) for depth in range(len(parts), -1, -1))
    return Hierarchy(version=version, folders=folders)


def read_hierarchy(tree: Tree, controller: str) -> Hierarchy:
    return find_hierarchy(
        controller, parse_cgroup(tree.read("/proc/self/cgroup")), parse_mountinfo(tree.read("/proc/self/mountinfo"))
    )


def read_memory_limits(tree: Tree) -> tuple[MemoryLimit, ...]:
    """All finite limits, own group first. v1's soft limit is left out: nothing is held to it."""
    hierarchy = read_hierarchy(tree, "memory")
    return tuple(_limits_v1(tree, hierarchy) if hierarchy.version == 1 else _limits_v2(tree, hierarchy))


def _limits_v2(tree: Tree, hierarchy: Hierarchy) -> Iterator[MemoryLimit]:
    for folder in hierarchy.folders:
        for name, soft in (("memory.max", False), ("memory.high", True)):
            value = parse_limit(tree.read(f"{folder}/{name}"))
            if value is not None:
                yield MemoryLimit(bytes=value, source=f"{folder}/{name}", soft=soft)


def _limits_v1(tree: Tree, hierarchy: Hierarchy) -> Iterator[MemoryLimit]:
    lowest, inherited = NO_LIMIT_BYTES, NO_LIMIT_BYTES
    own: str | None = None
    for folder in hierarchy.folders:
        if own is not None and tree.read_int(f"{folder}/memory.use_hierarchy") == 0:
            break  # before Linux 5.11 a parent could be told not to bind its children
        value = parse_limit(tree.read(f"{folder}/memory.limit_in_bytes"))
        if value is not None:
            lowest = min(lowest, value)
            yield MemoryLimit(bytes=value, source=f"{folder}/memory.limit_in_bytes", soft=False)
        if own is None:
            stat = parse_stat(tree.read(f"{folder}/memory.stat"))
            own = folder if stat else None
            inherited = stat.get("hierarchical_memory_limit", NO_LIMIT_BYTES)
    if own is not None and inherited < lowest:  # set by a parent that this mount does not show
        yield MemoryLimit(bytes=inherited, source=f"{own}/memory.stat hierarchical_memory_limit", soft=False)


def read_held_bytes(tree: Tree, folder: str) -> int | None:
    """What the group at `folder` holds without the page cache that the kernel can drop at once; None = unknown."""
    usage = tree.read_int(f"{folder}/memory.current")
    names: tuple[str, ...] = ("inactive_file", "active_file", "slab_reclaimable")
    if usage is None:
        usage = tree.read_int(f"{folder}/memory.usage_in_bytes")
        names = ("total_inactive_file", "total_active_file")
    stat = parse_stat(tree.read(f"{folder}/memory.stat"))
    if usage is None or not stat:
        return usage
    return max(0, usage - sum(stat.get(name, 0) for name in names))


def read_cpu_quota(tree: Tree) -> CpuQuota | None:
    """The tightest CPU bandwidth limit of all levels; None where there is none."""
    hierarchy = read_hierarchy(tree, "cpu")
    quotas = []
    for folder in hierarchy.folders:
        name = "cpu.max" if hierarchy.version == 2 else "cpu.cfs_quota_us"
        text = tree.read(f"{folder}/{name}")
        if hierarchy.version == 1 and text is not None:
            text = f"{text} {tree.read(f'{folder}/cpu.cfs_period_us') or ''}"
        cpus = parse_quota(text)
        if cpus is not None:
            quotas.append(CpuQuota(cpus=cpus, source=f"{folder}/{name}"))
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def read_cpuset(tree: Tree) -> frozenset[int] | None:
    """CPUs that every level allows; None where no level says anything."""
    hierarchy = read_hierarchy(tree, "cpuset")
    # v1's effective_cpus already leaves out offline CPUs; its plain list is all there was before Linux 4.8.
    names = ("cpuset.cpus.effective",) if hierarchy.version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
    allowed: frozenset[int] | None = None
    for folder in hierarchy.folders:
        texts = (tree.read(f"{folder}/{name}") for name in names)
        cpus = parse_cpu_list(next((text for text in texts if text is not None), None))
        if cpus:  # an empty list means: as the parent
            allowed = frozenset(cpus) if allowed is None else allowed & frozenset(cpus)
    return allowed


def parse_limit(text: str | None) -> int | None:
    """`max` or bytes -> bytes, None for no limit."""
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if 0 <= value < NO_LIMIT_BYTES else None


def parse_quota(text: str | None) -> float | None:
    """`QUOTA PERIOD` in microseconds (`max` or -1 = none; the period may be missing) -> CPUs."""
    fields = (text or "").split()
    try:
        quota, period = int(fields[0]), int(fields[1]) if len(fields) > 1 else 100_000
    except (IndexError, ValueError, OverflowError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def parse_stat(text: str | None) -> dict[str, int]:
    """`name value` lines of memory.stat."""
    values = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdecimal() and len(value) < 24:
            values[name] = int(value)
    return values


def _below(path: str, root: str) -> str | None:
    """`path` relative to `root`; None when it is not below it."""
    if root == "/":
        return path.lstrip("/")
    if path == root or path.startswith(root + "/"):
        return path[len(root) :].lstrip("/")
    return None


def _unescape(field: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal."""
    for octal, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, char)
    return field


def read_oom_kills(tree: Tree) -> int | None:
    """How often the kernel's OOM killer struck in the own group; None where its counter cannot be read."""
    hierarchy = read_hierarchy(tree, "memory")
    name = "memory.events" if hierarchy.version == 2 else "memory.oom_control"
    for folder in hierarchy.folders:
        counted = parse_stat(tree.read(f"{folder}/{name}"))
        if "oom_kill" in counted:
            return counted["oom_kill"]
    return None


def read_slowed(tree: Tree) -> int:
    """How often the kernel slowed the own group, or one above it, down at memory.high; 0 where it does not count."""
    hierarchy = read_hierarchy(tree, "memory")
    return sum(parse_stat(tree.read(f"{folder}/memory.events")).get("high", 0) for folder in hierarchy.folders)
