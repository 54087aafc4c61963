"""The first start on a new host, or after a change of it: bandwidth and threads, in a few seconds, before the plan.

Does: measure when nothing fresh is known for this model. Rules: at most BUDGET_S, and one try for each model and state
of the host, so that no later start is held up; whatever goes wrong is a note, not an error: rules of thumb serve too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from appliance import tuning
from appliance.directories import Directories
from appliance.errors import ApplianceError
from appliance.jobs import Event
from appliance.measured import BANDWIDTH, FIRST, Record, Trial
from appliance.settings import Parsed
from appliance.tune import archive, orders, quiet
from appliance.tune.child import Bench
from appliance.tune.quiet import TimeIsUp
from appliance.tune.subject import Subject, read_subject

BUDGET_S = 10.0
EACH_S = 0.15
QUIET_S = 1.0
PROMPTS_BYTES = 256 << 20
"""Prompts of a model with more weights take too long for a start."""


def measure(parsed: Parsed, directories: Directories, worker_python: str, *, env: Mapping[str, str],
            model_name: str, digest: str, on_event: Callable[[Event], None]) -> str:
    """Measure what is missing; returns a note for the log, empty when nothing was to be done."""
    began = time.monotonic()
    if parsed.settings.cpu.threads or parsed.settings.cpu.cpus:
        return ""  # the operator's word wins whatever is measured
    try:
        subject = read_subject(parsed, directories, worker_python, env=env, model_name=model_name, digest=digest)
        before = archive.load(directories.state, subject.host)
        damage = f"{before.damaged}: measured anew; " if before is not None and before.damaged else ""
        record = archive.current(directories.state, subject.host)
        if record.of(FIRST, digest) or tuning.thread_trials(record, digest, subject.kernel):
            return ""
        on_event({"event": "phase", "phase": "measuring", "note": "memory and threads"})
        found, note = _measured(subject, record, worker_python, env, began)
        tried = Trial(kind=FIRST, model=digest, settings={}, figures={}, failure=note, at=time.time())
        archive.save(directories.state, found.having(tried))
        lost = archive.lost(directories.state, found, loss_pct=parsed.settings.tune.upgrade_loss_pct)
        took = f"memory and threads were measured in {time.monotonic() - began:.0f} s"
        return damage + (f"nothing was measured: {note}; " if note else f"{took}; {lost and lost + '; '}")
    except ApplianceError as error:
        return f"nothing was measured: {error.line}; "
    except OSError as error:
        return f"nothing was measured: {error.strerror or error}; "


def _measured(subject: Subject, record: Record, worker_python: str, env: Mapping[str, str],
              began: float) -> tuple[Record, str]:
    """The record with what the time allowed, and why there is nothing new in it."""
    cpus = subject.host.topology.allowed
    if quiet.wait(cpus, limit_s=QUIET_S) > quiet.DISTURBED:
        return record, "other programs use the CPUs, run `applianctl tune` when they do not"
    bench = Bench(worker_python=worker_python, env=env, cpus=cpus, runtime=Path("/nonexistent"), silence_s=BUDGET_S)

    def gather(trial: Trial) -> None:
        nonlocal record
        record = record.having(trial)

    wanted = [*(() if record.of(BANDWIDTH) else orders.bandwidth(subject, budget_s=EACH_S)),
              *orders.threads(subject, budget_s=EACH_S, prompts=subject.model.linear_bytes <= PROMPTS_BYTES)]
    failure = ""
    for order, trial in wanted:
        if time.monotonic() - began < BUDGET_S:
            try:
                failure = bench.run(order, trial, gather=gather, now=time.time(), until=began + BUDGET_S) or failure
            except TimeIsUp:
                break
    return record, failure
