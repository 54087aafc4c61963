"""`applianctl status`: one sentence, then the details; `--wait` blocks until ready."""

from __future__ import annotations

import json
import math
import time

import click

from appliance.cli.application import Application
from appliance.errors import NotReachable, TransientError, UsageError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The whole status as JSON.")
@click.option("--wait", is_flag=True, help="Wait until the service is ready; exits 0 at ready.")
@click.option("--timeout", type=click.FloatRange(min=0), default=1800.0, show_default=True, metavar="SECONDS",
              help="Give up waiting after this time.")
@click.pass_obj
def status(app: Application, as_json: bool, wait: bool, timeout: float) -> None:
    """State in one sentence, then the details. Exits 0 only when ready."""
    from appliance import status as status_file

    if math.isnan(timeout):
        raise UsageError("--timeout nan is not a number of seconds", do="give one")
    deadline = time.monotonic() + timeout
    seen = ""
    grace = time.monotonic() + 10  # the agent may be about to write its first status
    while True:
        try:
            current = status_file.read(app.directories.runtime)
        except NotReachable:
            if not wait or time.monotonic() > min(grace, deadline):
                raise
            time.sleep(0.2)
            continue
        grace = 0.0
        if not wait or current["state"] in ("ready", "failed", "stopped"):
            break
        if current["sentence"] != seen and not as_json:
            click.echo(current["sentence"])
            seen = current["sentence"]
        if time.monotonic() > deadline:
            raise TransientError(f"not ready after {timeout:g} s", why=current["sentence"], do="look again later")
        time.sleep(0.5)
    if as_json:
        click.echo(json.dumps(current, indent=2))
    else:
        for line in status_file.render(current, now=time.time()):
            click.echo(line)
    if current["state"] != "ready":
        raise click.exceptions.Exit(NotReachable.exit_code)
