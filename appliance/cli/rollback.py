"""`applianctl rollback`: give up what is on trial, or the configuration in force, for the last good one before it."""

from __future__ import annotations

import time

import click

from appliance import client, record, status
from appliance.cli.application import Application
from appliance.errors import UsageError


@click.command()
@click.pass_obj
def rollback(app: Application) -> None:
    """Serve the last good configuration again.

    The configuration file stays as it is: what it asks for is not tried again until it changes, or until
    `applianctl reset`.
    """
    app.become_owner()
    running = status.current(app.service.runtime) is not None
    known = record.load(app.directories.state, keep=running)
    if known.warning:
        click.echo(f"applianctl: warning: {known.warning}", err=True)
    if running:
        if not known.warning and (reason := known.roll_back_refusal()):
            raise UsageError(reason, do="see `applianctl history`")
        client.command(app.agent_socket, "rollback")
        click.echo("rolling back: `applianctl status` shows what is served")
        return
    if reason := known.roll_back(now=time.time()):
        raise UsageError(reason, do="see `applianctl history`")
    assert known.good is not None
    record.check_written(known)
    click.echo(f"rolled back: {known.good.title} is served from the next start")
