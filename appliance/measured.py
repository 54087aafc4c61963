"""PURE: what was measured on a node: trials with their figures, on what they depend, and what follows from them.

A `Record` belongs to one host fingerprint. It names its inputs (CPU, microcode, kernel, limits, versions); when one of
them changes the figures are stale, and nothing is decided by them any more. Does: values, their JSON, staleness, the
best of several with noise taken into account, and the words that a plan cites. Does not: measure, or touch a file.
Rules: a trial that ended badly is kept with what happened: it says what is unsafe here; less threads win while they
are as fast as more; a figure without a unit in its name does not exist.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.facts import HostFacts, to_json
from appliance.refusal import ranges

SCHEMA = 1
SAME = 0.03
"""Two figures that differ by less are the same: machines repeat themselves no better."""
BANDWIDTH, WEIGHTS, CANARY, SERVED, FIRST = "bandwidth", "weights", "canary", "served", "first"
"""Kinds of trials: reading memory; all linears of one step; the crash canary; a whole worker answering; the mark that a
first start has tried to measure."""
OWN, INT4 = "own", "int4"
GEMMS = ("bf16", "fp32")
"""Routes of many rows: as the kernel serves them, in torch's int4 kernel, by torch's GEMM of a type."""
KINDS: Mapping[str, type] = {"threads": int, "batch_tokens": int, "block": int, "compile": bool}
"""What a trial's setting is; the others are texts."""
PREFILL_ROWS = 256
GB_S, TOK_S, PREFILL_TOK_S, STREAMS_TOK_S = "GB/s", "tok/s", "prompt tok/s", "4 streams tok/s"
"""Figures: of a read; of one row; of PREFILL_ROWS rows, or a prompt; of four answers at once."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One quantity, measured several times: median, least and greatest."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        """The width of what was seen, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One thing tried. `settings`: what was set for it (threads, cpus, variant, rows, batch_tokens, block);
    `failure`: what happened instead of figures, empty when it ended well; `model`: digest, empty where none is needed;
    `at`: wall clock seconds."""

    kind: str
    settings: Mapping[str, Any]
    figures: Mapping[str, Figure]
    model: str = ""
    failure: str = ""
    at: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)
    """`disturbed`: the share of the CPUs that others used meanwhile."""

    @property
    def id(self) -> str:
        """Equal ids: the same was tried, and the later one counts."""
        return f"{self.kind} {self.model[:12]} {json.dumps(dict(self.settings), sort_keys=True)}"

    def seen(self, name: str) -> float:
        """The figure's median, disturbed or not, for people; zero where the trial has no such figure."""
        return self.figures[name].median if name in self.figures else 0.0

    def median(self, name: str) -> float:
        """The figure's median; zero where the trial has no such figure, and where it was disturbed: it then decides
        nothing."""
        return self.figures[name].median if name in self.figures and not self.notes.get("disturbed") else 0.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """All trials of one host fingerprint. `stale`: what has changed since, as sentences; empty while it counts.
    `damaged`: why it cannot be read; it is stale then, and has no trials."""

    fingerprint: str
    inputs: Mapping[str, str]
    trials: tuple[Trial, ...] = ()
    open_since: float = 0.0
    """When a run began that has not ended yet; 0 when none has: what it had measured is not measured again."""
    stale: tuple[str, ...] = ()
    damaged: str = ""

    def of(self, kind: str, model: str = "") -> tuple[Trial, ...]:
        """Trials of one kind, for one model, in order."""
        return tuple(trial for trial in self.trials if trial.kind == kind and trial.model == model)

    def having(self, trial: Trial) -> Record:
        """The record with this trial, in the place of an earlier one of the same id."""
        return replace(self, trials=(*(t for t in self.trials if t.id != trial.id), trial))

    def find(self, trial_id: str) -> Trial | None:
        return next((trial for trial in self.trials if trial.id == trial_id), None)


def figure(values: Iterable[float]) -> Figure:
    """The figure of several values, at least one."""
    found = sorted(values)
    middle = len(found) // 2
    median = found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2
    return Figure(median=median, low=found[0], high=found[-1], repeats=len(found))


# ---- on what it depends ----------------------------------------------------------------------------------------------


def inputs(host: HostFacts, *, microcode: str | None) -> dict[str, str]:
    """What figures depend on, by name. Memory in use and free disk are left out: they change by the minute."""
    quota = host.topology.quota
    limit = min((limit.bytes for limit in host.memory.limits), default=None)
    return {
        "CPU": host.cpu.model_name or "unknown",
        "microcode": microcode or "unknown",
        "tier": host.cpu.tier or "none",
        "kernel": host.software.kernel or "unknown",
        "CPUs": ranges(host.topology.allowed) or "unknown",
        "CPU quota": f"{quota.cpus:g} CPUs" if quota else "none",
        "memory limit": str(limit) if limit else "none",
        **{f"version of {name}": version for name, version in sorted(host.software.versions.items())},
    }


def decision(digest: str, figures: Mapping[str, Any]) -> str:
    """A name for what measurements decide (`Plan.tuned`) for a model, nothing included: 12 hex digits."""
    text = json.dumps([digest, dict(figures)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What differs, as sentences: `kernel was 6.1.0-18, is 6.1.0-20`."""
    names = [*before, *(name for name in now if name not in before)]
    return tuple(f"{name} was {before.get(name, 'none')}, is {now.get(name, 'none')}"
                 for name in names if before.get(name) != now.get(name))


def comparable(before: Record, after: Record) -> bool:
    """Whether another speed is the software's: the same CPUs, with the same quota, and other inputs."""
    same = ("CPU", "CPUs", "CPU quota")
    return before.inputs != after.inputs and all(before.inputs.get(name) == after.inputs.get(name) for name in same)


def slower(before: Record, after: Record, *, loss_pct: float) -> Iterator[str]:
    """Figures that have lost more than `loss_pct` against an earlier record, as sentences. The best repeat of each
    counts: others on the machine make figures smaller, never larger."""
    for trial in after.trials:
        earlier = before.find(trial.id)
        for name in (TOK_S, PREFILL_TOK_S, GB_S) if earlier is not None else ():
            if not trial.median(name) or earlier is None or not earlier.median(name):
                continue
            then, now = earlier.figures[name].high, trial.figures[name].high
            if 100 * (1 - now / then) > loss_pct:
                where = "".join(f", {key} {trial.settings[key]}" for key in ("threads", "cpus", "variant", "route")
                                if trial.settings.get(key))
                yield f"{trial.kind}{where}: {then:.1f} -> {now:.1f} {name}, {100 * (1 - now / then):.0f} % slower"


# ---- text ------------------------------------------------------------------------------------------------------------


def write(record: Record) -> str:
    """The record as JSON."""
    body = {"schema": SCHEMA, "fingerprint": record.fingerprint, "inputs": dict(record.inputs),
            "open_since": record.open_since, "trials": to_json(record.trials)}
    return json.dumps(body, indent=1) + "\n"


def read(text: str) -> Record | None:
    """The record of a text; None when it is none of this schema, or damaged."""
    try:
        raw = json.loads(text)
        if raw["schema"] != SCHEMA:
            return None
        return Record(
            fingerprint=str(raw["fingerprint"]),
            inputs={str(name): str(value) for name, value in raw["inputs"].items()},
            trials=tuple(_trial(entry) for entry in raw["trials"]), open_since=float(raw["open_since"]))
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _trial(raw: Mapping[str, Any]) -> Trial:
    """Raises ValueError and others for what no trial can have been: decisions are made by it."""
    figures = {str(name): _figure(found) for name, found in raw["figures"].items()}
    settings, notes = dict(raw["settings"]), dict(raw["notes"])
    odd = [name for name, value in settings.items() if type(value) is not KINDS.get(name, type(value))
           or not isinstance(value, (str, int, float, bool, type(None)))]
    if odd or (figures and "threads" not in settings) or not isinstance(notes.get("disturbed", 0), (int, float)):
        raise ValueError("no trial")
    return Trial(kind=str(raw["kind"]), settings=settings, figures=figures, model=str(raw["model"]),
                 failure=str(raw["failure"]), at=float(raw["at"]), notes=notes)


def _figure(raw: Mapping[str, Any]) -> Figure:
    found = Figure(median=float(raw["median"]), low=float(raw["low"]), high=float(raw["high"]),
                   repeats=int(raw["repeats"]))
    if not 0 <= found.low <= found.median <= found.high < math.inf:
        raise ValueError("no figure")
    return found


# ---- what follows ----------------------------------------------------------------------------------------------------


def best(trials: Iterable[Trial], name: str) -> Trial | None:
    """The trial with the highest figure `name`; of those within SAME of it the first in the given order. None when
    none has the figure."""
    having = [trial for trial in trials if not trial.failure and trial.median(name) > 0]
    top = max((trial.median(name) for trial in having), default=0.0)
    return next((trial for trial in having if trial.median(name) >= top * (1 - SAME)), None)


def reaches(trial: Trial, name: str, top: float) -> bool:
    """Whether a trial is as fast as `top`, going by its best repeat: others on the machine make a figure smaller, never
    larger, and a median of three has been seen a quarter too small."""
    return trial.median(name) > 0 and trial.figures[name].high >= top * (1 - SAME)


def by_threads(trials: Iterable[Trial]) -> list[Trial]:
    """Fewest threads first; of equal numbers those that leave all CPUs open first."""
    return sorted(trials, key=lambda trial: (int(trial.settings.get("threads", 0)), bool(trial.settings.get("cpus"))))


def cite(trials: Iterable[Trial], name: str, unit: str, setting: str = "threads") -> str:
    """`measured: 6 threads 41.2 tok/s, 8 threads 33.0 tok/s`, for a plan."""
    said = []
    for trial in trials:
        value = trial.failure or (f"{trial.median(name):.1f} {unit}" if trial.median(name) else "disturbed")
        what = str(trial.settings.get(setting))
        what += "" if setting != "threads" else " thread" if what == "1" else " threads"
        where = f" on CPUs {trial.settings['cpus']}" if trial.settings.get("cpus") else ""
        said.append(f"{what}{where} {value}")
    return "measured: " + ", ".join(said)


def bandwidth(record: Record) -> Trial | None:
    """The trial with the highest read bandwidth, with the fewest threads that reach it: the knee."""
    return best(by_threads(record.of(BANDWIDTH)), GB_S)


def rows_figure(rows: int) -> str:
    """The name of the figure of a step with so many rows."""
    return {1: TOK_S, PREFILL_ROWS: PREFILL_TOK_S}.get(rows, f"{rows} rows tok/s")


def rows_of(name: str) -> int:
    """The inverse: how many rows a figure is of."""
    return {TOK_S: 1, PREFILL_TOK_S: PREFILL_ROWS}.get(name) or int(name.split()[0])


def canary_passed(record: Record | None) -> bool:
    """Whether several rows in torch's int4 kernel were safe on this host, by a whole and fresh canary."""
    if record is None or record.stale:
        return False
    tried = record.of(CANARY)
    return bool(tried) and all(not trial.failure for trial in tried)
