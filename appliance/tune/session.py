"""One run of measurements on this node: what is measured, in which order, within a time.

    memory -> threads -> instruction sets -> ways for many rows -> canary -> whole workers

Does: give orders, add each trial to the record and save it at once, so that an interrupted run is taken up where it
stopped. Does not: decide (`appliance.tuning`, `appliance.threads` do), or change anything that serves. Rules: a service
with requests is never disturbed: the run waits, and gives up after PATIENCE_S; what the time does not allow is named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance import measured, tuning
from appliance.budget import show
from appliance.errors import TransientError
from appliance.launch import Places
from appliance.measured import Record, Trial
from appliance.plan import Rung
from appliance.tune import archive, orders, quiet, served
from appliance.tune.child import Bench
from appliance.tune.orders import Ordered
from appliance.tune.quiet import ServiceNeedsTheCores, TimeIsUp
from appliance.tune.subject import Subject

QUICK_S, FULL_S = 180.0, 900.0
QUICK_EACH_S, FULL_EACH_S = 0.4, 1.0
"""How long one figure is repeated."""
MICRO_SHARE = 0.6
"""The part of the time after which whole workers come first."""
PATIENCE_S, QUIET_S = 60.0, 5.0
ATTEMPTS = 3
SERVED_S = 25.0
"""What a whole worker takes at least, until one has been measured."""
SHORTEST_S = math.ceil(SERVED_S / (1 - MICRO_SHARE))
"""With less time than this a whole worker is measured only where all before it has taken little."""
ENDING_S = 4.0
"""What it takes to end one: it is given up that long before the time is up."""
BATCHES, BLOCKS = (256, 512, 1024, 2048), (32, 64, 128)
"""Tokens. vLLM's attention on CPUs knows blocks of a multiple of 32 only."""
Say = Callable[[Mapping[str, Any]], None]


@dataclass(kw_only=True)
class Session:
    """`say` gets events: `phase` (with `note`, `left_s`), `trial` (with the Trial), `left out` (with `what`)."""

    subject: Subject
    bench: Bench
    state: Path
    full: bool
    budget_s: float
    say: Say
    record: Record
    env: Mapping[str, str]
    patience_s: float = PATIENCE_S
    left_out: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _served_s: float = SERVED_S

    def run(self) -> Record:
        """Measure everything, or what the time allows; returns the record, which is saved. Raises TransientError when
        the service needs the cores, KeyboardInterrupt as it comes; both leave what was measured."""
        resumed = self.record.open_since > 0
        self.record = replace(self.record, open_since=self.record.open_since or time.time())
        if resumed:
            self._phase("resuming", "an earlier run was interrupted")
        if self.budget_s < SHORTEST_S:
            self._phase("a short time", f"a whole worker takes about {SERVED_S:.0f} s, and two are needed to compare: "
                        f"below {SHORTEST_S:.0f} s none may be measured, and the figures of their parts decide")
        for phase, work in self._orders():
            self._phase(phase)
            for order, trial in work:
                if self._left_s() < self.budget_s * (1 - MICRO_SHARE):
                    self._leave_out(f"{phase}: the time is up")
                    break
                try:
                    self._try(order, trial)
                except TimeIsUp:
                    self._leave_out(f"the rest of {phase}: the time is up")
                    break
        self._phase("whole workers")
        self._whole_workers()
        self.record = replace(self.record, open_since=0.0)
        archive.save(self.state, self.record)
        return self.record

    # ---- what is measured ----------------------------------------------------------------------------------------

    def _orders(self) -> Iterator[tuple[str, Iterable[Ordered]]]:
        subject, each_s = self.subject, FULL_EACH_S if self.full else QUICK_EACH_S
        yield "read bandwidth", orders.bandwidth(subject, budget_s=each_s)
        yield "threads", orders.threads(subject, budget_s=each_s)
        if subject.kernel == "native":
            yield "instruction sets", orders.variants(subject, full=self.full, budget_s=each_s)
        if self.full or subject.kernel == "aten":
            yield "canary", [orders.canary(subject)]
        yield "many rows", orders.routes(subject, full=self.full, budget_s=each_s,
                                         canary=measured.canary_passed(self.record))

    def _whole_workers(self) -> None:
        """The two best configurations; in a full run also batches and blocks around the best."""
        subject = self.subject
        with served.folders(str(subject.stored), str(subject.prepared or "")) as places:
            best, plain = subject.plan_of_one(self.record, places), subject.plan_of_one(None, places)
            if best.refused is not None or plain.refused is not None:
                refused = best.refused or plain.refused
                assert refused is not None
                self._leave_out(f"whole workers: {refused.why}")
                return
            if max(best.peak_bytes, plain.peak_bytes) > subject.free_bytes:
                self._leave_out(f"whole workers: one takes {show(best.peak_bytes)}, free beside the service are "
                                f"{show(subject.free_bytes)}")
                return
            base = served.settings_of(best.full)
            wanted = [base, served.settings_of(plain.full), *self._second(base)]
            if self.full:
                wanted += [{**base, "batch_tokens": batch} for batch in BATCHES]
                wanted += [{**base, "block": block} for block in BLOCKS]
                wanted += [{**base, "compile": False}] if base["compile"] else []
            seen: list[dict[str, Any]] = []
            for settings in wanted:
                if settings in seen or (not self.full and len(seen) == 2):
                    continue
                seen.append(settings)
                if self._left_s() < self._served_s:
                    self._leave_out(f"a whole worker with {_words(settings)}: the time is up")
                    continue
                began = time.monotonic()
                try:
                    self._worker(served.altered(best.full, settings), places, settings)
                except TimeIsUp:
                    self._leave_out(f"a whole worker with {_words(settings)}: the time is up")
                self._served_s = max(self._served_s / 2, time.monotonic() - began)

    def _worker(self, rung: Rung, places: Places, settings: Mapping[str, Any]) -> None:
        """One whole worker, if an interrupted run has not measured it."""
        model = self.subject.model
        trial = Trial(kind=measured.SERVED, model=model.digest, settings=settings, figures={})
        if not self._fresh(trial.id):
            until = self._until() - ENDING_S
            self._guarded([trial.id], lambda check: self._gather(served.serve(
                rung, places, model, python=self.bench.worker_python, env=self.env, check=check, cpus=self.bench.cpus,
                now=time.time(), until=until)), until=until)

    def _second(self, base: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The next best number of threads, for a second whole configuration."""
        trials = tuning.thread_trials(self.record, self.subject.model.digest, self.subject.kernel)
        others = [trial for trial in trials if int(trial.settings["threads"]) != base["threads"]
                  and not trial.settings.get("cpus") and trial.median(measured.TOK_S) > 0]
        if not others:
            return []
        next_best = max(others, key=lambda trial: trial.median(measured.TOK_S) * trial.median(measured.PREFILL_TOK_S))
        return [{**base, "threads": int(next_best.settings["threads"])}]

    # ---- one trial -------------------------------------------------------------------------------------------------

    def _try(self, order: Mapping[str, Any], trial: Trial) -> None:
        if self._known(order, trial):
            return
        ids = [replace(trial, settings=settings).id for settings in expected(order, trial)]
        until = self._until(MICRO_SHARE)
        self._guarded(ids, lambda _: self.bench.run(order, trial, gather=self._gather, now=time.time(), until=until),
                      until=until)

    def _guarded(self, ids: Sequence[str], work: Callable[[Say], object], *, until: float) -> None:
        """Run when the service is idle and the machine is quiet; again when the service got work meanwhile, and once
        more when others disturbed it and the time allows it. Raises TimeIsUp."""
        disturbed = False
        for _ in range(ATTEMPTS):
            self._wait_for_service()
            quiet.wait(self.bench.cpus, limit_s=QUIET_S)
            began = time.monotonic()
            try:
                work(quiet.yielding(self.bench.runtime, until=until))
            except ServiceNeedsTheCores as error:
                self._phase("waiting", error.why)
                continue
            except TimeIsUp:
                if disturbed:
                    return  # the disturbed figures stay
                raise
            found = [trial for trial in map(self.record.find, ids) if trial is not None]
            spent_s = time.monotonic() - began
            if disturbed or not any(t.notes.get("disturbed") for t in found) or until - began < 3 * spent_s:
                return
            disturbed = True
        if disturbed:
            return
        raise TransientError("the measurement was given up", why="the service got requests again and again",
                             do="run `applianctl tune` again when it is idle: it goes on from here")

    def _wait_for_service(self) -> None:
        end = time.monotonic() + self.patience_s
        while (reason := quiet.service_busy(self.bench.runtime)) is not None:
            if time.monotonic() >= end:
                raise TransientError("this is no time to measure", why=reason,
                                     do="run `applianctl tune` again when the service is idle: it goes on from here")
            time.sleep(quiet.POLL_S)

    def _gather(self, trial: Trial) -> None:
        self.record = self.record.having(trial)
        archive.save(self.state, self.record)
        self.say({"event": "trial", "trial": trial})

    def _known(self, order: Mapping[str, Any], trial: Trial) -> bool:
        """Whether an interrupted run has all of this already."""
        return all(self._fresh(replace(trial, settings=settings).id) for settings in expected(order, trial))

    def _fresh(self, trial_id: str) -> bool:
        found = self.record.find(trial_id)
        return found is not None and found.at >= self.record.open_since and not found.notes.get("disturbed")

    def _left_s(self) -> float:
        return self._until() - time.monotonic()

    def _until(self, share: float = 1.0) -> float:
        """When this share of the time is over (monotonic)."""
        return self._began + self.budget_s * share

    def _phase(self, phase: str, note: str = "") -> None:
        self.say({"event": "phase", "phase": phase, "note": note, "left_s": max(0.0, self._left_s())})

    def _leave_out(self, what: str) -> None:
        self.left_out.append(what)
        self.say({"event": "left out", "what": what})


def expected(order: Mapping[str, Any], trial: Trial) -> list[dict[str, Any]]:
    """The settings of the trials that an order makes."""
    if order["gauge"] == "canary":
        return [dict(trial.settings)]
    if order["gauge"] == "bandwidth":
        return [{**trial.settings, "threads": threads} for threads in order["threads"]]
    return [{**trial.settings, "threads": threads, "kernel": order["kernel"], "variant": variant, "route": route}
            for threads in order["threads"] for variant in order["variants"] for route in order["routes"]]


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
