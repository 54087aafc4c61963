"""`applianctl logs`: the agent's own bounded log, the worker's, or the unit's journal.

Does: print the last lines and follow them over rotations. Does not: write or rotate. Rules: the agent's log is the
default, because it has every sentence and every fault; what cannot be read is one line that names sudo.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import click

from appliance import status, unit
from appliance.cli.application import Application
from appliance.errors import NotReachable, UsageError

LONGEST_READ = 64 << 20
POLL_S = 0.3
STAMPS = (
    re.compile(rb"^(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)"),
    re.compile(rb"^(?:\(\w+ pid=\d+\) )?(?:INFO|WARNING|ERROR|DEBUG|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)"),
)
"""The agent's stamp, and vLLM's, which has no year."""
AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="N", default=50, show_default=True,
              help="How many of the last lines.")
@click.option("--agent", "which", flag_value="agent", default=True, help="The agent's log: sentences, faults, actions.")
@click.option("--worker", "which", flag_value="worker", help="The worker's log: vLLM's own words.")
@click.option("--journal", "which", flag_value="journal", help="The unit's journal, by journalctl.")
@click.option("--since", metavar="WHEN", help="Only lines since then: 10m, 2h, 1d, or 2026-01-31T08:00.")
@click.pass_obj
def logs(app: Application, follow: bool, lines: int, which: str, since: str | None) -> None:
    """Show the service's logs: the agent's by default."""
    after = parse_since(since, now=datetime.now()) if since else None
    if which == "journal":
        _journal(app, follow=follow, lines=lines, after=after)
    path = log_path(app, which)
    try:
        for line in last_lines(path, lines, after=after):
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                _follow(path)
    except PermissionError:
        raise NotReachable(f"{path} cannot be read", why="it is not open to this account",
                           do="run `sudo applianctl logs`") from None
    except FileNotFoundError:
        raise NotReachable(f"there is no {path}", why=f"no {which} has run yet", do="run `applianctl status`") from None


def log_path(app: Application, which: str) -> Path:
    """Where a running agent says it is, else in the state folder."""
    current = status.current(app.service.runtime) or {}
    said = current.get("log" if which == "worker" else "agent_log")
    return Path(said) if isinstance(said, str) else app.service.state / f"{which}.log"


def last_lines(path: Path, count: int, *, after: datetime | None = None) -> list[bytes]:
    """The last `count` lines of a log and, where it has fewer, of the file before its last rotation."""
    found: list[bytes] = []
    older = path.with_name(path.name + ".1")
    for file in (older, path):
        if file == path or file.exists():
            found += _tail(file)
    if after is not None:
        found = list(_since(found, after))
    return found[-count:] if count else []


def parse_since(text: str, *, now: datetime) -> datetime:
    """`10m` before now, or a local date with or without a time. Raises UsageError."""
    if match := re.fullmatch(r"(\d{1,6})([smhd])", text):
        return now - timedelta(seconds=int(match[1]) * AGES[match[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--since {text} is no time", do="write 10m, 2h, 1d, or 2026-01-31T08:00") from None
    return found.astimezone().replace(tzinfo=None) if found.tzinfo else found


def _tail(file: Path) -> list[bytes]:
    with open(file, "rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - LONGEST_READ))
        return log.read().splitlines(keepends=True)


def _since(lines: list[bytes], after: datetime) -> Iterator[bytes]:
    """Lines from the first one that is stamped `after` or later; a line without a stamp belongs to the one before."""
    wanted = False
    for line in lines:
        at = _stamp(line, year=after.year)
        wanted = at >= after if at is not None else wanted
        if wanted:
            yield line


def _stamp(line: bytes, *, year: int) -> datetime | None:
    with contextlib.suppress(ValueError):
        for pattern in STAMPS:
            if match := pattern.match(line):
                numbers = [int(part) for part in match.groups()]
                whole = numbers if len(numbers) == 6 else [year, *numbers]
                return datetime(whole[0], whole[1], whole[2], whole[3], whole[4], whole[5])
    return None


def _follow(path: Path) -> None:
    """Print what is appended; after a rotation the rest of the old file, then the new one from its beginning."""
    log = open(path, "rb")  # noqa: SIM115  # replaced at each rotation, closed below
    try:
        log.seek(0, os.SEEK_END)
        while True:
            _pump(log)
            with contextlib.suppress(OSError):
                now = os.stat(path)  # noqa: PTH116
                if now.st_ino != os.fstat(log.fileno()).st_ino:
                    _pump(log)
                    log.close()
                    log = open(path, "rb")  # noqa: SIM115
                elif now.st_size < log.tell():
                    log.seek(0)
            time.sleep(POLL_S)
    finally:
        log.close()


def _pump(log: BinaryIO) -> None:
    while block := log.read(1 << 16):
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()


def _journal(app: Application, *, follow: bool, lines: int, after: datetime | None) -> None:
    """Become journalctl. Raises NotReachable where no unit manages the service."""
    managed = unit.managing(status.current(app.service.runtime), runtime=app.service.runtime, env=app.env)
    if managed is None:
        raise NotReachable("the service has no journal", why="no systemd unit manages it", do="leave out --journal")
    args = ["journalctl", "--unit", managed.name, "--lines", str(lines), "--no-pager"]
    args += ["--follow"] if follow else []
    args += ["--since", f"@{after.timestamp():.0f}"] if after else []
    try:
        os.execvp(args[0], args)
    except OSError as error:
        raise NotReachable("journalctl cannot be started", why=error.strerror or str(error)) from None
