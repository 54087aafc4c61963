"""`applianctl model add`: quantize a source and store it, or say beforehand what that would mean."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import click

from appliance import library
from appliance.budget import show as show_size
from appliance.cli.application import Application
from appliance.errors import ApplianceError, ModelError, UsageError
from appliance.facts import ModelFacts
from appliance.hub.reference import is_hub
from appliance.jobs import Event
from appliance.quantize.format import GRIDS
from appliance.store import Store

_application = click.make_pass_decorator(Application)
MAX_TEMPLATE = 96 << 10
"""Bytes as JSON; those of real models have up to 20 KB, and an argument of a program, which it becomes, at most 128."""


@click.command()
@click.argument("source")
@click.option("--name", help="Name in the store (default: made from SOURCE).")
@click.option("--group-size", type=click.Choice(["32", "64", "128", "256"]),
              help="Weights per scale (default: by the model's size).")
@click.option("--table-bits", type=click.Choice(["4", "8", "16"]),
              help="Bits of the embedding table and head (default: by the model's size).")
@click.option("--grid", type=click.Choice(GRIDS),
              help="How codes are chosen (default: calibrated for small models, search for others).")
@click.option("--chat-template", type=click.File(encoding="utf-8"), metavar="FILE",
              help="A Jinja file that takes the place of the model's chat template; it is tried first.")
@click.option("--ignore", multiple=True, metavar="MODULE", help="Keep this layer in bf16; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Say what it would mean: bytes, memory, fits or not. Nothing is stored.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
@click.option("--limit-rate", metavar="SIZE", help="Fetch at most so much a second, such as 2M.")
@click.option("--keep-source", is_flag=True, help="Keep the files that were fetched from the Hub.")
@click.option("--force", is_flag=True, help="Fetch it even if this node cannot serve it.")
@_application
def add(
    app: Application, source: str, name: str | None, group_size: str | None, table_bits: str | None, grid: str | None,
    chat_template: TextIO | None, ignore: tuple[str, ...], dry_run: bool, as_json: bool, limit_rate: str | None,
    keep_source: bool, force: bool,
) -> None:
    """Quantize SOURCE to 4 bits and store it.

    SOURCE is `smollm2` (the embedded default), a GGUF file, a Hugging Face folder with safetensors files, or a model of
    the Hub: `hf:org/name[@revision]`, for GGUF files `hf:org/name[@revision]:Q8_0` or `:FILE.gguf`.
    """
    from appliance.cli.progress import Progress

    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run.")
    app.flags["hub.limit_rate"] = limit_rate
    group = int(group_size) if group_size else None
    recipe = library.Recipe(grid=grid, group_size=group, table_bits=int(table_bits) if table_bits else None,
                            ignore=ignore, chat_template=_template(chat_template))
    store = Store(app.directories.store)
    with Progress() as progress:
        if is_hub(source):
            delivery = hub_delivery(app, store, progress)
            if dry_run:
                verdict = delivery.judge(source, name=name, recipe=recipe)
            else:
                added = _fetch(lambda: delivery.add(source, name=name, recipe=recipe, keep_source=keep_source,
                                                    even_so=force, now=time.time()))
        else:
            _check_readable(app, source)
            if dry_run:
                verdict = _judge_local(app, store, source, name, recipe, progress)
            else:
                added = library.add_model(
                    source, name=name, recipe=recipe, store=store, directories=app.directories,
                    worker_python=app.worker_python, on_event=progress, env=app.env, now=time.time(),
                    worker_env=app.settings.worker.env,
                )
        reason = None if dry_run else lay_out(app, store, added.digest, progress)
    if dry_run:
        click.echo(json.dumps(verdict.to_json(), indent=2) if as_json else "\n".join(render(verdict)))
        if verdict.refusals:
            raise verdict.refusals[0]
        return
    if reason:
        click.echo(f"applianctl: warning: the weights are not laid out yet ({reason}); `serve` tries again", err=True)
    if added.cached:
        click.echo(f"{added.name}: in the store already, nothing to do ({added.seconds:.1f} s)")
        return
    stored = store.read(added.digest)
    report = stored.manifest["report"]
    click.echo(f"{added.name}: stored, {show_size(stored.bytes)}, {bits(report)} bits per weight, "
               f"group {group_text(report)}, {added.seconds:.1f} s")
    if not report.get("chat", True):
        fault = (report.get("template") or {}).get("fault")
        click.echo("applianctl: warning: " + (f"its chat template cannot be used ({fault})" if fault else
                   "it has no chat template") + "; completions work, chat needs --chat-template FILE", err=True)


def render(verdict: Any) -> Iterator[str]:
    """The verdict for people."""
    facts, plan = verdict.facts, verdict.plan
    yield f"{'source':<15}{verdict.source}"
    for name, size in sorted(verdict.files.items(), key=lambda item: -item[1])[:8]:
        yield f"{'':<15}{show_size(size):>10}  {name}"
    if len(verdict.files) > 8:
        yield f"{'':<15}and {len(verdict.files) - 8} more"
    yield f"{'to read':<15}{show_size(sum(verdict.files.values()))}, {show_size(verdict.fetch_bytes)} of it to fetch"
    yield (f"{'to store':<15}{show_size(verdict.stored_bytes)}"
           + (f", and {show_size(verdict.layout_bytes)} for the kernels' layout" if verdict.layout_bytes else ""))
    yield f"{'disk':<15}{show_size(verdict.needed_bytes)} at most, {show_size(verdict.free_bytes)} free"
    if facts is not None:
        yield (f"{'architecture':<15}{facts.architecture}, {count(facts.parameters)} weights of "
               f"{facts.bits_per_weight:.2f} bits")
    if plan is not None and plan.rungs:
        yield (f"{'memory':<15}peak {show_size(plan.peak_bytes)} ({plan.peak_phase}) of "
               f"{show_size(plan.usable_bytes or 0)} usable, with {plan.full.context} tokens of context")
    for warning in verdict.warnings:
        yield f"{'warning':<15}{warning}"
    yield f"{'verdict':<15}{'it cannot be served here' if verdict.refusals else 'it fits'}"


def bits(report: dict[str, Any]) -> str:
    return str(report.get("bits_per_weight", "?"))


def group_text(report: dict[str, Any]) -> str:
    other = len(report.get("group_size_overrides") or {})
    return f"{report.get('group_size', '?')}" + (f" ({other} layers smaller)" if other else "")


def count(number: int | None) -> str:
    if number is None:
        return "?"
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _template(file: TextIO | None) -> str:
    """The text of the template's file. Raises UsageError when it cannot be one."""
    try:
        text = file.read(MAX_TEMPLATE + 1) if file else None
    except (OSError, ValueError) as error:
        raise UsageError("the chat template cannot be read", why=str(error)) from None
    if text is not None and not (text and len(json.dumps(text)) <= MAX_TEMPLATE):
        raise UsageError("the chat template cannot be used",
                         why=f"it is empty, or longer than {MAX_TEMPLATE} bytes as a text in JSON")
    return text or ""


def _check_readable(app: Application, source: str) -> None:
    if not source:
        raise ModelError("no source was given", do="give the path of a GGUF file or of a Hugging Face folder")
    there = os.path.exists(source)  # noqa: PTH110  # no error for a path that is too long: inspect says so
    app.become_owner()
    if there and not os.access(source, os.R_OK):
        raise ModelError(f"{source} cannot be read", why=f"models are added as the store's owner, user {os.geteuid()}",
                         do="let that user read it, or put it below /var/tmp")


def hub_delivery(app: Application, store: Store, on_event: Callable[[Event], None]) -> Any:
    """What fetching takes. Called while this is still root, where it is: the token may be root's alone. Becomes the
    store's owner."""
    from appliance.delivery import Delivery
    from appliance.hub.access import read_access

    access = read_access(app.settings, app.env)
    app.become_owner()
    return Delivery(access=access, store=store, directories=app.directories, worker_python=app.worker_python,
                    env=app.env, on_event=on_event, planner=_planner(app), layout=_layout(app),
                    worker_env=app.settings.worker.env)


def _planner(app: Application) -> Callable[[ModelFacts], Any]:
    from appliance.node import plan_unmade

    return lambda facts: plan_unmade(facts, app.parsed, app.directories, app.worker_python(), env=app.env)


def _layout(app: Application) -> bool:
    """Whether a prepared layout will be made beside the model."""
    from appliance.jobs import worker_contract

    if app.settings.kernel not in ("auto", library.NATIVE):
        return False
    return library.NATIVE in worker_contract(app.worker_python(), env=app.env)["kernels"]


def _judge_local(app: Application, store: Store, source: str, name: str | None, recipe: library.Recipe,
                 on_event: Callable[[Event], None]) -> Any:
    from appliance import verdict
    from appliance.directories import ensure
    from appliance.importing.source import inspect

    found = inspect(library.resolve(source, env=app.env))
    ensure(store.root)
    with store.begin(f"survey-{secrets.token_hex(8)}") as draft:
        outlined = verdict.outline(found, draft, recipe.to_dict(), worker_python=app.worker_python(), env=app.env,
                                   on_event=on_event, worker_env=app.settings.worker.env)
        return verdict.judge(
            outlined, source=source, name=name or library.default_name(source), fetch_bytes=0, store=store,
            files={file.name: file.stat().st_size for file in found.files}, planner=_planner(app), layout=_layout(app))


def _fetch(work: Callable[[], library.Added]) -> library.Added:
    try:
        return work()
    except KeyboardInterrupt:
        click.echo("applianctl: what has come is kept; the same command goes on from there", err=True)
        raise


def lay_out(app: Application, store: Store, digest: str, on_event: Callable[[Event], None]) -> str | None:
    """Lay the weights out for the kernels; what went wrong, or None. The model itself is stored in either case."""
    try:
        library.prepare_model(digest, kernel=app.settings.kernel, store=store, worker_python=app.worker_python,
                              on_event=on_event, env=app.env, worker_env=app.settings.worker.env)
    except ApplianceError as error:
        return error.line
    return None
