"""`applianctl history`: trials, roll-backs, rungs and faults, as the agent's record has them."""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import Any

import click

from appliance import record, status
from appliance.cli.application import Application
from appliance.errors import StoreError


@click.command()
@click.option("-n", "--lines", type=click.IntRange(min=1), default=50, show_default=True, metavar="N",
              help="The latest N entries.")
@click.option("--json", "as_json", is_flag=True, help="The whole record as JSON.")
@click.pass_obj
def history(app: Application, lines: int, as_json: bool) -> None:
    """What was tried, kept, rolled back and stepped down, and the faults, oldest first."""
    known = record.load(app.service.state, keep=True)
    if known.warning:
        closed = os.geteuid() != 0 and not os.access(known.path, os.R_OK)
        raise StoreError("the history cannot be shown", why=known.warning, do="run it with sudo" if closed else
                         "the next start of the service keeps it as record.json.bad and begins a new one")
    if as_json:
        click.echo(json.dumps(shown(known.to_json()), indent=2))
        return
    entries: list[dict[str, Any]] = [  # faults first: at the same moment a fault comes before what was done about it
        *({"at": one.at, "event": "fault", "sentence": f"{one.name}: {one.sentence}"} for one in known.faults),
        *known.history]
    if not entries:
        click.echo("nothing has happened here yet")
    for entry in sorted(entries, key=lambda entry: entry["at"])[-lines:]:
        at = datetime.fromtimestamp(entry["at"]).astimezone().isoformat(" ", "seconds")
        click.echo(f"{at}  {entry['event']:<12}{status.clean(entry['sentence'])}")


def shown(tree: dict[str, Any]) -> dict[str, Any]:
    """The record as it may be seen: of the worker's environment only the names, because a value may be a secret."""
    for candidate in (tree["good"], tree["previous"], (tree["trial"] or {}).get("candidate")):
        if candidate is not None:
            hidden = dict.fromkeys(candidate["settings"].get("worker.env") or {}, "(not shown)")
            candidate["settings"] = {**candidate["settings"], "worker.env": hidden}
    return tree
