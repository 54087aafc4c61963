"""The support bundle: everything needed to understand a node, in one tar.gz, without secrets, prompts or weights.

Does: collect members, each scrubbed, and write them in a fixed order with an index of their SHA-256. Does not: judge,
or send. Rules: at most MAX_BYTES; what cannot be collected is a member that says so; the file is for its owner only
(0600), and an existing file is never replaced.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from appliance.disk import mapped
from appliance.errors import ApplianceError, UsageError
from appliance.keys import configured_key
from appliance.scrub import SECRET_NAME, Scrubber, is_safe
from appliance.settings import Settings
from appliance.unit import Unit

MAX_BYTES = 20 * 10**6
LOG_BYTES = 2 * 10**6
"""The end of each log."""
JOURNAL_LINES = 5000
LOGS = ("agent.log", "agent.log.1", "worker.log", "worker.log.1")
LIMITS = ("memory.max", "memory.high", "memory.current", "memory.swap.max", "memory.events", "memory.stat", "cpu.max",
          "cpu.stat", "cpuset.cpus.effective", "memory.pressure", "cpu.pressure", "pids.max", "pids.current",
          "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "cpu.cfs_quota_us",
          "cpu.cfs_period_us")
HOST_FILES = ("/proc/meminfo", "/proc/loadavg", "/proc/version", "/etc/os-release", "/proc/pressure/memory",
              "/proc/pressure/cpu")


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Written:
    """`bytes`: of the file; `left_out`: members that would have made it too large."""

    path: Path
    bytes: int
    members: tuple[Member, ...]
    left_out: tuple[str, ...]


def scrubber(settings: Settings, *, env: Mapping[str, str], state: Path) -> Scrubber:
    """Knows every secret of this service that can be read."""
    secrets = [value for name, value in env.items() if SECRET_NAME.search(name)]
    hidden = [name for name in settings.worker.env if not is_safe(name)]
    secrets += [settings.worker.env[name] for name in hidden]
    with contextlib.suppress(ApplianceError):
        secrets.append(configured_key(settings.api_key_file, env) or "")
    for path in (settings.api_key_file, settings.tls.key, settings.hub.token_file, str(state / "keys.json"),
                 "/run/credentials/appliance.service/api_key", "/run/credentials/appliance.service/hub_token"):
        with contextlib.suppress(OSError, ValueError):
            secrets += _words(Path(path).read_text()) if path else []
    return Scrubber(secrets, hidden)


def json_member(name: str, collect: Callable[[], Any], scrub: Scrubber) -> Member:
    """A JSON value, or the sentence why there is none: whatever is broken here, the rest is still wanted."""
    try:
        value = collect()
    except Exception as error:
        told = error.line if isinstance(error, ApplianceError) else f"{type(error).__name__}: {error}"
        value = {"not_collected": told}
    text = json.dumps(scrub.tree(value), indent=1, sort_keys=True, default=str)
    return Member(name=name, data=f"{text}\n".encode())


def log_members(state: Path, scrub: Scrubber) -> Iterator[Member]:
    """The end of each log that is there."""
    for name in LOGS:
        if os.access(state, os.X_OK) and (state / name).exists():
            yield _text_member(f"logs/{name}", partial(tail, state / name, LOG_BYTES), scrub.text)


def unit_members(unit: Unit | None, scrub: Scrubber) -> Iterator[Member]:
    """What systemd knows of the unit: its files, its properties, its journal."""
    if unit is None:
        return
    for path in (unit.fragment, *unit.drop_ins):
        if path:
            name = f"systemd/{path.strip('/').replace('/', '_')}"
            yield _text_member(name, partial(tail, Path(path), LOG_BYTES), scrub.unit)
    yield _text_member("systemd/show.txt", lambda: _output("systemctl", "show", unit.name, "--no-pager"), scrub.unit)
    yield _text_member("systemd/version.txt", lambda: _output("systemctl", "--version"), scrub.text)
    yield _text_member(
        "logs/journal.txt",
        lambda: _output("journalctl", "--unit", unit.name, "--lines", str(JOURNAL_LINES), "--output", "short-iso",
                        "--no-pager", "--quiet")[-LOG_BYTES:], scrub.text)


def host_members(pid: int | None, scrub: Scrubber, *, root: Path = Path("/")) -> Iterator[Member]:
    """Files of /proc, and the limits of the agent's control groups from its own to the root."""
    from appliance.probe.cgroup import find_hierarchy, parse_cgroup, parse_mountinfo
    from appliance.probe.tree import Tree

    tree = Tree(root=root)
    for path in HOST_FILES:
        if (text := tree.read(path)) is not None:
            yield Member(name=f"host/{path.strip('/').replace('/', '_')}", data=scrub.text(text).encode())
    paths = parse_cgroup(tree.read(f"/proc/{pid or 'self'}/cgroup"))
    mounts = parse_mountinfo(tree.read("/proc/self/mountinfo"))
    found: dict[str, str] = {}
    for controller in ("memory", "cpu", "cpuset", "pids"):
        for folder in find_hierarchy(controller, paths, mounts).folders:
            for name in LIMITS:
                text = tree.read(f"{folder}/{name}") if name.startswith(controller) else None
                if text is not None:
                    found[f"{folder}/{name}"] = text.strip()
    yield json_member("host/limits.json", lambda: found, scrub)


def write(path: Path, members: Iterable[Member], *, now: float, version: str) -> Written:
    """Write the bundle. Raises UsageError when the file is there already, StoreError when the disk refuses."""
    kept, left_out, total = [], [], 0
    for member in sorted(members, key=_importance):
        total += len(member.data)
        if total > MAX_BYTES:
            total -= len(member.data)
            left_out.append(member.name)
        else:
            kept.append(member)
    kept.sort(key=lambda member: member.name)
    index = {"created": int(now), "version": version, "left_out": sorted(left_out),
             "members": [{"name": member.name, "bytes": len(member.data),
                          "sha256": hashlib.sha256(member.data).hexdigest()} for member in kept]}
    first = Member(name="index.json", data=(json.dumps(index, indent=1) + "\n").encode())
    data = _tar((first, *kept), now=int(now))
    with mapped("cannot write the support bundle", path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise UsageError(f"{path} is there already", do="give another name") from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except OSError:
            path.unlink()
            raise
    return Written(path=path, bytes=len(data), members=(first, *kept), left_out=tuple(sorted(left_out)))


def tail(path: Path, most: int) -> str:
    """The last `most` bytes of a file, from the beginning of a line."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        data = file.read(most)
    if size > most:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")


def _importance(member: Member) -> tuple[bool, bool, str]:
    """Older logs go first when there is too much, then logs."""
    return member.name.endswith(".1"), member.name.startswith("logs/"), member.name


def _tar(members: Iterable[Member], *, now: int) -> bytes:
    """The same members make the same bytes."""
    out = io.BytesIO()
    with (gzip.GzipFile(fileobj=out, mode="wb", mtime=now, filename="") as packed,
          tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar):
        for member in members:
            entry = tarfile.TarInfo(f"appliance-support/{member.name}")
            entry.size, entry.mtime, entry.mode = len(member.data), now, 0o600
            tar.addfile(entry, io.BytesIO(member.data))
    return out.getvalue()


def _text_member(name: str, collect: Callable[[], str], scrub: Callable[[str], str]) -> Member:
    try:
        text = collect()
    except (OSError, subprocess.SubprocessError) as error:
        text = f"not collected: {error}\n"
    return Member(name=name, data=scrub(text).encode())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=30, check=False)
    except FileNotFoundError:
        return f"not collected: there is no {command[0]}\n"
    return done.stdout or f"not collected: {done.stderr.strip()}\n"


def _words(text: str) -> list[str]:
    """The words of a secret file that are long enough to be secret themselves."""
    return [word.strip("\"',") for word in text.split() if len(word.strip("\"',")) >= 16]
