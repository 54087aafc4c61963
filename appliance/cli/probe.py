"""`applianctl probe`: the facts of this machine, or of a captured one. Reads, never decides; writes only what
`--capture` asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from appliance.budget import show
from appliance.errors import UsageError
from appliance.facts import (
    Core,
    CpuFacts,
    DiskFacts,
    HostFacts,
    MemoryFacts,
    SoftwareFacts,
    TierFact,
    TopologyFacts,
    to_json,
)

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.cli.application import Application

Line = tuple[str, str]
"""Label and value."""

UNKNOWN = "unknown"


@click.command()
@click.option("--root", metavar="DIR", default="/", help="Folder of a captured host (default: this machine).")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
@click.option("--capture", metavar="DIR", help="Write this machine's files and answers there, for a bug report.")
@click.pass_context
def probe(ctx: click.Context, root: str, as_json: bool, capture: str | None) -> None:
    """Show CPU, cores, memory ceiling, software and disk space of this machine.

    A value that cannot be found out is `unknown`.
    """
    from pathlib import Path

    from appliance.cli.application import Application
    from appliance.probe.host import read_host

    here = Path(root).resolve() == Path("/")
    application = ctx.obj or Application(env=os.environ)
    if capture is not None:
        if not here:
            raise UsageError("--capture and --root exclude each other", do="capture the machine that this runs on")
        _capture(Path(capture), application)
        return
    facts = read_host(
        root,
        store=application.directories.store if here else None,
        versions=application.versions() if here else {},
    )
    if as_json:
        click.echo(json.dumps({**to_json(facts), "fingerprint": facts.fingerprint}, indent=2))
    else:
        click.echo(render(facts))


def _capture(folder: Path, application: Application) -> None:
    from appliance.probe.capture import capture

    written = capture(folder, store=application.directories.store, versions=application.versions(), env=application.env)
    for name in written:
        click.echo(f"  {name}")
    click.echo(f"{len(written)} files in {folder}: what the probe read, without the names of the machine, of accounts\n"
               "and of control groups, without serial numbers and addresses. Look through them before you send them.\n"
               f"To check: applianctl probe --root {folder}")


def render(facts: HostFacts) -> str:
    """The facts as aligned text, one group per kind."""
    groups = (
        ("CPU", _cpu(facts.cpu, facts.fingerprint)),
        ("Cores", _cores(facts.topology)),
        ("Memory", _memory(facts.memory)),
        ("Software", _software(facts.software)),
        ("Disk", _disk(facts.disk)),
    )
    lines = []
    for title, rows in groups:
        lines += ["", title] + [f"  {label:<15} {value}" for label, value in rows]
    return "\n".join(lines[1:])


def _cpu(cpu: CpuFacts, fingerprint: str) -> Iterator[Line]:
    yield "model", cpu.model_name or UNKNOWN
    yield "vendor", cpu.vendor or UNKNOWN
    yield "architecture", (cpu.architecture or UNKNOWN) + (", virtual machine" if cpu.hypervisor else "")
    yield "tier", cpu.tier or ("none: not an x86-64 CPU" if cpu.architecture not in (None, "x86_64") else UNKNOWN)
    for tier in cpu.tiers:
        yield f"  {tier.name}", _verdict(tier)
    yield "fingerprint", fingerprint


def _cores(topology: TopologyFacts) -> Iterator[Line]:
    yield "online CPUs", _cpus(topology.online) if topology.online else UNKNOWN
    yield "usable CPUs", _cpus(topology.allowed) if topology.online else UNKNOWN
    yield "physical cores", _physical(topology.cores) if topology.cores else UNKNOWN
    yield "SMT", {True: "on", False: "off", None: UNKNOWN}[topology.smt]
    quota = topology.quota
    yield "CPU quota", f"{quota.cpus:g} CPUs ({quota.source})" if quota else "none"
    for node in topology.nodes:
        yield f"NUMA node {node.node}", f"CPUs {_cpus(node.cpus)}, {_size(node.memory_bytes)}"
    if not topology.nodes:
        yield "NUMA nodes", UNKNOWN


def _memory(memory: MemoryFacts) -> Iterator[Line]:
    yield "total", _size(memory.total_bytes)
    yield "available", _size(memory.available_bytes)
    yield "swap", _size(memory.swap_total_bytes)
    for limit in memory.limits:
        yield "limit", f"{_size(limit.bytes)} ({limit.source}{', soft' if limit.soft else ''})"
    source = f" ({memory.ceiling_source})" if memory.ceiling_bytes is not None else ""
    yield "ceiling", _size(memory.ceiling_bytes) + source
    yield "used below it", _size(memory.used_bytes)


def _software(software: SoftwareFacts) -> Iterator[Line]:
    yield "kernel", software.kernel or UNKNOWN
    yield "userland", software.userland or UNKNOWN
    yield "C library", software.libc or UNKNOWN
    yield "C++ compiler", software.compiler or "not found"
    yield "Python headers", software.python_headers or "not found"
    yield "lscpu", software.lscpu or "not found"
    yield "libnuma.so.1", software.libnuma or "not found"
    yield "libgomp.so.1", software.libgomp or "not found"
    yield "code mappings", {True: "allowed", False: "denied", None: UNKNOWN}[software.executable_mappings]
    yield from sorted(software.versions.items())


def _disk(disk: DiskFacts) -> Iterator[Line]:
    where = f" at {disk.store_path}" if disk.store_path else ""
    yield "store", _free(disk.store_free_bytes) + where
    whole = f" of {_size(disk.shm_total_bytes)}" if disk.shm_total_bytes is not None else ""
    yield "/dev/shm", _free(disk.shm_free_bytes) + whole


def _verdict(tier: TierFact) -> str:
    if tier.usable:
        return "usable"
    refused = False in (tier.flags, tier.os_enabled, tier.proven)
    return f"{'no' if refused else UNKNOWN}: {tier.reason}"


def _physical(cores: tuple[Core, ...]) -> str:
    kinds = [core.kind for core in cores]
    parts = [f"{kinds.count(kind)} {kind}" for kind in ("performance", "efficiency") if kind in kinds]
    return f"{len(cores)} ({', '.join(parts)})" if parts else str(len(cores))


def _cpus(cpus: Iterable[int]) -> str:
    """CPU numbers in the kernel's list format, with their count."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{text} ({sum(last - first + 1 for first, last in runs)})" if runs else "none"


def _free(size: int | None) -> str:
    return UNKNOWN if size is None else f"{_size(size)} free"


def _size(size: int | None) -> str:
    return UNKNOWN if size is None else show(size)
