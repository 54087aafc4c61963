"""Which configuration runs, on which rung, and what a fault changes: the agent's memory put to use.

Joins the operator's wish (settings, model), the record, the pure rules of `trial` and `recovery`, and the plan. Does
not: start or end anything. Rules: what is wanted is looked at anew before each worker start, so that a removed model or
a repaired one counts at once; while a wanted configuration is known to fail, the last good one is served and status
says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from appliance import disk, measured, record, trial, workers
from appliance.directories import Directories
from appliance.errors import ApplianceError, ConfigError, StoreError
from appliance.faults import Fault
from appliance.jobs import PACKAGED_PYTHON, find_worker_python
from appliance.library import active_name, check_possible
from appliance.node import Node, read_node
from appliance.plan import Rung
from appliance.provision import Order
from appliance.recovery import Step, next_step
from appliance.settings import Parsed, Settings, to_dict
from appliance.store import Store
from appliance.supervisor import folders
from appliance.trial import Candidate, Choice, Pass, TrialView
from appliance.tune import archive


class Course:
    """Made once an agent. Times are wall clock seconds."""

    def __init__(self, *, directories: Directories, env: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.directories = directories
        self.env = env
        self.say = say
        self.record = record.load(directories.state)
        self.choice: Choice | None = None
        self.rung: Rung | None = None
        self.last_sentence = ""
        self.given_up = ""
        """What this node's measurements would decide had it not failed before, and why; empty where nothing."""
        self.ladder: tuple[str, ...] = ("full",)
        self._repair = ""
        self._said = ""
        self._measured: float | None = None
        self._versions: dict[str, Mapping[str, str]] = {}
        self._figures: dict[str, Mapping[str, Any]] = {}
        """Id of a candidate without figures -> what measurements decide for it, as its last preparation found."""
        self._parsed = Parsed(settings=Settings(), warnings=(), sources={})
        self._wanted: tuple[object, ...] = ()
        if self.record.warning:
            say(self.record.warning)

    # ---- what is wanted --------------------------------------------------------------------------------------------

    def want(self, parsed: Parsed) -> bool:
        """Take the operator's wish; true when it asks for another worker than the one that is served.

        Raises ConfigError when there is no worker.
        """
        # One that is named and not there is a configuration that fails its trial, not the end of a good service.
        python = parsed.settings.worker.python or self._installed(parsed.settings)
        self._parsed = parsed
        if parsed.settings.store is not None and not self._wanted:  # another store counts at the agent's next start
            self.directories = dataclasses.replace(self.directories, store=Path(parsed.settings.store))
        name = active_name(parsed, self.directories)
        before = self._wanted
        asked = json.dumps(trial.worker_settings(parsed.settings), sort_keys=True)
        applied = archive.applied(self.directories.state)
        self._wanted = (name, self._digest(name), python, asked, applied)
        if self.choice is None:
            return True
        served = self.choice.candidate
        runs_so = not applied or applied == measured.decision(served.digest, served.figures)
        key = (served.model, served.digest, served.worker_python, json.dumps(dict(served.settings), sort_keys=True),
               applied if runs_so else "")
        if self._wanted not in (before, key):
            self._spare(served)
        if self._wanted == key and self.choice.instead:
            # What is served is what is wanted again.
            self.choice = dataclasses.replace(self.choice, sentence="", instead=False)
        return self._wanted not in (before, key)

    @property
    def parsed(self) -> Parsed:
        return self._parsed

    @property
    def settings(self) -> Settings:
        """The settings in force: the operator's, with the served candidate's in the places that reach the worker."""
        if self.choice is None:
            return self.parsed.settings
        return trial.served_settings(self.parsed.settings, self.choice.candidate)

    @property
    def model(self) -> str:
        return self.choice.candidate.model if self.choice else str(self._wanted[0])

    @property
    def worker_python(self) -> str:
        return self.choice.candidate.worker_python if self.choice else str(self._wanted[2])

    def order(self) -> Order:
        """What must be made present for the next start."""
        name = str(self._wanted[0])
        self._choose(self._digest(name))
        assert self.choice is not None
        repair, self._repair = self._repair, ""
        candidate, good = self.choice.candidate, self.record.good
        return Order(
            refused=tuple(self.record.refused),
            figures=good.figures if good is not None and good.digest == candidate.digest else {},
            model=candidate.model, digest=candidate.digest if self.choice.instead else None,
            settings=to_dict(self.settings), repair=repair,
            directories={key: str(path) for key, path in dataclasses.asdict(self.directories).items()},
            worker_python=candidate.worker_python)

    def provisioned(self, result: Mapping[str, Any], *, now: float) -> bool:
        """What the preparation of `order` found (`appliance.provision`): the model's object, the worker's versions,
        what measurements decide. False when that makes another configuration the one to serve."""
        assert self.choice is not None
        digest = str(result.get("digest"))
        self._versions[self.worker_python] = result.get("versions") or {}
        instead = self.choice.instead
        if (figures := result.get("figures")) is not None:
            self._figures[self._plain(self.choice.candidate, digest).id] = figures
        given_up = result.get("given_up")
        self._choose(self._digest(str(self._wanted[0])) if instead else digest)
        choice = self.choice
        if choice.instead != instead or choice.candidate.digest != digest:
            return False
        self.given_up = "" if given_up is None else self._why_given_up(choice.candidate, given_up)
        if choice.sentence and choice.sentence != self._said:
            self._said = choice.sentence
            self.say(choice.sentence)
        if not choice.on_trial:
            self.record.end_trial()
            if choice.adopted:
                assert self.record.good is not None
                self.record.adopt(choice.candidate, trial.difference(self.record.good, choice.candidate), now=now)
            if not choice.instead:
                workers.settled(self.directories.runtime)
            return True
        if self._spare_earlier(choice.candidate, now):
            return False
        self.record.begin_trial(choice.candidate, choice.sentence, now=now)
        refusal = trial.start_refusal(self.record.trial) if self.record.trial else None
        if refusal and choice.fallback is not None:
            self.record.fail_trial(choice.candidate, refusal, now=now)
            return False
        return True

    def ahead(self) -> Node:
        """Plan the next start and make its folders. Takes its time: not for the loop. Raises what `look` raises."""
        node = self.look()
        with disk.mapped("cannot prepare the worker's folders", self.directories.cache):
            folders.prepare(node.places, self.directories.cache, fingerprint=node.host.fingerprint)
        if node.measured is not None:
            with contextlib.suppress(StoreError):  # without it a way back leads to the rules of thumb
                archive.keep(self.directories.state, node.measured, digest=node.model.digest, figures=node.plan.tuned)
        return node

    def look(self) -> Node:
        """Plan the served candidate on this node now: reads much and changes nothing. Takes its time as well.

        Raises ModelError, StoreError or ConfigError for what is missing.
        """
        assert self.choice is not None
        candidate = self.choice.candidate
        parsed = Parsed(settings=self.settings, warnings=(), sources={"model": "the agent"})
        with disk.mapped("cannot plan", self.directories.store, store=True):
            return read_node(parsed, self.directories, candidate.worker_python, env=self.env,
                             model_name=candidate.model, digest=candidate.digest, figures=candidate.figures)

    def enter(self, node: Node) -> Rung:
        """The rung to start of what `look` found. Raises what the plan refuses."""
        assert self.choice is not None
        candidate = self.choice.candidate
        if refusal := node.plan.refused:
            raise refusal.error()
        self.ladder = tuple(rung.id for rung in node.plan.rungs)
        self.record.enter(
            record.situation(fingerprint=node.plan.fingerprint, candidate_id=candidate.id,
                             ceiling_bytes=node.plan.ceiling_bytes), ladder=self.ladder, now=time.time())
        self.record.trial_started()
        wanted = self.record.rung.id
        self.rung = next((rung for rung in node.plan.rungs if rung.id == wanted), node.plan.full)
        return self.rung

    def outdated(self) -> str | None:
        """Whether a plan made now would start another worker: None when it would be the same, empty when it would
        differ, and the reason when this node refuses it now. Takes its time, as `look` does."""
        running, rung_id = self.rung, self.record.rung.id
        try:
            node = self.look()
        except ApplianceError as error:
            return error.line
        if refusal := node.plan.refused:
            return refusal.error().line
        rung = next((rung for rung in node.plan.rungs if rung.id == rung_id), node.plan.full)
        same = running is not None and (rung.argv, dict(rung.env)) == (running.argv, dict(running.env))
        return None if same else ""

    # ---- what happens ----------------------------------------------------------------------------------------------

    def fault(self, fault: Fault, *, answered_s: float, now: float) -> Step:
        """Remember the fault, decide, remember the decision."""
        candidate = self.choice.candidate if self.choice else None
        on_trial = self.choice is not None and self.choice.on_trial
        good = self.choice is not None and self.choice.fallback is not None
        self.record.note_fault(fault, now=now, answered_s=answered_s, candidate_id=candidate.id if candidate else "")
        step = next_step(self.record.past(), fault, now=now, ladder=self.ladder, on_trial=on_trial, good_available=good)
        self.record.take(step, fault, now=now)
        if step.action == "roll-back" and candidate is not None:
            self.record.fail_trial(candidate, fault.exception().line, now=now)
        self._repair = step.repair
        self.last_sentence = step.sentence
        return step

    def ready(self, now: float) -> None:
        self.last_sentence = ""
        if self.choice is not None and self.choice.on_trial:
            self.record.trial_ready(now=now)

    def measured(self, tokens_per_s: float | None) -> None:
        """What the served candidate's worker decoded while nobody else asked; None while that is not known."""
        if tokens_per_s is not None and self.choice is not None and tokens_per_s != self._measured:
            self._measured = tokens_per_s
            self.record.note_speed(self.choice.candidate.id, tokens_per_s)

    def judge(self, answered_s: float, now: float, *, speed_within_s: float) -> bool:
        """Look at the trial, where there is one. True when it has failed and something else must be started.
        `speed_within_s`: an idle worker's speed is known after so long."""
        if self.choice is None or not self.choice.on_trial or self.record.trial is None:
            return False
        candidate, good, settings = self.choice.candidate, self.record.good, self.parsed.settings
        alike = good is not None and trial.comparable(good, candidate)
        # Figures have no other purpose than speed.
        only_figures = good is not None and trial.only_figures(good, candidate)
        found = trial.judge(TrialView(
            trial=self.record.trial, answered_s=answered_s, trial_s=settings.trial_s,
            speed_before=self.record.speeds.get(good.id) if good is not None and alike else None,
            speed_now=self.record.speeds.get(candidate.id), speed_within_s=speed_within_s,
            loss_pct=settings.tune.upgrade_loss_pct, roll_back_on_loss=settings.tune.upgrade_rollback or only_figures))
        if found is None:
            return False
        if isinstance(found, Pass):
            self.record.keep(candidate, f"{candidate.title} is kept: {found.sentence}", now=now)
            self.choice = dataclasses.replace(self.choice, on_trial=False, sentence="", fallback=None)
            if archive.applied(self.directories.state) == measured.decision(candidate.digest, candidate.figures):
                archive.settled(self.directories.state)
            self.say(f"kept: {found.sentence}")
            workers.settled(self.directories.runtime)
            return False
        self.record.fail_trial(candidate, found.sentence, now=now)
        self.say(f"rolled back: {found.sentence}")
        return True

    def reset(self, now: float) -> bool:
        """Forget rungs, failed configurations and faults. True when something else should be served now."""
        lowered = self.record.rung.id != "full" or (self.choice is not None and self.choice.instead)
        self.record.reset(now=now)
        return lowered or self.rung is None

    def roll_back(self, now: float) -> str | None:
        return self.record.roll_back(now=now)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _installed(self, settings: Settings) -> str:
        """The installed worker. One that cannot be used fails its trial while the one before it is still there."""
        try:
            return find_worker_python(settings)
        except ConfigError:
            good = self.record.good
            if good is None or not os.access(good.worker_python, os.X_OK):
                raise
            return workers.resolved(PACKAGED_PYTHON)

    def _spare(self, served: Candidate) -> None:
        """Something else is wanted before the trial of what is served is over. It has answered: where nothing better is
        known, that is enough to come back to."""
        trial_now = self.record.trial
        if self.record.good is None and trial_now is not None and trial_now.ready_at is not None:
            self.record.keep(served, f"{served.title} has answered, and another one is wanted now", now=time.time())

    def _spare_earlier(self, wanted: Candidate, now: float) -> bool:
        """The same for what an earlier agent served: an upgrade restarts it, also before its first trial is over."""
        earlier = self.record.trial
        if self.record.good is not None or earlier is None or earlier.ready_at is None:
            return False
        if earlier.candidate.id == wanted.id:
            return False
        self.record.keep(earlier.candidate, f"{earlier.candidate.title} has answered, and another one is wanted now",
                         now=now)
        return True

    def check(self, parsed: Parsed) -> None:
        """What can be told at once of a wish, before a worker is ended for it. Raises ApplianceError."""
        check_possible(active_name(parsed, self.directories), store=Store(self.directories.store), env=self.env)
        python = parsed.settings.worker.python
        if python and not os.access(python, os.X_OK):
            raise ConfigError(f"worker.python {python} cannot be executed", do="correct it")

    def _digest(self, name: str) -> str:
        return Store(self.directories.store).names().get(name, "")

    def _choose(self, digest: str) -> None:
        name, python = str(self._wanted[0]), str(self._wanted[2])
        # Not known before the first preparation has asked the worker, which then chooses again.
        versions = {key: str(value) for key, value in self._versions.get(python, {}).items() if value}
        plain = trial.candidate(
            model=name, digest=digest, settings=trial.worker_settings(self.parsed.settings), worker_python=python,
            versions=versions)
        good = self.record.good
        # What measurements decide is known when its preparation has ended; until then nothing has changed in that.
        before = good.figures if good is not None and self._plain(good, good.digest).id == plain.id else {}
        figures = self._figures.get(plain.id, before)
        if measured.decision(digest, figures) in self.record.refused:  # since that preparation
            figures = before
        wanted: Candidate = trial.with_figures(plain, figures)
        if good is not None and not Store(self.directories.store).has(good.digest):
            good = None  # its model was removed: nothing to go back to
        if good is not None and not Path(good.worker_python).exists():
            good = None
        applied = archive.applied(self.directories.state)
        if applied in self.record.refused:  # it was tried
            archive.settled(self.directories.state)
            applied, self._wanted = "", (*self._wanted[:-1], "")
        asked = applied != "" and applied == measured.decision(wanted.digest, wanted.figures)
        self.choice = trial.choose(wanted, good, self.record.failed, asked=asked)

    def _why_given_up(self, served: Candidate, figures: Mapping[str, Any]) -> str:
        """Why these figures are not those of what is served."""
        reason = self.record.refused.get(measured.decision(served.digest, figures), "")
        return f"{trial.difference(served, trial.with_figures(served, figures))}: {reason}"

    def _plain(self, what: Candidate, digest: str) -> Candidate:
        """The candidate as this object and with the worker's present versions, before measurements decide anything."""
        versions = {key: str(value) for key, value in self._versions.get(what.worker_python, {}).items() if value}
        return trial.candidate(model=what.model, digest=digest, settings=what.settings, versions=versions,
                               worker_python=what.worker_python)
