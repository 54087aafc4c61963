"""`applianctl store`: what the store holds, what keeps it, and cleaning."""

from __future__ import annotations

import dataclasses
import json
import shutil

import click

from appliance import inventory
from appliance.budget import show as show_size
from appliance.cli.application import Application
from appliance.store import SCHEMA, Store

_application = click.make_pass_decorator(Application)


@click.group()
def store() -> None:
    """Show what the store holds and what keeps it; clean what nothing keeps."""


@store.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_application
def show(app: Application, as_json: bool) -> None:
    """Every model with its sizes and what keeps it: names, what is served, what the service may go back to."""
    held = Store(app.directories.store)
    found = inventory.look(held, app.directories)
    disk = shutil.disk_usage(held.root) if held.root.exists() else None
    if as_json:
        tree = {
            "path": str(held.root), "schema": SCHEMA, "free_bytes": disk.free if disk else None,
            "models": [dataclasses.asdict(one) for one in found.holdings],
            "drafts": [{"name": name, "bytes": size, "living": name in found.living}
                       for name, size in found.drafts.items()],
            "stray_layouts": dict(found.layouts),
            "sources": [{"source": one.source, "bytes": one.bytes, "kept": one.kept, "busy": one.busy}
                        for one in found.sources],
        }
        click.echo(json.dumps(tree, indent=2))
        return
    total = sum(one.bytes + one.layout_bytes for one in found.holdings)
    click.echo(f"{held.root}: {show_size(total)} in {len(found.holdings)} models"
               + (f", {show_size(disk.free)} free" if disk else ""))
    for one in found.holdings:
        click.echo(f"  {one.digest[:12]}  {show_size(one.bytes):>10}  layout {show_size(one.layout_bytes):>10}  "
                   f"{', '.join(one.kept_by) or 'nothing keeps it'}")
        if one.damaged:
            click.echo(f"    damaged: {one.damaged}")
    for name, size in found.drafts.items():
        state = "being written" if name in found.living else "left"
        click.echo(f"  {name[:12]}  {show_size(size):>10}  draft, {state}")
    for name, size in found.layouts.items():
        click.echo(f"  {name[:12]}  {show_size(size):>10}  layout that nobody maps")
    for source in found.sources:
        state = "being fetched" if source.busy else "to be kept" if source.kept else "fetched"
        click.echo(f"  {source.source}: {show_size(source.bytes)}, {state}")


@store.command()
@click.option("--dry-run", is_flag=True, help="Say what would go; nothing is deleted.")
@_application
def gc(app: Application, dry_run: bool) -> None:
    """Delete what nothing keeps: models without a name, drafts and sources that were left, layouts of no model."""
    held = Store(app.directories.store)
    if dry_run:
        cleaned = inventory.plan_cleaning(inventory.look(held, app.directories))
    else:
        app.become_owner()
        cleaned = inventory.clean(held, app.directories)
    for what, size in cleaned.parts:
        click.echo(f"{what}: {show_size(size)}")
    click.echo(f"{show_size(cleaned.bytes)} {'would be' if dry_run else 'were'} freed")
