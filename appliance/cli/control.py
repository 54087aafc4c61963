"""`applianctl start|stop|restart|reload|drain`: by systemd where it manages the service, else by the agent's socket.

Rules: `start` clears a start limit that was hit (case 59); what was asked is followed until it is done, each new
sentence on its line, unless `--no-wait`; what this account may not do names sudo.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import click

from appliance import client, status, unit
from appliance.cli.application import Application
from appliance.errors import NotReachable, TransientError, UsageError, by_exit_code
from appliance.identity import alive

waiting = click.option("--wait/--no-wait", "wait", default=True, show_default=True, help="Follow it until it is done.")
limited = click.option("--timeout", type=click.FloatRange(min=0), default=1800.0, show_default=True, metavar="SECONDS",
                       help="Stop following after this time.")


@click.command()
@waiting
@limited
@click.pass_obj
def start(app: Application, wait: bool, timeout: float) -> None:
    """Start the service; clears a start limit that was hit, and ends a drain."""
    running, managed = _service(app)
    if running is not None and running.get("state") == "draining":
        _command(app, "resume")
    elif running is not None:
        click.echo(f"running already: {status.clean(running['sentence'])}")
    elif managed is None:
        raise NotReachable("no systemd unit manages the service here", do="run `applianctl serve` in the foreground")
    else:
        unit.act("start", managed.name, env=app.env)
    if wait:
        _until_ready(app, timeout_s=timeout)


@click.command()
@waiting
@limited
@click.pass_obj
def stop(app: Application, wait: bool, timeout: float) -> None:
    """Stop the service; running requests may finish within `drain_s`."""
    running, managed = _service(app)
    if managed is not None and (managed.running or running is not None):
        unit.act("stop", managed.name, env=app.env)
    elif running is not None:
        _ask_to_stop(app, running)
    else:
        click.echo("not running")
        return
    if wait:
        _until(app, timeout, lambda now: now is None and not _unit_runs(app), "stopped: no agent runs")


@click.command()
@waiting
@limited
@click.pass_obj
def restart(app: Application, wait: bool, timeout: float) -> None:
    """Stop and start again: under systemd agent and worker, else the worker of the running agent."""
    running, managed = _service(app)
    before = running["agent"] if running is not None else None
    began = time.time()
    if managed is not None:
        unit.act("restart", managed.name, env=app.env)
        if before is not None and wait:
            _until(app, timeout, lambda _: not alive(before), "")
    else:
        _command(app, "restart")
        if wait:
            _until(app, min(timeout, 30.0), lambda now: now is None or not status.is_ready(now)
                   or (now.get("ready_at") or 0) > began, "")
    if wait:
        _until_ready(app, timeout_s=timeout)


@click.command()
@click.pass_obj
def reload(app: Application) -> None:
    """Read configuration, keys and certificates again; what needs another worker is put on trial."""
    running, managed = _service(app)
    if running is None:
        raise NotReachable("the service is not running", do="run `applianctl start`")
    if managed is not None and not client.reachable(app.agent_socket):
        unit.act("reload", managed.name, env=app.env)
    else:
        _command(app, "reload")
    click.echo("reload: asked for; `applianctl status` shows what came of it")


@click.command()
@click.option("--resume", is_flag=True, help="Let requests in again.")
@click.option("--wait/--no-wait", "wait", default=True, show_default=True, help="Until no request runs any more.")
@limited
@click.pass_obj
def drain(app: Application, resume: bool, wait: bool, timeout: float) -> None:
    """Let no new request in (503) and let the running ones finish; `--resume` undoes it."""
    _command(app, "resume" if resume else "drain")
    if resume:
        click.echo("resumed: requests are let in")
    elif wait:
        _until(app, timeout, lambda now: now is None or (now.get("state") == "draining" and not now.get("running")
                                                         and not now.get("queued")), "drained: no request runs")
    else:
        click.echo("draining")


def _service(app: Application) -> tuple[dict[str, Any] | None, unit.Unit | None]:
    """The running agent's status, and the unit that manages it or would."""
    running = status.current(app.service.runtime)
    return running, unit.managing(running, runtime=app.service.runtime, env=app.env)


def _command(app: Application, name: str) -> None:
    client.command(app.agent_socket, name)


def _ask_to_stop(app: Application, running: dict[str, Any]) -> None:
    """By the socket; by a signal when nobody listens there any more."""
    try:
        _command(app, "stop")
    except NotReachable as error:
        try:
            if alive(running["agent"]):
                os.kill(running["agent"]["pid"], signal.SIGTERM)
        except PermissionError:
            raise NotReachable("stopping the service is not permitted to this account", why=error.why,
                               do="run `sudo applianctl stop`") from None
        except ProcessLookupError:
            pass


def _until_ready(app: Application, *, timeout_s: float) -> None:
    """Follow the start; ends with the exit code of what went wrong."""
    from appliance.cli.status import wait_until_ready

    current = wait_until_ready(app, timeout_s=_seconds(timeout_s), say=True)
    if status.is_ready(current):
        click.echo(status.clean(current["sentence"]))
        return
    code = current.get("exit_code")
    kind = by_exit_code(code) if isinstance(code, int) else NotReachable
    raise kind("the service did not start", why=str(current["sentence"]))


def _until(app: Application, timeout_s: float, done: Callable[[dict[str, Any] | None], bool], words: str) -> None:
    """Print each new sentence until `done`; then `words`. Raises TransientError when it takes longer."""
    deadline = time.monotonic() + _seconds(timeout_s)
    seen = ""
    while True:
        current = status.current(app.service.runtime)
        if done(current):
            if words:
                click.echo(words)
            return
        if current is not None and status.news(current) != seen:
            seen = status.news(current)
            click.echo(status.clean(current["sentence"]))
        if time.monotonic() > deadline:
            raise TransientError(f"not done after {timeout_s:g} s", why=seen, do="look again later")
        time.sleep(0.2)


def _unit_runs(app: Application) -> bool:
    managed = None
    with contextlib.suppress(NotReachable):
        managed = unit.managing(None, runtime=app.service.runtime, env=app.env)
    return managed is not None and managed.running


def _seconds(value: float) -> float:
    if math.isnan(value):
        raise UsageError("--timeout nan is not a number of seconds", do="give one")
    return value
