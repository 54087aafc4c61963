"""`applianctl support-bundle`: one file with everything for a report, and nothing that is secret or private."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from appliance import bundle as bundles
from appliance import status, unit
from appliance.budget import show
from appliance.bundle import Member, json_member
from appliance.cli.application import Application
from appliance.cli.doctor import examine, places
from appliance.errors import ApplianceError
from appliance.scrub import Scrubber
from appliance.settings import Parsed, Settings, to_dict


@click.command("support-bundle")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.pass_obj
def bundle(app: Application, file: Path | None) -> None:
    """Write FILE (default: in this folder, named by host and time) with status, doctor, plan, logs and limits."""
    from appliance import __version__

    now = time.time()
    parsed = _parsed(app)
    scrub = bundles.scrubber(parsed.settings if parsed else Settings(), env=app.env, state=app.service.state)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.localtime(now))
    path = file or Path(f"appliance-support-{_host_name()}-{stamp}.tar.gz")
    written = bundles.write(path, members(app, parsed, scrub, now=now), now=now, version=__version__)
    for member in written.members:
        click.echo(f"  {member.name}")
    for name in written.left_out:
        click.echo(f"applianctl: warning: {name} was left out, it is too large", err=True)
    click.echo(f"{written.path}: {show(written.bytes)}, without keys, prompts and weights. Look before you send it.")


def members(app: Application, parsed: Parsed | None, scrub: Scrubber, *, now: float) -> Iterator[Member]:
    """Everything that goes in, one after the other; each that fails says so in its place."""
    running = status.current(app.service.runtime)
    managed = unit.managing(running, runtime=app.service.runtime, env=app.env)
    yield json_member("status.json", lambda: running or status.without_agent(
        status.last_word(app.service.state, app.service.runtime), managed) or {}, scrub)
    yield json_member("record.json", lambda: status.record(app.service.state), scrub)
    yield json_member("doctor.json", lambda: [dataclasses.asdict(one) for one in examine(app)], scrub)
    yield json_member("settings.json", lambda: _settings(app), scrub)
    yield json_member("probe.json", lambda: _probe(app), scrub)
    yield json_member("plan.json", lambda: _plan(app), scrub)
    yield json_member("versions.json", lambda: _versions(app), scrub)
    yield json_member("models.json", lambda: _models(app), scrub)
    yield json_member("disks.json", lambda: _disks(app), scrub)
    yield from bundles.log_members(app.service.state, scrub)
    yield from bundles.unit_members(managed, scrub)
    agent = running.get("agent") if running else None
    yield from bundles.host_members(agent.get("pid") if isinstance(agent, dict) else None, scrub)


def _parsed(app: Application) -> Parsed | None:
    try:
        return app.read_settings()
    except ApplianceError:
        return None


def _settings(app: Application) -> dict[str, Any]:
    parsed = app.read_settings()
    tree = to_dict(parsed.settings)
    tree["worker.env"] = tree["worker"].pop("env")  # by this name the scrubber knows it
    return {"file": str(app.config_path), "settings": tree, "sources": dict(parsed.sources),
            "warnings": list(parsed.warnings)}


def _probe(app: Application) -> Any:
    from appliance.facts import to_json
    from appliance.probe.host import read_host

    host = read_host("/", store=places(app).store, versions=app.versions())
    return {**to_json(host), "fingerprint": host.fingerprint}


def _plan(app: Application) -> Any:
    from appliance.facts import to_json
    from appliance.node import read_node

    return to_json(read_node(app.read_settings(), places(app), app.worker_python(), env=app.env).plan)


def _versions(app: Application) -> dict[str, Any]:
    import platform

    from appliance import __version__
    from appliance.jobs import worker_contract

    try:
        worker: Any = worker_contract(app.worker_python(), env=app.env)
    except ApplianceError as error:
        worker = error.line
    return {"appliance": __version__, "python": platform.python_version(), "kernel": platform.release(),
            "worker": worker}


def _models(app: Application) -> dict[str, Any]:
    from appliance.store import Store

    store = Store(places(app).store)
    found: dict[str, Any] = {}
    for name, digest in store.names().items():
        try:
            stored = store.get(name)
            found[name] = {"digest": digest, "bytes": stored.bytes, "manifest": stored.manifest,
                           "prepared": store.prepared_finding(digest) or "whole"}
        except ApplianceError as error:
            found[name] = {"digest": digest, "damaged": error.line}
    return found


def _disks(app: Application) -> dict[str, Any]:
    found = {}
    for name, folder in dataclasses.asdict(places(app)).items():
        try:
            usage = shutil.disk_usage(folder)
            found[name] = {"path": str(folder), "total": usage.total, "free": usage.free}
        except OSError as error:
            found[name] = {"path": str(folder), "problem": error.strerror}
    return found


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", os.uname().nodename)[:40] or "host"
