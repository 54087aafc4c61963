"""`applianctl plan`: what would be served and why, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from appliance.budget import PHASES, phase_bytes, show
from appliance.cli.application import Application
from appliance.facts import to_json
from appliance.plan import Plan


@click.command()
@click.option("--model", metavar="NAME", help="A stored model (default: the one in use).")
@click.option("--context", metavar="TOKENS", help="Wanted context length.")
@click.option("--threads", metavar="N", help="Worker threads.")
@click.option("--memory", metavar="SIZE", help="Memory ceiling, such as 4G; the node's own ceiling still holds.")
@click.option("--json", "as_json", is_flag=True, help="The whole plan as JSON.")
@click.pass_obj
def plan(
    app: Application, model: str | None, context: str | None, threads: str | None, memory: str | None, as_json: bool
) -> None:
    """What would be served and why, byte by byte."""
    from appliance.node import read_node, software_refusal

    app.flags.update({"model": model, "context": context, "cpu.threads": threads, "memory.ceiling": memory})
    node = read_node(app.parsed, app.directories, app.worker_python(), env=app.env)
    if as_json:
        click.echo(json.dumps(to_json(node.plan), indent=2))
    else:
        for line in render(node.plan):
            click.echo(line)
    if node.plan.refused:
        raise node.plan.refused.error()
    if missing := software_refusal(node.host):
        raise missing


def render(plan: Plan) -> Iterator[str]:
    """The plan for people: choices with reasons, memory line by line, the ladder."""
    yield f"{plan.model} on {plan.tier} (host {plan.fingerprint})"
    yield ""
    for choice in plan.choices:
        value = show(choice.value) if choice.name in ("memory ceiling", "key/value cache") else choice.value
        yield f"  {choice.name:<22}{value!s:<12} {choice.reason}  [{choice.evidence}]"
    if not plan.memory:
        return
    yield ""
    compiles = any(line.phases == ("compile",) for line in plan.memory)
    phases = [phase for phase in PHASES if phase != "compile" or compiles]
    yield "  " + f"{'memory':<36}" + "".join(f"{phase:>11}" for phase in phases)
    for line in (line for line in plan.memory if line.phases):
        cells = (show(line.bytes) if phase in line.phases else "-" for phase in phases)
        yield "  " + f"{line.item:<36}" + "".join(f"{cell:>11}" for cell in cells)
    yield "  " + f"{'needed':<36}" + "".join(f"{show(phase_bytes(plan.memory, phase)):>11}" for phase in phases)
    if plan.ceiling_bytes is not None and plan.usable_bytes is not None:
        yield (f"  peak {show(plan.peak_bytes)} ({plan.peak_phase}) of {show(plan.usable_bytes)} usable; "
               f"ceiling {show(plan.ceiling_bytes)}, the rest stays free")
    for line in (line for line in plan.memory if not line.phases):
        yield f"  {line.item}: {show(line.bytes)}"
    yield ""
    yield "  ladder: " + ", ".join(rung.id for rung in plan.rungs)
