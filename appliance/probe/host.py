"""read_host: everything the plan needs to know of a machine, live or captured.

Composes the probes of this package; each is a question (a file below `root`, a child process) and a pure parser.
It decides nothing, starts nothing but the proof child of the live host, and writes nothing. Whatever cannot be found
out is None. Only a root that is no host at all is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from appliance.errors import UsageError
from appliance.facts import DiskFacts, HostFacts, SoftwareFacts
from appliance.probe.cpu import read_cpu, worth_proving
from appliance.probe.disk import captured_disk, read_disk
from appliance.probe.evidence import Evidence, ask_live, read_captured
from appliance.probe.memory import read_memory
from appliance.probe.software import captured_software, read_software
from appliance.probe.topology import read_topology
from appliance.probe.tree import Tree

NO_VERSIONS: Mapping[str, str] = {}


def read_host(
    root: Path | str = "/",
    *,
    store: Path | None = None,
    live: bool | None = None,
    versions: Mapping[str, str] = NO_VERSIONS,
    env: Mapping[str, str] | None = None,
) -> HostFacts:
    """Facts of the host below `root`.

    `live` (default: whether `root` is `/`): ask this machine for affinity, CPUID, proof and disk space; otherwise
    `captured.json` in `root` answers. `store`: where free disk is measured (live only). `versions`: package ->
    version, passed through. `env` (default: the process environment when live, else nothing): PATH, CXX,
    LD_LIBRARY_PATH. Raises UsageError when `root` is not a folder with proc/ or sys/.
    """
    folder = Path(root)
    if not (folder / "proc").is_dir() and not (folder / "sys").is_dir():
        why = "it holds neither proc/ nor sys/" if folder.is_dir() else "there is no such folder"
        raise UsageError(f"{folder} is not a host", why=why, do="give / or the folder of a captured host")
    is_live = folder.resolve() == Path("/") if live is None else live
    tree = Tree(root=folder)
    if is_live:
        return read_live(tree, store=store, versions=versions, env=env)[0]
    evidence = read_captured(folder)
    software = read_software(tree, env=env or {}, live=False, versions=versions,
                             executable_mappings=evidence.executable_mappings)
    return _facts(tree, evidence, captured_software(software, evidence.software), captured_disk(evidence.disk))


def read_live(
    tree: Tree, *, store: Path | None, versions: Mapping[str, str], env: Mapping[str, str] | None = None
) -> tuple[HostFacts, Evidence]:
    """Facts of this machine, and what was asked beyond its files."""
    cpuinfo = tree.read("/proc/cpuinfo")
    evidence = ask_live(lambda known: worth_proving(cpuinfo, known))
    software = read_software(tree, env=dict(os.environ) if env is None else env, live=True, versions=versions,
                             executable_mappings=evidence.executable_mappings)
    return _facts(tree, evidence, software, read_disk(store)), evidence


def _facts(tree: Tree, evidence: Evidence, software: SoftwareFacts, disk: DiskFacts) -> HostFacts:
    return HostFacts(
        cpu=read_cpu(tree.read("/proc/cpuinfo"), evidence),
        topology=read_topology(tree, evidence.affinity),
        memory=read_memory(tree),
        software=software,
        disk=disk,
    )
