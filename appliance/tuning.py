"""PURE: what follows for a plan from the measurements of this node, each with its reason and its figures.

Does: prefer an instruction set, a batch, a block size, compiling or not, a type of torch's GEMM and the rows from which
an AMX host takes it, a threshold of torch's int4 kernel. Does not: measure, or plan;
threads are chosen in `appliance.threads`. Rules: only fresh and undisturbed figures decide; a default is left only for
something that is clearly faster (`measured.SAME`); nothing here can lift a safety rule but a whole canary that passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance import measured
from appliance.facts import KernelTrial
from appliance.measured import (
    GEMMS,
    INT4,
    OWN,
    PREFILL_TOK_S,
    SAME,
    SERVED,
    STREAMS_TOK_S,
    TOK_S,
    WEIGHTS,
    Record,
    Trial,
)
from appliance.quantize.format import NATIVE_VARIANTS

SERVED_SETTINGS = ("threads", "cpus", "batch_tokens", "block", "compile", "variant", "kernel")


@dataclass(frozen=True, kw_only=True)
class Preference:
    """What to take instead of the default, or in support of it."""

    value: Any
    reason: str
    evidence: str


def served_kernel(wanted: str, kernels: Sequence[str], trial: KernelTrial | None) -> str:
    """The operator's kernel, else native where the worker has it and a variant passed its self-test."""
    if wanted in NATIVE_VARIANTS:
        return "native"
    if wanted != "auto":
        return wanted
    failed = trial is not None and trial.variant is None
    return "native" if "native" in kernels and not failed else "aten"


def thread_trials(record: Record | None, model: str, kernel: str) -> tuple[Trial, ...]:
    """Fresh trials of different threads: whole workers where at least two were tried, else the model's linears."""
    if record is None or record.stale:
        return ()
    served = _alternatives(record, model, "threads")
    if len({trial.settings["threads"] for trial in served if trial.median(TOK_S) > 0}) > 1:
        return served
    return tuple(trial for trial in record.of(WEIGHTS, model) if trial.settings.get("kernel") == kernel
                 and not trial.settings.get("variant") and trial.settings.get("route") == OWN)


def variant(record: Record | None, model: str, *, left_out: Sequence[str]) -> Preference | None:
    """The fastest instruction set of the native kernel: by one row, of equals by a prompt, of equals the preferred."""
    if record is None or record.stale:
        return None
    tried = sorted((trial for trial in record.of(WEIGHTS, model) if trial.settings.get("variant")
                    and trial.settings.get("route") == OWN),
                   key=lambda trial: -NATIVE_VARIANTS.index(trial.settings["variant"])
                   if trial.settings["variant"] in NATIVE_VARIANTS else 1)
    usable = [trial for trial in tried if not trial.failure and trial.median(TOK_S) > 0
              and not any(trial.settings["variant"] in line.split(":")[0].split() for line in left_out)]
    if len(usable) < 2:
        return None
    top = max(trial.median(TOK_S) for trial in usable)
    equal = [trial for trial in usable if measured.reaches(trial, TOK_S, top)]
    prompts = max(trial.median(PREFILL_TOK_S) for trial in equal)
    chosen = next(trial for trial in equal if trial.median(PREFILL_TOK_S) >= prompts * (1 - SAME))
    return Preference(value=chosen.settings["variant"], reason="fastest of those measured on one row, then on a prompt",
                      evidence=measured.cite(tried, TOK_S, "tok/s", "variant"))


def preferred_variant(record: Record | None, model: str, *, left_out: Sequence[str]) -> str:
    """The variant to force; empty while the kernel's own choice is as fast."""
    found = variant(record, model, left_out=left_out)
    if found is None or record is None:
        return ""
    first = [name for name in reversed(NATIVE_VARIANTS) if any(
        trial.settings.get("variant") == name and not trial.failure for trial in record.of(WEIGHTS, model))][:1]
    return "" if found.value in first else str(found.value)


def served(record: Record | None, model: str, name: str, default: Any) -> Preference | None:
    """The value of `name` (batch_tokens, block, compile) with which a whole worker was fastest; the default where
    nothing is clearly faster; None where it was not compared."""
    if record is None or record.stale:
        return None
    tried = sorted(_alternatives(record, model, name), key=lambda trial: trial.settings[name])
    usable = [trial for trial in tried if not trial.failure and score(trial) > 0]
    if len({trial.settings[name] for trial in usable}) < 2:
        return None
    fastest = max(usable, key=score)
    own = next((trial for trial in usable if trial.settings[name] == default), None)
    if own is not None and score(own, best=True) >= score(fastest) * (1 - SAME):
        fastest = own
    words = {True: "on", False: "off"}
    said = ", ".join(f"{words.get(trial.settings[name], trial.settings[name])}: {_figures(trial)}" for trial in tried)
    reason = "nothing measured is clearly faster" if fastest is own else "fastest whole worker measured"
    return Preference(value=fastest.settings[name], evidence=f"measured: {said}", reason=reason)


def score(trial: Trial, *, best: bool = False) -> float:
    """One figure for a whole worker: the geometric mean of decode, prefill and four streams; `best`: of the best repeat
    of each."""
    product = 1.0
    for name in (TOK_S, PREFILL_TOK_S, STREAMS_TOK_S):
        product *= trial.figures[name].high if best and trial.median(name) else trial.median(name)
    return float(product ** (1 / 3))


def threshold(record: Record | None, model: str) -> Preference | None:
    """Rows below which torch's int4 kernel is both safe here and faster than its dequantize route; None while the
    safety rule holds."""
    if record is None or not measured.canary_passed(record):
        return None
    trials = [trial for trial in record.of(WEIGHTS, model) if trial.settings.get("kernel") == "aten"]
    int4 = next((trial for trial in trials if trial.settings.get("route") == INT4 and not trial.failure), None)
    own = next((trial for trial in trials if int4 is not None and not trial.failure  # the same, threads included
                and dict(trial.settings) == {**int4.settings, "route": OWN}), None)
    if own is None or int4 is None:
        return None
    highest = 1
    for rows in sorted(measured.rows_of(name) for name in int4.figures if name in own.figures):
        name = measured.rows_figure(rows)
        if rows > 1 and int4.median(name) <= own.median(name) * (1 + SAME):
            break
        highest = max(highest, rows)
    if highest < 2:
        return None
    name = measured.rows_figure(highest)
    return Preference(value=highest + 1, reason="the canary passed on this host, and fewer rows are faster so",
                      evidence=f"measured: {highest} rows {int4.median(name):.1f} tok/s, dequantized "
                               f"{own.median(name):.1f} tok/s")


def gemm(record: Record | None, model: str, default: str) -> Preference | None:
    """The type of torch's GEMM with which a prompt is fastest; `default` where nothing is clearly faster; None where
    the types were not compared."""
    tried = _routes(record, model, GEMMS)
    usable = [trial for trial in tried if trial.median(PREFILL_TOK_S) > 0]
    if len(usable) < 2:
        return None
    fastest = max(usable, key=lambda trial: trial.median(PREFILL_TOK_S))
    own = next((trial for trial in usable if trial.settings["route"] == default), fastest)
    if own.median(PREFILL_TOK_S) >= fastest.median(PREFILL_TOK_S) * (1 - SAME):
        fastest = own
    return Preference(value=fastest.settings["route"], reason="the faster of those measured on a prompt",
                      evidence=measured.cite(tried, PREFILL_TOK_S, "prompt tok/s", "route"))


def library_rows(record: Record | None, model: str, gemm: str) -> Preference | None:
    """Rows from which torch's GEMM is clearly faster than the native kernel, for that many rows and all more; 0 where
    it never is; None where they were not compared."""
    library = next(iter(_routes(record, model, (gemm,), kernel="native")), None)
    own = next((trial for trial in _routes(record, model, (OWN,), kernel="native") if library is not None and
                {**trial.settings, "route": gemm} == dict(library.settings)), None)
    if own is None or library is None:
        return None
    common = sorted(measured.rows_of(name) for name in library.figures if own.median(name) and library.median(name))
    common = [rows for rows in common if rows > 1]
    if not common:
        return None
    least = 0
    for rows in reversed(common):
        name = measured.rows_figure(rows)
        if library.median(name) < own.median(name) * (1 + SAME):
            break
        least = rows
    name = measured.rows_figure(least or common[-1])
    return Preference(value=least, reason="torch's GEMM is faster from so many rows on" if least else
                      "torch's GEMM was measured to be no faster",
                      evidence=f"measured: {least or common[-1]} rows {library.median(name):.1f} tok/s, "
                               f"the native kernel {own.median(name):.1f} tok/s")


def _routes(record: Record | None, model: str, routes: Sequence[str], *, kernel: str = "") -> tuple[Trial, ...]:
    """Fresh trials of the model's linears by these routes, in the kernel's own instruction set."""
    if record is None or record.stale:
        return ()
    return tuple(trial for trial in record.of(WEIGHTS, model) if trial.settings.get("route") in routes
                 and not trial.failure and not trial.settings.get("variant")
                 and kernel in ("", trial.settings.get("kernel")))


def read_bandwidth(record: Record | None) -> Preference | None:
    """How fast this node reads memory, and with how many threads it gets there."""
    best = None if record is None or record.stale else measured.bandwidth(record)
    if record is None or best is None:
        return None
    tried = measured.by_threads(record.of(measured.BANDWIDTH))
    return Preference(value=f"{best.median(measured.GB_S):.1f} GB/s",
                      evidence=measured.cite(tried, measured.GB_S, "GB/s"),
                      reason=f"reached with {best.settings['threads']} threads; no token comes faster than one read of "
                             "the weights")


def _alternatives(record: Record, model: str, name: str) -> tuple[Trial, ...]:
    """Whole workers that differ in `name` alone: the largest such group, of equal groups the latest."""
    groups: dict[str, list[Trial]] = {}
    for trial in record.of(SERVED, model):
        if name in trial.settings:
            rest = {key: trial.settings.get(key) for key in SERVED_SETTINGS if key != name}
            groups.setdefault(repr(sorted(rest.items(), key=repr)), []).append(trial)
    largest: list[Trial] = max(groups.values(), key=lambda group: (len(group), group[-1].at), default=[])
    return tuple(largest)


def _figures(trial: Trial) -> str:
    if trial.failure:
        return trial.failure
    if not trial.median(TOK_S):
        return "disturbed"
    return f"{trial.median(TOK_S):.1f} tok/s, prompts {trial.median(PREFILL_TOK_S):.0f} tok/s"
