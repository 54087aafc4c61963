"""Write man pages and shell completion from the command line itself: manual.py TARGET (below it usr/share/...).

Does: one page for applianctl and one for each of its commands, subcommands inside, from the texts that `--help` shows;
completion for bash, zsh and fish from click. Does not: describe settings (docs/configuration.md). Rules: pages are roff
of man(7) with nothing but sections, paragraphs and tags; the date is SOURCE_DATE_EPOCH; a lazy group is asked by name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from appliance import __version__
from appliance.cli.main import cli

NAME = "applianctl"
SHELLS: tuple[tuple[type[ShellComplete], str], ...] = (
    (BashComplete, f"bash-completion/completions/{NAME}"),
    (ZshComplete, f"zsh/vendor-completions/_{NAME}"),
    (FishComplete, f"fish/vendor_completions.d/{NAME}.fish"),
)


def main(target: Path) -> None:
    share = target / "usr/share"
    top = click.Context(cli, info_name=NAME, **cli.context_settings)
    pages = {NAME: page(top)}
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        assert command is not None
        pages[f"{NAME}-{name}"] = page(click.Context(command, info_name=name, parent=top))
    for title, text in pages.items():
        write(share / f"man/man1/{title}.1", text)
    for shell, place in SHELLS:
        write(share / place, shell(cli, {}, NAME, f"_{NAME.upper()}_COMPLETE").source())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def page(context: click.Context) -> str:
    """One manual page of a command, with its subcommands."""
    command = context.command
    title = context.command_path.replace(" ", "-")
    date = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC).strftime("%Y-%m-%d")
    lines = [f'.TH {title.upper()} 1 {date} "appliance {__version__}" "LLM service"', ".nh", ".SH NAME",
             rf"{title} \- {roff(command.get_short_help_str(200).rstrip('.'))}", ".SH SYNOPSIS", synopsis(context),
             ".SH DESCRIPTION", *paragraphs(command.help or ""), *options(context, ".SH OPTIONS")]
    inside = context.parent is not None
    lines += [] if inside else [".SH COMMANDS"]
    lines += [line for inner in subcommands(context) for line in section(inner, deep=inside)]
    lines += [".SH SEE ALSO", references(context)]
    return "\n".join(lines) + "\n"


def section(context: click.Context, *, deep: bool) -> Iterator[str]:
    """A subcommand inside its group's page; the first page only names the commands."""
    name = context.command_path.replace(" ", "-" if not deep else " ")
    if not deep:
        yield from (".TP", rf"\fB{roff(name)}\fR(1)", roff(context.command.get_short_help_str(200)))
        return
    yield from (f".SH {roff(name).upper()}", synopsis(context), ".PP", *paragraphs(context.command.help or ""))
    yield from options(context, ".PP")
    for inner in subcommands(context):
        yield from section(inner, deep=True)


def subcommands(context: click.Context) -> Iterator[click.Context]:
    group = context.command
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if command is not None and not command.hidden:
                yield click.Context(command, info_name=name, parent=context)


def synopsis(context: click.Context) -> str:
    return rf"\fB{roff(context.command_path)}\fR {roff(' '.join(context.command.collect_usage_pieces(context)))}"


def options(context: click.Context, heading: str) -> Iterator[str]:
    records = [record for one in context.command.get_params(context) if (record := one.get_help_record(context))]
    if records:
        yield heading
    for flags, text in records:
        yield from (".TP", rf"\fB{roff(flags)}\fR", roff(" ".join(text.split())))


def references(context: click.Context) -> str:
    pages = [f"{NAME}(1)"] if context.parent is not None else []
    return ", ".join([*pages, "systemctl(1)", "journalctl(1)"]) + ", /usr/share/doc/appliance"


def paragraphs(text: str) -> Iterator[str]:
    """Help text: paragraphs by empty lines; after click's mark for kept lines, lines as they are."""
    for number, part in enumerate(re.split(r"\n\s*\n", text.replace("\r", "").split("\f")[0].strip())):
        if number:
            yield ".PP"
        if part.strip().startswith("\b"):
            yield from (".nf", *(roff(line) for line in part.replace("\b", "").strip("\n").splitlines()), ".fi")
        else:
            yield roff(" ".join(part.split()))


def roff(text: str) -> str:
    """Text that roff prints as it is: no request at the start of a line, no escape, hyphens that can be copied."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
