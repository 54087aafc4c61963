"""`applianctl model`: add, list, show, verify, repair, name, use and remove the models of the store."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import click

from appliance import inventory, library, parsers, status
from appliance import manifest as manifests
from appliance.budget import show as show_size
from appliance.cli.add import add, count, group_text, hub_delivery, lay_out
from appliance.cli.application import Application
from appliance.errors import ModelError, NotReachable, StoreError, UsageError
from appliance.facts import ModelFacts
from appliance.hub.reference import is_hub
from appliance.quantize.format import parse_config
from appliance.quantize.served import COMPARED
from appliance.sources import Sources
from appliance.store import Store, Stored

UNCOMPARED = ", not compared with transformers (docs/models.md)"

_application = click.make_pass_decorator(Application)


@click.group()
def model() -> None:
    """Add, list, show, verify, repair, name, use and remove models.

    A model is quantized once and stored under a name; adding it again costs nothing.
    """


model.add_command(add)


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_application
def list_(app: Application, as_json: bool) -> None:
    """List the stored models; `*` marks the one in use."""
    store = Store(app.directories.store)
    active = library.active_name(app.parsed, app.directories)
    rows = [_row(store, name, digest, active) for name, digest in store.names().items()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo(f"No model in {store.root}. Add one with `applianctl model add smollm2`.")
        return
    click.echo(_table(
        ("", "NAME", "SIZE", "WEIGHTS", "BITS", "GROUP", "ADDED", "DIGEST", "SOURCE"),
        [("*" if r["in_use"] else "", r["name"], None if r["bytes"] is None else show_size(r["bytes"]),
          count(r["parameters"]), r["bits_per_weight"], r["group_size"], (r["created"] or "?")[:10],
          r["digest"][:12], _short_source(r["source"])) for r in rows]))
    for row in rows:
        if row["damaged"]:
            click.echo(f"{row['name']}: damaged: {row['damaged']}", err=True)


@model.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_application
def show(app: Application, name: str | None, as_json: bool) -> None:
    """Show what is known of a model (default: the one in use)."""
    from appliance.facts import to_json
    from appliance.probe.model import read_model

    stored, called = _find(app, name)
    facts = read_model(stored.path, name=called, digest=stored.digest)
    manifest = stored.manifest
    if as_json:
        origin = {key: manifest[key] for key in ("source", "source_digest", "recipe", "created", "report", "files")}
        place = {"path": str(stored.path), "names": list(stored.names)}
        click.echo(json.dumps({**to_json(facts), **place, **origin}, indent=2))
        return
    window = f", {facts.sliding_layers} with a window of {facts.sliding_window}" if facts.sliding_window else ""
    stored_bytes = facts.linear_bytes + facts.table_bytes + facts.kept_bytes
    lines = [
        ("name", ", ".join(stored.names)),
        ("source", manifest["source"] + _from(manifest["report"])),
        ("architecture", facts.architecture + ("" if facts.architecture in COMPARED else UNCOMPARED)),
        ("weights", f"{count(facts.parameters)}, {facts.bits_per_weight:.2f} bits each, {show_size(stored_bytes)}"),
        ("  linears", f"{show_size(facts.linear_bytes)}, group {group_text(manifest['report'])}, "
                      f"{_grid(manifest['report'])}"),
        ("  tables", f"{show_size(facts.table_bytes)}, {_table_kind(facts)}"
                     f"{', tied' if facts.tied else ''}"),
        ("  kept", show_size(facts.kept_bytes)),
        ("layers", f"{facts.layers}{window}"),
        ("heads", f"{facts.heads}, {facts.kv_heads} for keys and values, {facts.head_dim} wide"),
        ("context", f"at most {facts.max_context} tokens"),
        ("chat template", _template(facts)),
        ("tool calls", _parser(parsers.choose_tools(facts.architecture, facts.template_marks, app.settings.tools,
                                                    facts.absent_tokens))),
        ("reasoning", _parser(parsers.choose_reasoning(facts.architecture, facts.template_marks, app.settings.reasoning,
                                                       facts.absent_tokens))),
        ("loss", str(manifest["report"].get("loss", "?"))),
        ("folder", str(stored.path)),
    ]
    click.echo("\n".join(f"{label:<15}{value}" for label, value in lines))
    for reason, layers in _by_reason(facts.kept).items():
        click.echo(f"{'bf16':<15}{len(layers)} x {reason}: {', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''}")


@model.command()
@click.argument("name", required=False)
@_application
def verify(app: Application, name: str | None) -> None:
    """Read every byte of a model (default: of all) and compare it with its recorded SHA-256."""
    store = Store(app.directories.store)
    names = [_called(app, name)] if name else list(store.names())
    damaged = []
    for called in names:
        findings = store.verify(store.pointed(called))
        for finding in findings:
            click.echo(f"{called}: {finding}")
        layout = store.prepared_finding(store.pointed(called), contents=True)
        if layout and layout != "it is not there":
            click.echo(f"{called}: prepared weights: {layout}")
            findings.append(layout)
        if findings:
            damaged.append(called)
        else:
            click.echo(f"{called}: whole ({show_size(store.get(called).bytes)})")
    if damaged:
        raise ModelError(f"damaged: {', '.join(damaged)}",
                         do=f"run `applianctl model repair {damaged[0]}`; check the disk")


@model.command()
@click.argument("name")
@click.option("--source", help="Where it was made from (default: the recorded source).")
@_application
def repair(app: Application, name: str, source: str | None) -> None:
    """Make a damaged model again from its source; one that is whole stays as it is."""
    from appliance import repair as repairs
    from appliance.cli.progress import Progress

    called = _called(app, name)
    store = Store(app.directories.store)
    digest = store.pointed(called)
    with Progress() as progress:
        origin = source or str(manifests.read(store.root / "objects" / digest)[0].get("source"))
        absent = is_hub(origin) and Sources(store.root).find(origin) is None
        delivery = hub_delivery(app, store, progress) if absent and store.verify(digest) else None
        app.become_owner()
        tools = repairs.Tools(worker_python=app.worker_python, on_event=progress, env=app.env,
                              worker_env=app.settings.worker.env, now=time.time())
        with delivery.files(origin) if delivery else nullcontext(source) as place:
            mended = repairs.repair_model(store, digest, called, source=place and str(place), tools=tools)
        layout = store.prepared_finding(digest, contents=True)
        if layout and store.prepared_folder(digest).is_dir():
            mended = f"{mended}; its prepared weights were damaged ({layout})" if mended else f"damaged: {layout}"
            store.discard_prepared(digest)
        reason = lay_out(app, store, digest, progress)
    if reason:
        click.echo(f"applianctl: warning: the weights are not laid out yet ({reason}); `serve` tries again", err=True)
    click.echo(f"{called}: {mended or 'whole, nothing to do'}")


@model.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Remove it even if it is the model in use.")
@_application
def remove(app: Application, name: str, force: bool) -> None:
    """Remove a name, and its files when no other name needs them."""
    active = library.active_name(app.parsed, app.directories)
    store = Store(app.directories.store)
    app.become_owner()
    try:
        running = status.read(app.directories.runtime).get("digest")
    except NotReachable:
        running = None
    if running and not force and store.names().get(name) == running:
        raise UsageError(f"{name} is being served now", do="stop the service first, or use --force")
    digest = store.names().get(name, "")
    kept = inventory.needed(app.directories).keys() - ({digest} if force else set())
    freed = store.remove(name, in_use=active, force=force, keep=kept)
    click.echo(f"{name}: removed, {show_size(freed)} freed")
    if digest in kept and digest not in store.names().values():
        click.echo(f"{name}: its files stay, because the service may roll back to them", err=True)


@model.command()
@click.argument("name")
@_application
def use(app: Application, name: str) -> None:
    """Make NAME the model that is served: at once, on trial, where the service runs; else from its next start."""
    from appliance.cli import apply

    change = apply.prepare(app, model=name)
    if not change.lines:
        click.echo(f"{name}: in use already")
        return
    apply.check(app, change)
    click.echo(f"{name}: in use")
    apply.put(app, change)


@model.command("name")
@click.argument("name")
@click.argument("digest")
@_application
def name_(app: Application, name: str, digest: str) -> None:
    """Make NAME stand for the stored model with this DIGEST. A running service takes it at its next reload or start."""
    store = Store(app.directories.store)
    if digest not in store.digests():
        raise ModelError(f"no stored model has the digest {digest}", do="see `applianctl model list --json`")
    before = store.names().get(name)
    app.become_owner()
    store.point(name, digest)
    click.echo(f"{name}: {'the same as before' if before == digest else digest[:12]}")


def _find(app: Application, name: str | None) -> tuple[Stored, str]:
    called = _called(app, name)
    return Store(app.directories.store).get(called), called


def _called(app: Application, name: str | None) -> str:
    """The name meant: no name, and `default`, stand for the model in use."""
    return library.active_name(app.parsed, app.directories) if name in (None, "default") else str(name)


def _row(store: Store, name: str, digest: str, active: str) -> dict[str, Any]:
    try:
        stored: Stored | None = store.get(name)
        damaged = ""
    except (StoreError, ModelError) as error:
        stored, damaged = None, error.why
    manifest = stored.manifest if stored else {}
    report = manifest.get("report", {})
    return {
        "name": name, "digest": digest, "in_use": name == active, "damaged": damaged,
        "bytes": stored.bytes if stored else None, "parameters": report.get("parameters"),
        "bits_per_weight": report.get("bits_per_weight"), "group_size": report.get("group_size"),
        "source": manifest.get("source"), "created": manifest.get("created"),
    }


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [list(head), *[["?" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    aligned = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def _short_source(source: str | None) -> str:
    """A source on a line: commits by their first digits, long paths by their end."""
    text = re.sub(r"@([0-9a-f]{12})[0-9a-f]{28}\b", r"@\1", source or "?")
    return text if len(text) <= 60 else f"...{text[-57:]}"


def _from(report: Mapping[str, Any]) -> str:
    """Where a model of the Hub was fetched from, and by which name it was asked for."""
    origin = report.get("origin") or {}
    return f" (asked for as {origin.get('asked')}, from {origin['endpoint']})" if origin.get("endpoint") else ""


def _by_reason(kept: Iterable[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for layer in kept:
        found.setdefault(layer.reason, []).append(layer.name)
    return found


def _template(facts: ModelFacts) -> str:
    if not facts.chat:
        return "no" + (f": it cannot be used ({facts.template_fault})" if facts.template_fault else "")
    return "yes" + (f", for messages of {', '.join(facts.roles)}" if facts.roles else "")


def _parser(found: parsers.Found) -> str:
    return f"{found.parser}: {found.reason}"


def _grid(report: Mapping[str, Any]) -> str:
    """How the codes were chosen: by how many layers of each route; what earlier releases made has no grid."""
    if "grid" not in report:
        return "grid minmax"
    routes = [layer["route"] for layer in report["layers"] if layer["bits"] == 4]
    told = ", ".join(f"{routes.count(route)} {route}" for route in sorted(set(routes)))
    return f"grid {report['grid']}" + (f" ({told})" if len(set(routes)) > 1 or report["grid"][:6] not in told else "")


def _table_kind(facts: ModelFacts) -> str:
    bits = parse_config(facts.quantization).stored_table_bits
    return "bf16" if bits == 16 else f"{bits}-bit"
