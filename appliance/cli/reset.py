"""`applianctl reset`: forget rungs, failed configurations and fault counts, and try all of the plan again."""

from __future__ import annotations

import time

import click

from appliance import client, record, status
from appliance.cli.application import Application


@click.command()
@click.pass_obj
def reset(app: Application) -> None:
    """Forget lowered rungs, configurations that were given up, and faults."""
    app.become_owner()
    if status.current(app.service.runtime) is not None:
        client.command(app.agent_socket, "reset")
        click.echo("reset: forgotten; a waiting service starts at once, a lowered rung is left now")
        return
    known = record.load(app.directories.state)
    if known.warning:
        click.echo(f"applianctl: warning: {known.warning}", err=True)
    known.reset(now=time.time())
    record.check_written(known)
    click.echo("reset: the next start begins with the whole plan")
