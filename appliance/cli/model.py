"""`applianctl model`: add, list, show, verify, use and remove the models of the store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from appliance import library, record, status
from appliance.budget import show as show_size
from appliance.cli.application import Application
from appliance.errors import ApplianceError, ModelError, NotReachable, StoreError, UsageError
from appliance.facts import ModelFacts
from appliance.jobs import Event
from appliance.quantize.format import parse_config
from appliance.store import Store, Stored

_application = click.make_pass_decorator(Application)


@click.group()
def model() -> None:
    """Add, list, show, verify, use and remove models.

    A model is quantized once and stored under a name; adding it again costs nothing.
    """


@model.command()
@click.argument("source")
@click.option("--name", help="Name in the store (default: made from SOURCE).")
@click.option("--group-size", type=click.Choice(["32", "64", "128", "256"]),
              help="Weights per scale (default: by the model's size).")
@click.option("--table-bits", type=click.Choice(["4", "8", "16"]),
              help="Bits of the embedding table and head (default: by the model's size).")
@click.option("--ignore", multiple=True, metavar="MODULE", help="Keep this layer in bf16; may be repeated.")
@_application
def add(
    app: Application, source: str, name: str | None, group_size: str | None, table_bits: str | None,
    ignore: tuple[str, ...],
) -> None:
    """Quantize SOURCE to 4 bits and store it.

    SOURCE is `smollm2` (the embedded default), a GGUF file or a Hugging Face folder with safetensors files.
    """
    from appliance.cli.progress import Progress

    group = int(group_size) if group_size else None
    recipe = library.Recipe(group_size=group, table_bits=int(table_bits) if table_bits else None, ignore=ignore)
    store = Store(app.directories.store)
    there = Path(source).exists()
    app.become_owner()
    if there and not os.access(source, os.R_OK):
        raise ModelError(f"{source} cannot be read", why=f"models are added as the store's owner, user {os.geteuid()}",
                         do="let that user read it, or put it below /var/tmp")
    with Progress() as progress:
        added = library.add_model(
            source, name=name, recipe=recipe, store=store, directories=app.directories, worker_python=app.worker_python,
            on_event=progress, env=app.env, now=time.time(), worker_env=app.settings.worker.env,
        )
        reason = _prepare(app, store, added.digest, progress)
    if reason:
        click.echo(f"applianctl: warning: the weights are not laid out yet ({reason}); `serve` tries again", err=True)
    if added.cached:
        click.echo(f"{added.name}: in the store already, nothing to do ({added.seconds:.1f} s)")
        return
    stored = store.read(added.digest)
    report = stored.manifest["report"]
    click.echo(f"{added.name}: stored, {show_size(stored.bytes)}, {_bits(report)} bits per weight, "
               f"group {_group(report)}, {added.seconds:.1f} s")


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
        ("", "NAME", "SIZE", "WEIGHTS", "BITS", "GROUP", "ADDED", "DIGEST"),
        [("*" if r["in_use"] else "", r["name"], None if r["bytes"] is None else show_size(r["bytes"]),
          _count(r["parameters"]), r["bits_per_weight"], r["group_size"], (r["created"] or "?")[:10],
          r["digest"][:12]) for r in rows]))
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
        ("source", manifest["source"]),
        ("architecture", facts.architecture),
        ("weights", f"{_count(facts.parameters)}, {facts.bits_per_weight:.2f} bits each, {show_size(stored_bytes)}"),
        ("  linears", f"{show_size(facts.linear_bytes)}, group {_group(manifest['report'])}"),
        ("  tables", f"{show_size(facts.table_bytes)}, {_table_kind(facts)}"
                     f"{', tied' if facts.tied else ''}"),
        ("  kept", show_size(facts.kept_bytes)),
        ("layers", f"{facts.layers}{window}"),
        ("heads", f"{facts.heads}, {facts.kv_heads} for keys and values, {facts.head_dim} wide"),
        ("context", f"at most {facts.max_context} tokens"),
        ("chat template", "yes" if facts.chat else "no"),
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
        again = f"run `applianctl model remove {damaged[0]} --force`, then add it again; check the disk"
        raise StoreError(f"damaged: {', '.join(damaged)}", do=again)


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
    known = record.load(app.directories.state, keep=True)
    wanted_back = {one.digest for one in (known.good, known.previous) if one is not None}
    freed = store.remove(name, in_use=active, force=force, keep=() if force else wanted_back)
    click.echo(f"{name}: removed, {show_size(freed)} freed")
    if digest in wanted_back and not force and digest not in store.names().values():
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


def _prepare(app: Application, store: Store, digest: str, on_event: Callable[[Event], None]) -> str | None:
    """Lay the weights out for the kernels; what went wrong, or None. The model itself is stored in either case."""
    try:
        library.prepare_model(digest, kernel=app.settings.kernel, store=store, worker_python=app.worker_python,
                              on_event=on_event, env=app.env, worker_env=app.settings.worker.env)
    except ApplianceError as error:
        return error.line
    return None


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


def _by_reason(kept: Iterable[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for layer in kept:
        found.setdefault(layer.reason, []).append(layer.name)
    return found


def _table_kind(facts: ModelFacts) -> str:
    bits = parse_config(facts.quantization).stored_table_bits
    return "bf16" if bits == 16 else f"{bits}-bit"


def _bits(report: dict[str, Any]) -> str:
    return str(report.get("bits_per_weight", "?"))


def _group(report: dict[str, Any]) -> str:
    other = len(report.get("group_size_overrides") or {})
    return f"{report.get('group_size', '?')}" + (f" ({other} layers smaller)" if other else "")


def _count(number: int | None) -> str:
    if number is None:
        return "?"
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
