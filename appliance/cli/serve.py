"""`applianctl serve`: the service in the foreground."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

import click

from appliance.cli.application import Application
from appliance.errors import ApplianceError, ConfigError
from appliance.settings import Settings


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
        # A service does not end because nobody reads: its state is in the status file and the worker's log.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.write(f"[{time.monotonic() - began:6.1f} s] {sentence}\n")
            sys.stdout.flush()

    key = read_key(app.settings.api_key_file)
    check_tls(app.settings)
    service = Service(app.parsed, app.directories, python, env=app.env, say=say, key=key)
    service.run(lambda: obtain(app, python, say))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter's last flush would change the exit code


def check_tls(settings: Settings) -> None:
    """Raise ConfigError when a certificate or key file cannot be read, before a model is loaded for nothing."""
    for name, path in (("tls.cert", settings.tls.cert), ("tls.key", settings.tls.key)):
        if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):  # noqa: PTH113
            raise ConfigError(f"{name} cannot be used", why=f"{path} is not a file that this account may read",
                              do=f"correct {name}")


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
        prepare(app, name, stored.digest, python, say)
        return name
    say(f"model {name}: not in the store yet, quantizing it to 4 bits")
    with Progress() as on_event:
        added = add_model(name, name=name, recipe=Recipe(), store=store, directories=app.directories,
                          worker_python=lambda: python, on_event=on_event, env=app.env, now=time.time(),
                          worker_env=app.settings.worker.env)
    say(f"model {name}: {'cache used' if added.cached else 'quantized'} in {added.seconds:.0f} s ({added.digest[:12]})")
    prepare(app, name, added.digest, python, say)
    return name


def prepare(app: Application, name: str, digest: str, python: str, say: Callable[[str], None]) -> None:
    """Make sure that the worker can map the model's weights; without that it packs them in memory, and we say so."""
    from appliance.cli.progress import Progress
    from appliance.library import prepare_model
    from appliance.store import Store

    store = Store(app.directories.store)
    there = store.prepared(digest) is not None
    began = time.monotonic()
    try:
        with Progress() as on_event:
            found = prepare_model(digest, kernel=app.settings.kernel, store=store, worker_python=lambda: python,
                                  on_event=on_event, env=app.env, worker_env=app.settings.worker.env)
    except ApplianceError as error:
        say(f"model {name}: its weights cannot be laid out ({error.line}); the worker packs them in memory")
        return
    if found and not there:
        say(f"model {name}: weights laid out for the kernels in {time.monotonic() - began:.0f} s")
