"""A host folder from this machine: the files that the probe reads and its answers, without what identifies it.

    capture(folder, ...) -> the written paths

The folder is what `applianctl probe --root` and the tests take: files of /proc and /sys, `captured.json`, `expect.json`
with the facts as they were found. Does: remember each file the probe really read, keep of it what the probe uses,
write. Does not: read anything that the probe does not.

Rules: only lines that are known to be harmless are kept (of /proc/cpuinfo, mountinfo, status and dpkg's list); names of
control groups become `groupN` unless every system has them; home folders become /home/user; the machine's name and
the account's are replaced wherever a name can stand. Facts read from the folder are the machine's, but for these names.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance import disk
from appliance.errors import UsageError
from appliance.facts import HostFacts, to_json
from appliance.probe.cgroup import parse_cgroup, parse_mountinfo
from appliance.probe.evidence import Evidence
from appliance.probe.host import read_live
from appliance.probe.software import parse_dpkg_status
from appliance.probe.tree import Tree

CPUINFO_KEYS = frozenset((
    "processor", "vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "physical id", "siblings",
    "core id", "cpu cores", "fpu", "flags",
    "Features", "BogoMIPS", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision",
))
"""Others may identify the machine (`Serial` of ARM boards)."""
PACKAGES = {"dpkg": ("Status", "Architecture", "Version"), "libc6": ("Status", "Architecture", "Version")}
COMMON_GROUPS = re.compile(
    r"(?:system|user|machine|init|app|session|background)\.(?:slice|scope)|user-\d+\.slice|user@\d+\.service"
    r"|appliance(?:-\w+)?\.(?:service|slice)|docker|lxc|lxc\.payload|kubepods(?:\.slice)?|libpod_parent|machine|\.\.")
GROUP_KIND = re.compile(r"\.(?:slice|scope|service|mount|socket)$")
HOME = re.compile(r"/home/[^/\s:\"]+")
SHORTEST_NAME = 3
"""A shorter name of a machine or an account occurs by chance."""


@dataclass(frozen=True, kw_only=True)
class RecordingTree(Tree):
    """A tree that remembers what was read from it. `seen`: the host's path -> its bytes, empty where only its being
    there was asked."""

    seen: dict[str, bytes] = field(default_factory=dict)

    def head(self, path: str, size: int) -> bytes | None:
        data = super().head(path, size)
        if data is not None:
            self.seen[path] = data
        return data

    def is_file(self, path: str) -> bool:
        there = super().is_file(path)
        if there:
            self.seen.setdefault(path, b"")
        return there


@dataclass(frozen=True, kw_only=True)
class Names:
    """What is replaced: `groups` by path component, `words` (machine, account) by word."""

    groups: Mapping[str, str]
    words: tuple[tuple[str, str], ...]

    def path(self, text: str) -> str:
        """A path, or a text of paths, of the host."""
        # A component ends where the path goes on or ends: spaces separate the fields of mountinfo.
        text = re.sub(r"(?<=/)[^/\s]+", lambda match: self.groups.get(match[0], match[0]), text)
        return self.words_of(HOME.sub("/home/user", text))

    def words_of(self, text: str) -> str:
        for name, by in self.words:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", by, text)
        return text

    def tree(self, value: Any) -> Any:
        """A JSON value whose texts are paths or sentences."""
        if isinstance(value, str):
            return self.path(value) if "/" in value else value
        if isinstance(value, Mapping):
            return {key: self.tree(inner) for key, inner in value.items()}
        return [self.tree(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def capture(folder: Path, *, store: Path | None, versions: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """Write the folder; returns the paths in it, sorted. Raises UsageError when something is there already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty", do="give a folder that does not exist yet")
    tree = RecordingTree(root=Path("/"))
    facts, evidence = read_live(tree, store=store, versions=versions, env=env)
    cgroup, mounts = (tree.seen.get(f"/proc/self/{name}", b"").decode("utf-8", "replace")
                      for name in ("cgroup", "mountinfo"))
    names = names_of(cgroup, mounts, machine=socket.gethostname(), account=env.get("USER") or env.get("LOGNAME") or "")
    files = {names.path(path).lstrip("/"): kept(path, data, names) for path, data in tree.seen.items()}
    files["captured.json"] = _text(names.tree(answers(evidence, facts)))
    files["expect.json"] = _text(names.tree(expected(facts)))
    with disk.mapped("cannot write the captured host", folder):
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return sorted(files)


def names_of(cgroup: str, mountinfo: str, *, machine: str, account: str) -> Names:
    """What is replaced on a machine with these files of /proc/self."""
    groups: dict[str, str] = {}
    for path in (*parse_cgroup(cgroup).values(), *(mount.root for mount in parse_mountinfo(mountinfo))):
        for part in path.split("/"):
            if part and part not in groups and not COMMON_GROUPS.fullmatch(part):
                kind = GROUP_KIND.search(part)
                groups[part] = f"group{len(groups) + 1}{kind[0] if kind else ''}"
    known = ((machine, "machine"), (machine.partition(".")[0], "machine"), (account, "user"))
    words = [(name, by) for name, by in known if len(name) >= SHORTEST_NAME and name != "root"]
    return Names(groups=groups, words=tuple(dict.fromkeys(words)))


def kept(path: str, data: bytes, names: Names) -> bytes:
    """Of a file's content what the probe uses and does not identify the machine."""
    if path.startswith("/bin/"):
        return data  # the first bytes of a program
    text = data.decode("utf-8", "replace")
    if path == "/proc/cpuinfo":
        text = _lines(text, lambda line: not line.strip() or line.partition(":")[0].strip() in CPUINFO_KEYS)
    elif path == "/proc/self/mountinfo":
        text = names.path(_lines(text, lambda line: " - cgroup" in line))
    elif path == "/proc/self/status":
        text = _lines(text, lambda line: line.startswith("Cpus_allowed"))
    elif path == "/var/lib/dpkg/status":
        text = "\n".join(_package(name, parse_dpkg_status(text, name), fields) for name, fields in PACKAGES.items())
    elif path.startswith(("/etc/", "/proc/sys/", "/proc/self/")):
        text = names.path(text)
    return text.encode()


def answers(evidence: Evidence, facts: HostFacts) -> dict[str, Any]:
    """`captured.json`: what no file tells."""
    return {
        "architecture": evidence.architecture,
        "cpuid": {f"{leaf:x}.{subleaf}": {name: hex(value) for name, value in registers.items()}
                  for (leaf, subleaf), registers in evidence.cpuid.items()},
        "xgetbv": None if evidence.xcr0 is None else hex(evidence.xcr0),
        "amx_permission": evidence.amx_permission,
        "proof": dict(evidence.proof), "reasons": dict(evidence.reasons),
        "executable_mappings": evidence.executable_mappings,
        "affinity": None if evidence.affinity is None else list(evidence.affinity),
        "disk": to_json(facts.disk),
        "software": to_json(facts.software),
    }


def expected(facts: HostFacts) -> dict[str, Any]:
    """`expect.json`: the facts that planning rests on. Whoever reports a wrong one corrects it here."""
    whole = to_json(facts)
    kinds = [core.kind for core in facts.topology.cores]
    return {
        "cpu": {name: whole["cpu"][name] for name in ("architecture", "vendor", "model_name", "hypervisor", "tier")},
        "topology": {name: whole["topology"][name] for name in ("online", "allowed", "smt", "quota")},
        "count": {"cores": len(kinds), **{kind: kinds.count(kind) for kind in ("performance", "efficiency")}},
        "memory": {name: whole["memory"][name]
                   for name in ("total_bytes", "ceiling_bytes", "ceiling_source", "used_bytes")},
        "software": {name: whole["software"][name] for name in ("libc", "userland", "compiler")},
    }


def _lines(text: str, wanted: Any) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if wanted(line))


def _package(name: str, fields: Mapping[str, str], wanted: Iterable[str]) -> str:
    return f"Package: {name}\n" + "".join(f"{key}: {fields[key]}\n" for key in wanted if key in fields)


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
