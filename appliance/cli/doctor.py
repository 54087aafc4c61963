"""`applianctl doctor`: what is wrong here, why, and what to do; exits with the code of the gravest error."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable

import click

from appliance.cli.application import Application
from appliance.directories import Directories
from appliance.doctor import ERROR, LEVELS, Finding
from appliance.errors import ApplianceError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--deep", is_flag=True, help="Also check the kernels against their reference and generate a few tokens.")
@click.pass_obj
def doctor(app: Application, as_json: bool, deep: bool) -> None:
    """Look for what is wrong with this node; prints nothing to mend when all is well."""
    from appliance.doctor import exit_code

    found = examine(app, deep=deep)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    else:
        click.echo(render(found))
    if code := exit_code(found):
        raise click.exceptions.Exit(code)


def examine(app: Application, *, deep: bool = False) -> list[Finding]:
    """All findings, gravest level first."""
    from appliance import checkup
    from appliance.doctor import findings

    case = checkup.patient(places(app), app.read_settings, env=app.env, now=time.time())
    found = list(findings(checkup.examine(case, deep=deep)))
    unread = unreadable_config(app)
    found = [one for one in found if not (unread and one.id == "config-wrong")]
    return sorted([*found, *unread], key=lambda one: LEVELS.index(one.level))


def places(app: Application) -> Directories:
    """The service's folders; the store's may be set in the configuration, which may be broken."""
    try:
        store = app.read_settings().settings.store
    except ApplianceError:
        store = None
    return dataclasses.replace(app.service, store=app.service.store if store is None else app.directories.store)


def unreadable_config(app: Application) -> list[Finding]:
    """A configuration that this account may not read is no fault of the configuration."""
    if not app.settings_closed:
        return []
    return [Finding(id="config-not-seen", level="info", what=f"{app.config_path} was not looked at",
                    why="this account may not read it", do="run it again with sudo")]


def render(found: Iterable[Finding]) -> str:
    """One paragraph for each finding; one line when there is none."""
    found = list(found)
    if not found:
        return "nothing to mend"
    lines = []
    for one in found:
        lines += [f"{one.level}: {one.what}  [{one.id}]"]
        lines += [f"  why  {one.why}"] if one.why else []
        lines += [f"  do   {one.do}"] if one.do else []
    errors = sum(one.level == ERROR for one in found)
    return "\n".join([*lines, "", f"{errors} errors, {len(found) - errors} other findings"])
