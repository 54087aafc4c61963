"""`applianctl status`: one sentence, then the details; `--wait` blocks until ready, `--watch` keeps looking."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from typing import Any

import click

from appliance.cli.application import Application
from appliance.cli.glance import render
from appliance.errors import NotReachable, TransientError, UsageError

APPEAR_S = 10.0
"""How long `--wait` waits for an agent that has not written its first status yet."""
SETTLE_S = 2.0
"""From then on a unit that is not running is believed: a start that was asked for has begun by now."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The whole status as JSON.")
@click.option("--watch", is_flag=True, help="Show it again every second until Ctrl-C.")
@click.option("--wait", is_flag=True, help="Wait until the service is ready; exits 0 at ready.")
@click.option("--timeout", type=click.FloatRange(min=0), default=1800.0, show_default=True, metavar="SECONDS",
              help="Give up waiting after this time.")
@click.pass_obj
def status(app: Application, as_json: bool, watch: bool, wait: bool, timeout: float) -> None:
    """State in one sentence, then the details. Exits 0 only when ready."""
    from appliance import status as status_file

    if math.isnan(timeout):
        raise UsageError("--timeout nan is not a number of seconds", do="give one")
    if watch:
        watch_status(app, as_json=as_json)
        return
    current = wait_until_ready(app, timeout_s=timeout, say=not as_json) if wait else look(app)
    show(current, as_json=as_json)
    if not status_file.is_ready(current):
        raise click.exceptions.Exit(NotReachable.exit_code)


def look(app: Application) -> dict[str, Any]:
    """The status of the running agent, else what is known of a service that does not run.

    Raises NotReachable when nothing is known at all.
    """
    from appliance import status as status_file
    from appliance import unit

    current = status_file.current(app.service.runtime)
    if current is not None:
        return current
    word = status_file.last_word(app.service.state, app.service.runtime)
    known = status_file.without_agent(word, unit.managing(None, runtime=app.service.runtime, env=app.env))
    return status_file.read(app.service.runtime) if known is None else known


def show(current: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(current, indent=2))
        return
    for line in render(current, now=time.time()):
        click.echo(line)


def wait_until_ready(app: Application, *, timeout_s: float, say: bool) -> dict[str, Any]:
    """Follow the agent until it is ready or has ended, printing each new sentence. Raises TransientError in the end."""
    from appliance import status as status_file

    deadline = time.monotonic() + timeout_s
    appear = min(deadline, time.monotonic() + APPEAR_S)
    settled = time.monotonic() + SETTLE_S
    seen = ""
    while True:
        current = status_file.current(app.service.runtime)
        now = time.monotonic()
        if current is None:
            if now > appear or (now > settled and _given_up(app)):
                return look(app)
            if now > settled:
                settled = now + 1  # systemd is asked once a second
        else:
            appear = min(deadline, now + APPEAR_S)  # systemd may be about to start the next agent
            settled = now + SETTLE_S
            if status_file.is_ready(current) or current["state"] in status_file.ENDED:
                return current
            if status_file.news(current) != seen and say:
                click.echo(status_file.clean(current["sentence"]))
                seen = status_file.news(current)
            if now > deadline:
                raise TransientError(f"not ready after {timeout_s:g} s", why=current["sentence"], do="look again later")
        time.sleep(0.2)


def _given_up(app: Application) -> bool:
    """Whether systemd has the unit and neither runs it nor will start it again."""
    from appliance import unit

    managed = unit.managing(None, runtime=app.service.runtime, env=app.env)
    return managed is not None and not managed.running


def watch_status(app: Application, *, as_json: bool) -> None:
    """Until Ctrl-C: on a terminal the whole status in place, elsewhere one line for each change."""

    terminal = sys.stdout.isatty() and not as_json
    seen = ""
    if terminal:
        sys.stdout.write("\x1b[2J")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            current = _look_or_absent(app)
            now = time.time()
            if terminal:
                size = shutil.get_terminal_size()
                lines = [time.strftime("%H:%M:%S"), *render(current, now=now)][: size.lines - 1]
                # Written in one piece over what stands there, so that nothing flickers.
                sys.stdout.write("\x1b[H" + "".join(f"{line[: size.columns]}\x1b[K\n" for line in lines) + "\x1b[J")
                sys.stdout.flush()
            elif (text := json.dumps(current) if as_json else _change(current)) != seen:
                click.echo(text if as_json else f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}")
                sys.stdout.flush()
                seen = text
            time.sleep(1)


def _change(current: dict[str, Any]) -> str:
    """What must differ for another line: the sentence without ages and other counts, which change by themselves."""
    from appliance import status as status_file

    if status_file.is_ready(current):
        return f"{current.get('state')}: {current.get('model')}"
    return status_file.clean(status_file.news(current))


def _look_or_absent(app: Application) -> dict[str, Any]:
    try:
        return look(app)
    except NotReachable as error:
        return {"state": "stopped", "ready": False, "sentence": error.line}
