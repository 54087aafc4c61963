"""`applianctl apply`: put a changed configuration or another model into force - checked first, then on trial.

    check    the new settings are read, the model is in the store, and this node can plan for it
    show     old -> new, key by key, of what was not refused
    stage    the configuration file is replaced (the one before is kept in state/history), or the model in use is set
    tell     a running agent reads it again; what needs another worker goes on trial, and back if it fails

Rules: nothing is written before everything was checked; a key that the environment fixes is refused with the variable's
name; the configuration file stays its owner's, everything else becomes the service's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from appliance import client, configfile, disk, library, record, settings, status, trial
from appliance.cli.application import Application
from appliance.directories import Directories, ensure, from_process
from appliance.errors import (
    ApplianceError,
    ConfigError,
    StoreError,
    TransientError,
    UsageError,
    by_exit_code,
)
from appliance.settings import DEFAULT_MODEL, KEYS, Parsed
from appliance.store import Store

KEPT = 20
"""Earlier configuration files in state/history."""
AT_START = ("listen.host", "listen.port", "store")
"""What a reload cannot change in a running agent; nor can TLS be switched on or off."""
NEXT_START = "the next start of the agent (`systemctl restart appliance`, or a new `serve`)"
"""`applianctl restart` is not said here: without systemd it starts another worker, not another agent."""
SECRET = ("worker.env", "worker.extra_args")
"""Values that may hold a secret are not printed."""
NOT_TAKEN = "the configuration is not taken"
"""How the agent's warning begins after a reload that it refused."""


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="Serve this stored model.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
              help="Change one key; may be repeated. `KEY=` takes it out of the file.")
@click.option("--dry-run", is_flag=True, help="Check and show; change nothing.")
@click.option("--wait", is_flag=True, help="Follow the trial until it is kept, rolled back or failed.")
@click.option("--timeout", type=click.FloatRange(min=0), default=3600.0, show_default=True, metavar="SECONDS",
              help="Stop following after this time.")
@click.pass_obj
def apply(app: Application, file: Path | None, model: str | None, assignments: tuple[str, ...], dry_run: bool,
          wait: bool, timeout: float) -> None:
    """Check, show and put into force a configuration FILE, single keys or another model.

    A running service takes it at once: what needs another worker is on trial, and the last good configuration comes
    back by itself if it fails.
    """
    if file is None and model is None and not assignments:
        raise UsageError("there is nothing to apply", do="give FILE, --model or --set")
    if model is not None and not model.strip():
        raise UsageError("--model names no model", do="give the name of a stored one, or leave --model out")
    change = prepare(app, file=file, model=model, assignments=_assignments(assignments))
    if not change.lines:
        click.echo("nothing to change: this is what the settings say already")
        return
    check(app, change)  # what is refused is not shown as a change first
    for line in change.lines:
        click.echo(line)
    if dry_run:
        click.echo("checked; nothing was changed (--dry-run)")
        return
    running = put(app, change)
    if wait and running is not None:
        follow(app, running, timeout_s=timeout)


@dataclass(frozen=True, kw_only=True)
class Change:
    """`was`: the configuration file as it was read; `text`: the new one, None where it stays; `model`: the new model in
    use, None where that stays;
    `name`: the model that will be served; `lines`: what changes, for people."""

    old: Parsed
    new: Parsed
    text: str | None
    model: str | None
    was: str
    name: str
    lines: tuple[str, ...]


def prepare(app: Application, *, file: Path | None = None, model: str | None = None,
            assignments: Mapping[str, Any] | None = None) -> Change:
    """Read everything, write nothing. Raises ConfigError and UsageError for what is wrong with the wish itself."""
    changes, old = dict(assignments or {}), app.parsed
    for key in (*changes, *(["model"] if model else [])):
        if old.sources.get(key) == settings.env_name(key):
            raise ConfigError(f"{key} cannot be changed here", why=f"the variable {settings.env_name(key)} sets it",
                              do="change the variable where the service gets it")
    was = configfile.read(app.config_path)
    text = was if file is None else _read_file(file)
    fixed_in_file = "model" in settings.parse(text, origin=str(file or app.config_path)).sources
    if model and (fixed_in_file or "model" in changes):
        changes["model"] = model
    new_text = configfile.edited(text, changes, origin=str(file or app.config_path)) if changes else text
    new = settings.overlay(settings.parse(new_text, origin=str(app.config_path)), env=app.env, flags={})
    for warning in new.warnings:
        click.echo(f"applianctl: warning: {warning}", err=True)
    used = model if model and "model" not in changes else None
    before = library.active_name(old, app.directories)
    name = used or library.active_name(new, app.directories)
    lines = [f"{key}: {_shown(old, key)} -> {_shown(new, key)}" if key not in SECRET else f"{key}: changed"
             for key in KEYS if key != "model" and settings.get(old.settings, key) != settings.get(new.settings, key)]
    if name != before:
        lines.insert(0, f"model: {before} -> {name}")
    elif model and (served := _served_before(app, name)):
        lines.insert(0, f"model: {name} ({served[:12]}) -> what {name} stands for now")
    same_file = new_text == was
    if not lines and not same_file:
        lines = [f"{app.config_path}: other words, the same settings"]
    return Change(old=old, new=new, text=None if same_file else new_text, model=used, was=was,
                  name=name, lines=tuple(lines))


def check(app: Application, change: Change) -> None:
    """Whether this node can serve it. Raises what is wrong; a missing worker is a warning, it may come later."""
    from appliance.jobs import find_worker_python

    places = from_process(app.env, store=change.new.settings.store)
    store = Store(places.store)
    stored = change.name in store.names()
    # The default that was in use before is the next start's business: its package may come later, like the worker.
    if not stored and not change.name == DEFAULT_MODEL == library.active_name(change.old, app.directories):
        library.check_possible(change.name, store=store, env=app.env)
    try:
        python = find_worker_python(change.new.settings)
    except ConfigError as error:
        if change.new.settings.worker.python is not None:
            raise
        click.echo(f"applianctl: warning: not checked against this node: {error.line}", err=True)
        return
    if stored:
        from appliance.node import read_wanted

        known, digest = record.load(app.directories.state, keep=True), store.pointed(change.name)
        node, _ = read_wanted(
            change.new, places, python, env=app.env, model_name=change.name, digest=digest, refused=known.refused,
            good=known.good.figures if known.good is not None and known.good.digest == digest else {})
        if refusal := node.plan.refused:
            raise refusal.error()
        wanted = _wanted_id(app, change, python, node.plan.tuned)
        given_up = known.failed.get(wanted)
        if given_up is not None:
            raise ConfigError("this configuration was given up before", why=given_up,
                              do="run `applianctl reset` to have it tried again")


def put(app: Application, change: Change) -> Mapping[str, Any] | None:
    """Stage it and tell a running agent; its status before that, None where none runs. From here on this process is the
    service's account, where it was root."""
    before = configfile.read(app.config_path) if change.text is not None and app.config_path.exists() else None
    places = app.directories
    if change.text is not None:
        app.config_path.parent.mkdir(parents=True, exist_ok=True)
        with disk.locked(app.config_path.parent):  # of two at once the second sees the first one's file
            if configfile.read(app.config_path) != change.was:
                raise TransientError(f"{app.config_path} was changed meanwhile", why="somebody else edits it too",
                                     do="run the command again")
            configfile.write(app.config_path, change.text)
    app.become_owner()
    if before is not None:
        _keep(places, before)
    if change.model is not None:
        library.use(change.model, store=Store(places.store), directories=places, env=app.env)
    running = status.current(app.service.runtime)
    if running is None:
        click.echo("the service is not running: this counts at its next start")
        return None
    client.command(app.agent_socket, "reload")
    click.echo("the running service takes it now; `applianctl status` shows its trial")
    late = [key for key in AT_START if settings.get(change.old.settings, key) != settings.get(change.new.settings, key)]
    if (change.old.settings.tls.cert is None) != (change.new.settings.tls.cert is None):
        late.append("tls")
    if late:
        click.echo(f"{', '.join(late)}: from {NEXT_START}")
    return running


def follow(app: Application, before: Mapping[str, Any], *, timeout_s: float, figures: bool = False) -> None:
    """Print each new sentence until the change is kept. Raises what it was refused, rolled back or ended for.

    `before`: the status before the agent was told; the agent stamps each reload that it has acted on. `figures`: the
    change is what this node has measured.
    """
    seen, deadline = "", time.monotonic() + timeout_s
    while True:
        current = status.current(app.service.runtime)
        if current is None or (current["state"] in status.ENDED and current.get("exit_code") is not None):
            word = current or status.last_word(app.service.state, app.service.runtime) or {}
            raise by_exit_code(word.get("exit_code") or TransientError.exit_code)(
                "the service ended", why=str(word.get("sentence", "")), do="run `applianctl status`")
        taken = current.get("reloaded_at") not in (None, before.get("reloaded_at"))
        if taken and status.news(current) != seen:
            seen = status.news(current)
            click.echo(status.clean(current["sentence"]))
        if taken and (refused := [text for text in current.get("warnings", ()) if text.startswith(NOT_TAKEN)]):
            raise ConfigError(refused[0])
        gave_up = current.get("rolled_back") or (figures and current.get("figures_given_up"))
        if taken and status.is_ready(current) and gave_up:
            raise ConfigError("rolled back", why=str(gave_up), do="see `applianctl history`")
        if taken and status.is_ready(current) and current.get("trial") is None:
            click.echo("kept")
            return
        if time.monotonic() > deadline:
            raise TransientError(f"not decided after {timeout_s:g} s", why=seen, do="look again later")
        time.sleep(0.2)


def _served_before(app: Application, name: str) -> str:
    """The digest that a running service serves under this name, where the name stands for another one by now; else
    empty."""
    running = status.current(app.service.runtime) or {}
    now = Store(app.directories.store).names().get(name, "")
    served = str(running.get("digest") or "")
    return served if running.get("model") == name and now and served != now else ""


def _wanted_id(app: Application, change: Change, python: str, figures: Mapping[str, Any]) -> str:
    """What the agent will call this candidate, unless flags of its own command line win."""
    from appliance.jobs import worker_contract

    said = worker_contract(python, env=app.env)["versions"]
    return trial.candidate(
        model=change.name, digest=Store(app.directories.store).pointed(change.name), worker_python=python,
        settings=trial.worker_settings(change.new.settings), figures=figures,
        versions={name: str(version) for name, version in said.items() if version}).id


def _keep(places: Directories, text: str) -> None:
    """Keep the configuration file as it was; a full disk costs this copy, not the change."""
    folder = places.state / "history"
    name = f"{datetime.now(UTC):%Y-%m-%dT%H%M%S.%fZ}.yaml"
    try:
        ensure(folder, mode=0o700)
        (folder / name).write_text(text, encoding="utf-8")
        for old in sorted(folder.glob("*.yaml"))[:-KEPT]:
            old.unlink()
    except (OSError, StoreError) as error:
        why = error.why if isinstance(error, ApplianceError) else error.strerror
        click.echo(f"applianctl: warning: the configuration before could not be kept: {why}", err=True)
        return
    click.echo(f"the configuration before is kept as {folder / name}")


def _read_file(file: Path) -> str:
    try:
        return configfile.text_of(file)
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist", do="give a configuration file") from None


def _assignments(words: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"{word!r} is not KEY=VALUE", do="see `applianctl config show` for the keys")
        if key not in KEYS:
            raise UsageError(f"there is no setting `{key}`", do="see `applianctl config show`")
        found[key] = configfile.value_of(key, value) if value else None
    return found


def _shown(parsed: Parsed, key: str) -> str:
    value = settings.get(parsed.settings, key)
    return "default" if value is None else str(list(value) if isinstance(value, tuple) else value)
