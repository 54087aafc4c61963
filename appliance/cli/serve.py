"""`applianctl serve`: the agent, in the foreground or under systemd."""

from __future__ import annotations

import os
import time

import click

from appliance.cli.application import Application
from appliance.settings import Parsed


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
    """Plan, quantize if needed, start and supervise the worker; ready only after it answered. Ctrl-C stops it."""
    from appliance.directories import ensure, from_process
    from appliance.supervisor.agent import Agent
    from appliance.supervisor.journal import Journal
    from appliance.supervisor.notify import Notifier

    flags = {
        "model": None if model == "default" else model, "listen.host": host, "listen.port": port, "context": context,
        "cpu.threads": threads, "memory.ceiling": memory, "compile": compiled,
    }
    notifier = Notifier(os.environ)  # before any child could inherit what it takes out of the environment

    def configure() -> Parsed:
        fresh = Application(env=app.env, config_file=app.config_file)
        fresh.flags.update(flags)
        return fresh.parsed

    # Without the settings: a wrong configuration must still end with a last word where `status` finds it.
    directories = from_process(app.env)
    journal = Journal(ensure(directories.state) / "agent.log", began=time.monotonic(), stamped=not notifier.listening)
    try:
        Agent(configure=configure, directories=directories, env=app.env, notifier=notifier, say=journal.say).run()
    finally:
        journal.close()
