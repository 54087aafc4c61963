"""One measuring child: an order in, trials out. However it ends, that is a result.

Runs `python -m appliance.gauge ORDER` with the worker's Python. Rules: figures that came before a crash are kept; a
child that dies by a signal, runs out of memory, finds wrong results or says nothing for SILENCE_S leaves a trial with
`failure`; a figure that was taken while others used the CPUs is marked and decides nothing.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance import jobs, measured
from appliance.errors import ApplianceError, ConfigError, CpuNotSupported, DoesNotFit
from appliance.measured import Trial
from appliance.tune import quiet
from appliance.tune.quiet import ServiceNeedsTheCores, TimeIsUp

SILENCE_S = 60.0
Gather = Callable[[Trial], None]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where children run: the worker's Python, the environment, the CPUs of this node, its runtime folder."""

    worker_python: str
    env: Mapping[str, str]
    cpus: tuple[int, ...]
    runtime: Path
    silence_s: float = SILENCE_S

    def run(self, order: Mapping[str, Any], trial: Trial, *, gather: Gather, now: float,
            until: float = math.inf) -> str:
        """Run one order; `trial` has what all its figures have in common. `gather` gets each trial as soon as it is
        whole. Returns how it failed, empty when it ended well. Raises ServiceNeedsTheCores, TimeIsUp at `until`
        (monotonic) after what was whole by then, and what a missing worker raises."""
        found: dict[str, Trial] = {}
        tried = trial
        give_way = quiet.yielding(self.runtime, until=until)
        late: TimeIsUp | None = None
        before = quiet.usage(self.cpus)

        def on_event(event: Mapping[str, Any]) -> None:
            nonlocal tried
            give_way(event)
            if event["event"] == "trying":
                tried = _merged(found, trial, event, now)
            elif event["event"] == "figure":
                tried = _merged(found, trial, event, now)
                found[tried.id] = tried

        failure = ""
        with tempfile.TemporaryDirectory(prefix="appliance-tune-") as folder:
            try:
                jobs.run_job(self.worker_python, ["-m", "appliance.gauge", json.dumps(dict(order))], cwd=Path(folder),
                             env=jobs.job_env(self.env, home=Path(folder), extra=self._extra(order)),
                             on_event=on_event, silence_s=min(self.silence_s, max(0.1, until - time.monotonic())))
            except ServiceNeedsTheCores:
                raise
            except ApplianceError as error:
                late = TimeIsUp() if time.monotonic() >= until else None
                failure = "" if late else cause(error)
        if failure:
            found[tried.id] = replace(tried, failure=failure, at=now)
        if late:
            found.pop(tried.id, None)  # it would have got more figures
        share = quiet.others(before, quiet.usage(self.cpus), self.cpus)
        note = {"disturbed": round(share, 2)} if share > quiet.DISTURBED else {}
        for one in found.values():
            gather(replace(one, notes={**one.notes, **note}))
        if late:
            raise late
        return failure

    @staticmethod
    def _extra(order: Mapping[str, Any]) -> dict[str, str]:
        threads = order.get("threads", 1)
        most = max(threads) if isinstance(threads, list) else threads
        return {"OMP_NUM_THREADS": str(most), **dict(order.get("env", {}))}


def cause(error: ApplianceError) -> str:
    """What happened to a child, in a few words. Raises the error again when it says nothing of this machine."""
    if isinstance(error, CpuNotSupported):
        return "SIGILL: unsafe here"
    if isinstance(error, DoesNotFit) or "allocate memory" in error.why or "MemoryError" in error.why:
        return "memory ran out"
    if isinstance(error, ConfigError) and "the worker's" in error.what:
        raise error
    if "said nothing" in error.what:
        return error.what.replace("the job", "it")
    return error.line.removeprefix("the job died: ")[:200]


def _merged(found: Mapping[str, Trial], trial: Trial, event: Mapping[str, Any], now: float) -> Trial:
    """One more figure. Different numbers of rows are figures of one trial."""
    settings = {**trial.settings, **event["settings"]}
    rows = settings.pop("rows", None)
    one = replace(trial, settings=settings, at=now, figures={})
    one = found.get(one.id, one)
    for name, values in event.get("figures", {}).items():
        name = measured.rows_figure(int(rows)) if name == measured.TOK_S and rows else name
        name = f"{name}, {rows} rows" if rows and name == "passed" else name
        one = replace(one, figures={**one.figures, name: measured.figure(values)})
    return one
