"""`applianctl serve`: the service in the foreground."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from appliance.cli.application import Application


@click.command()
@click.option("--model", metavar="NAME", help="A stored model, or the embedded default (default: the one in use).")
@click.option("--host", metavar="ADDRESS", help="Address to listen on (default 127.0.0.1).")
@click.option("--port", metavar="PORT", help="Port to listen on (default 8000).")
@click.option("--context", metavar="TOKENS", help="Wanted context length.")
@click.option("--threads", metavar="N", help="Worker threads.")
@click.option("--memory", metavar="SIZE", help="Memory ceiling, such as 4G; the node's own ceiling still holds.")
@click.option("--compile/--no-compile", "compiled", default=None, help="Use torch.compile (default: planned).")
@click.pass_obj
def serve(app: Application, model: str | None, host: str | None, port: str | None, context: str | None,
          threads: str | None, memory: str | None, compiled: bool | None) -> None:
    """Plan, quantize if needed, start the worker, and say ready only after it answered. Ctrl-C stops it."""
    from appliance.cli.chat import read_key
    from appliance.supervisor.service import Service

    app.flags.update({
        "model": None if model == "default" else model, "listen.host": host, "listen.port": port, "context": context,
        "cpu.threads": threads, "memory.ceiling": memory, "compile": compiled,
    })
    python = app.worker_python()
    began = time.monotonic()

    def say(sentence: str) -> None:
        click.echo(f"[{time.monotonic() - began:6.1f} s] {sentence}")
        sys.stdout.flush()

    key = read_key(app.settings.api_key_file)
    service = Service(app.parsed, app.directories, python, env=app.env, say=say, key=key)
    service.run(lambda: obtain(app, python, say))


def obtain(app: Application, python: str, say: Callable[[str], None]) -> str:
    """The name of the model to serve; the embedded default is added to the store when it is not there yet."""
    from appliance.cli.progress import Progress
    from appliance.library import Recipe, active_name, add_model
    from appliance.settings import DEFAULT_MODEL
    from appliance.store import Store

    name = active_name(app.parsed, app.directories)
    store = Store(app.directories.store)
    if name in store.names() or name != DEFAULT_MODEL:
        stored = store.get(name)
        say(f"model {name}: cache used ({stored.digest[:12]}), nothing to quantize")
        return name
    say(f"model {name}: not in the store yet, quantizing it to 4 bits")
    with Progress() as on_event:
        added = add_model(name, name=name, recipe=Recipe(), store=store, directories=app.directories,
                          worker_python=lambda: python, on_event=on_event, env=app.env, now=time.time(),
                          worker_env=app.settings.worker.env)
    say(f"model {name}: {'cache used' if added.cached else 'quantized'} in {added.seconds:.0f} s ({added.digest[:12]})")
    return name
