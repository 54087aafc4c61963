"""Progress of a job on standard error: a bar on a terminal, plain lines elsewhere.

Rules: plain lines come once a phase, and then at most once per 5 % and per 2 s, so that a log stays readable; nothing
goes to standard output, which belongs to the result.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from appliance.budget import show
from appliance.jobs import Event

STEP = 0.05
STEP_S = 2.0
PHASES = {
    "asking": "asking the Hub",
    "outlining": "reading the headers",
    "fetching": "fetching",
    "retrying": "waiting for the Hub",
    "checking": "checking the source",
    "verifying": "reading every byte of the stored model",
    "waiting": "waiting: another process adds the same model",
    "preparing": "laying the weights out for the kernels",
    "reading": "reading the source",
    "measuring": "measuring this host",
    "quantizing": "quantizing",
    "calibrating": "calibrating",
    "writing": "writing the last files",
    "storing": "checking and storing",
    "evaluating": "evaluating",
    "comparing": "comparing",
}


class Progress:
    """A receiver for job events. A context manager: leaving it ends the bar."""

    def __init__(self, *, terminal: bool | None = None) -> None:
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._label = ""
        self._bar: Any = None
        self._said = (0.0, time.monotonic())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bar()

    def __call__(self, event: Event) -> None:
        if event["event"] == "phase":
            self._end_bar()
            phase = str(event.get("phase", ""))
            self._label = PHASES.get(phase, phase)
            self._said = (0.0, time.monotonic())
            note = str(event.get("note") or "")
            click.echo(self._label + (f" ({note})" if note else ""), err=True)
        elif event["event"] == "progress":
            done, total = int(event.get("done_bytes", 0)), int(event.get("total_bytes", 0))
            if total > 0 and self._terminal:
                self._draw(done, total)
            elif total > 0:
                self._say(done, total)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr, show_pos=False)
            self._bar.__enter__()
        self._bar.update(done - self._bar.pos)

    def _say(self, done: int, total: int) -> None:
        share, now = done / total, time.monotonic()
        if share - self._said[0] >= STEP and now - self._said[1] >= STEP_S:
            self._said = (share, now)
            click.echo(f"{self._label}: {share:.0%} of {show(total)}", err=True)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
