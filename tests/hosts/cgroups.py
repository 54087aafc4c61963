"""Control group files for the host folders, as relative path -> text."""

from __future__ import annotations

from collections.abc import Mapping

Level = Mapping[str, str]
GIB = 1 << 30
V1_NO_LIMIT = "9223372036854771712"
V2_MOUNT = "32 24 0:28 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
SERVICE = "/system.slice/appliance.service"


def v2(path: str, levels: Mapping[str, Level], *, mount: str = V2_MOUNT) -> dict[str, str]:
    """`levels`: group path -> file -> text, below /sys/fs/cgroup; `path` is what /proc/self/cgroup says."""
    files = {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": mount}
    for group, level in levels.items():
        files |= {f"sys/fs/cgroup{group.rstrip('/')}/{name}": text for name, text in level.items()}
    return files


def service(**own: str) -> dict[str, str]:
    """A systemd service on v2 without limits; `own` overrides files of its group (memory_max -> memory.max)."""
    given = {name.replace("_", ".", 1): text for name, text in own.items()}
    unlimited = {"memory.max": "max", "memory.high": "max", "cpu.max": "max 100000"}
    level = {**unlimited, **memory(used=GIB // 2, file=GIB // 4), **given}
    root = {"cgroup.controllers": "cpuset cpu io memory pids"}
    return v2(SERVICE, {SERVICE: level, "/system.slice": unlimited, "/": root})


def memory(*, used: int, file: int) -> dict[str, str]:
    """v2 usage: `used` bytes in all, `file` of them page cache."""
    return {
        "memory.current": str(used),
        "memory.stat": f"anon {used - file}\nfile {file}\nkernel 1048576\nshmem 0\nfile_dirty 0\n"
        f"inactive_anon {used - file}\nactive_anon 0\ninactive_file {file - file // 4}\nactive_file {file // 4}\n"
        "unevictable 0\nslab_reclaimable 0\nslab_unreclaimable 0",
    }


def v1(paths: Mapping[str, str], levels: Mapping[str, Level], *, roots: Mapping[str, str] = {}) -> dict[str, str]:
    """`paths`: controllers -> group path; `levels`: folder below /sys/fs/cgroup -> file -> text; `roots`: the group
    that a controller's mount shows (default the root)."""
    mounts = ["31 24 0:27 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755"] + [
        f"{40 + i} 31 0:{30 + i} {roots.get(name, '/')} /sys/fs/cgroup/{name} rw,nosuid,relatime shared:{10 + i} - "
        f"cgroup cgroup rw,{name}"
        for i, name in enumerate(paths)
    ]
    files = {
        "proc/self/cgroup": "\n".join(f"{9 - i}:{name}:{path}" for i, (name, path) in enumerate(paths.items())),
        "proc/self/mountinfo": "\n".join(mounts),
    }
    for folder, level in levels.items():
        files |= {f"sys/fs/cgroup/{folder}/{name}": text for name, text in level.items()}
    return files


def v1_memory(*, limit: str, used: int, file: int, hierarchical: str | None = None) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used), "memory.use_hierarchy": "1",
        "memory.stat": f"cache {file}\nrss {used - file}\nhierarchical_memory_limit {hierarchical or limit}\n"
        f"total_cache {file}\ntotal_rss {used - file}\ntotal_inactive_file {file}\ntotal_active_file 0",
    }
