"""`applianctl config`: the settings in force and where each comes from."""

from __future__ import annotations

import json
from typing import Any

import click

from appliance.cli.application import Application
from appliance.settings import KEYS, to_dict

PLANNED = ("memory.ceiling", "memory.reserve", "cpu.threads", "cpu.cpus", "cpu.engines", "context", "max_running",
           "dtype", "compile")
"""Keys whose unset value the plan chooses."""


@click.group()
def config() -> None:
    """Show or check the settings in force."""


@config.command("show")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def show_command(app: Application, as_json: bool) -> None:
    """Every key, its value and its source (flag, environment, file, default)."""
    if as_json:
        click.echo(json.dumps({"settings": to_dict(app.settings), "sources": dict(app.parsed.sources)}, indent=2))
        return
    tree = to_dict(app.settings)
    for key in KEYS:
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        shown = ("planned" if key in PLANNED else "-") if value is None else value
        click.echo(f"{key:<24}{shown!s:<24}{app.parsed.sources.get(key, 'default')}")


@config.command()
@click.pass_obj
def check(app: Application) -> None:
    """Read the file and the environment; exits 78 on the first wrong value."""
    if app.settings.bundle_keys is not None:
        from appliance.airgap.signature import read_keys

        read_keys(app.settings.bundle_keys)
    count = len(app.parsed.sources)
    found = "in order" if app.config_path.exists() else "absent, defaults are used"
    click.echo(f"{app.config_path}: {found}; {count} keys set")
