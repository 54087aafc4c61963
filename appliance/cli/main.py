"""`applianctl`: the command group. Commands load when they are called, so `--help` stays quick.

This is the only place where an ApplianceError becomes a line on standard error and an exit code.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

import click

from appliance.errors import ApplianceError, NotReachable, StoreError

SECTIONS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    ("Serve", (
        ("serve", "appliance.cli.serve:serve", "Plan, quantize if needed, start the worker, say when it answers."),
        ("status", "appliance.cli.status:status", "State in one sentence, then the details."),
        ("logs", "appliance.cli.logs:logs", "The agent's log, the worker's, or the journal."),
        ("start", "appliance.cli.control:start", "Start the service by systemd."),
        ("stop", "appliance.cli.control:stop", "Stop it; running requests finish first."),
        ("restart", "appliance.cli.control:restart", "Stop and start again."),
        ("reload", "appliance.cli.control:reload", "Read configuration, keys and certificates again."),
        ("drain", "appliance.cli.control:drain", "Let no new request in; --resume undoes it."),
        ("chat", "appliance.cli.chat:chat", "Ask the running model."),
    )),
    ("Models", (
        ("model", "appliance.cli.model:model", "Add, list, show, verify, repair, use and remove models."),
        ("store", "appliance.cli.store:store", "What the store holds and why; clean it."),
        ("bundle", "appliance.cli.airgap:bundle", "A model as one file, for nodes without a network."),
        ("eval", "appliance.cli.eval:evaluate", "Perplexity of a model, alone and against its source."),
    )),
    ("This machine", (
        ("doctor", "appliance.cli.doctor:doctor", "What is wrong here, why, and what to do."),
        ("support-bundle", "appliance.cli.bundle:bundle", "Everything for a report in one file, without secrets."),
        ("probe", "appliance.cli.probe:probe", "CPU, cores, memory ceiling and software, as facts."),
        ("plan", "appliance.cli.plan:plan", "What would be served and why, byte by byte."),
        ("tune", "appliance.cli.tune:tune", "Measure what the plan cannot know; show, compare, draw."),
        ("bench", "appliance.cli.bench:bench", "How fast the running service is, against its memory."),
    )),
    ("Settings", (
        ("config", "appliance.cli.config:config", "Show or check the settings in force."),
        ("apply", "appliance.cli.apply:apply", "Check and put into force a file, single keys or another model."),
        ("rollback", "appliance.cli.rollback:rollback", "Serve the last good configuration again."),
        ("history", "appliance.cli.history:history", "What was tried, kept, rolled back, and the faults."),
        ("reset", "appliance.cli.reset:reset", "Forget lowered rungs and given up configurations."),
        ("key", "appliance.cli.key:key", "Make, list and revoke API keys."),
        ("expose", "appliance.cli.expose:expose", "Serve other machines, with an API key; --off undoes it."),
    )),
)


class Contents(click.Group):
    """A group whose help reads like a table of contents and whose commands are imported on call."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for _, commands in SECTIONS for name, _, _ in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for _, commands in SECTIONS:
            for name, target, _ in commands:
                if name == cmd_name:
                    module, _, attribute = target.partition(":")
                    command: click.Command = getattr(importlib.import_module(module), attribute)
                    return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS:
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, _, text in commands])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise click.UsageError(f"There is no command `{args[0]}`.{hint}", ctx) from None


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from appliance import __version__

        click.echo(f"applianctl {__version__}")
        ctx.exit()


@click.command(cls=Contents, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--config", "config_file", metavar="FILE",
              help="Configuration file (default /etc/appliance/appliance.yaml).")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
              help="Show the version and exit.")
@click.pass_context
def cli(ctx: click.Context, config_file: str | None) -> None:
    """A 4-bit LLM service for CPU-only nodes: measured, bounded, and ready only when it answered."""
    from appliance.cli.application import Application

    ctx.obj = Application(env=os.environ, config_file=config_file)


def main(argv: list[str] | None = None) -> Any:
    """Entry point of the console script: runs the group and exits with the error tree's codes."""
    try:
        # Not cli.main(): it ends a broken pipe with status 1 by itself.
        with cli.make_context("applianctl", list(sys.argv[1:] if argv is None else argv)) as context:
            code = cli.invoke(context)
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except ApplianceError as error:
        click.echo(f"applianctl: {error.line}", err=True)
        sys.exit(error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "applianctl"
        click.echo(f"applianctl: {error.format_message()} See `{command} --help`.", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("applianctl: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader (`| head`) has gone; keep Python from complaining again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            # /dev/full, or a log on a full disk: what was asked for is done, only the words are lost.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(StoreError.exit_code)
        if isinstance(error, PermissionError):
            click.echo(f"applianctl: {error.filename} is not open to this account; use sudo", err=True)
            sys.exit(NotReachable.exit_code)
        _defect(error)
        sys.exit(ApplianceError.exit_code)


def _defect(error: Exception) -> None:
    """A defect of ours: still one line; the whole story for the report on request."""
    import traceback

    if os.environ.get("APPLIANCE_DEBUG"):
        traceback.print_exc()
    told = " ".join(str(error).split()) or "no message"
    click.echo(f"applianctl: a defect: {type(error).__name__}: {told}; report it with the output of "
               "APPLIANCE_DEBUG=1 applianctl ...", err=True)


if __name__ == "__main__":
    main()
