"""What the agent remembers across restarts, reboots and power cuts: `state/record.json`.

Holds: the rung of each situation and why, the latest faults, the last good configuration, the trial, what has failed,
which figures were given up, the history, and the agent's last word. Decides nothing. Rules:

* Every change is written at once, atomically (draft, fsync, rename), mode 0600. A disk that refuses never stops the
  service: the change is kept in memory, `problem` says why, and the next change tries again.
* Bounded: FAULTS, HISTORY, FAILED and SITUATIONS entries; the oldest go.
* What cannot be read (garbage, another schema, a folder in its place) is kept aside as `record.json.bad`, and the
  record starts empty; what cannot be set aside either is named with what to do.
* A rung belongs to a situation (host, ceiling, candidate). Another situation has its own rung and begins at `full`;
  `reset` forgets all rungs, failed candidates, figures that were given up, and faults.
* A candidate that differs from the good one in figures alone and fails is no failed candidate: its figures are given
  up (`refused`: `measured.decision` -> reason), whatever setting or version they come with later.
* One writer: the agent while it runs, else the command line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from appliance import disk, measured, trial
from appliance.errors import StoreError
from appliance.faults import Fault
from appliance.recovery import Happened, Past, Step
from appliance.regularfile import read_regular
from appliance.trial import Candidate, Trial

SCHEMA = 1
FILE = "record.json"
MAX_BYTES = 4 * 1024**2
FAULTS, HISTORY, FAILED, SITUATIONS = 50, 200, 50, 16
SENTENCE = 500
LAST_TIME = 253402300799.0
"""The end of the year 9999."""


def situation(*, fingerprint: str, candidate_id: str, ceiling_bytes: int | None) -> str:
    """What a remembered rung holds for: this CPU and software, this memory (to 0.1 GiB: the kernel's own share of it
    differs from boot to boot) and this candidate."""
    ceiling = f"{ceiling_bytes / 1024**3:.1f}" if ceiling_bytes else "unknown"
    return f"{fingerprint}/{ceiling}/{candidate_id}"


@dataclass(frozen=True, kw_only=True)
class RungKept:
    """`floor` and `tried`: as in `recovery.Past`; `since`: wall clock."""

    id: str = "full"
    reason: str = ""
    since: float = 0.0
    floor: str = "full"
    tried: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FaultSeen:
    """One fault as it is remembered; `id`: of the candidate that was served."""

    name: str
    at: float
    rung: str
    answered_s: float
    situation: str
    id: str
    sentence: str


@dataclass(kw_only=True)
class Record:
    """Made by `load`. Change it through its methods: each writes the file."""

    path: Path
    situation: str = ""
    rungs: dict[str, RungKept] = field(default_factory=dict)
    faults: list[FaultSeen] = field(default_factory=list)
    good: Candidate | None = None
    previous: Candidate | None = None
    trial: Trial | None = None
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    restarts_total: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    last_word: dict[str, Any] | None = None
    warning: str = ""
    problem: str = ""

    # ---- what the loop asks ----

    @property
    def rung(self) -> RungKept:
        return self.rungs.get(self.situation, RungKept())

    def past(self) -> Past:
        """What `recovery.next_step` needs to know of the present situation."""
        faults = tuple(Happened(name=one.name, at=one.at, rung=one.rung, answered_s=one.answered_s)
                       for one in self.faults if one.situation == self.situation)
        rung = self.rung
        return Past(faults=faults, rung=rung.id, floor=rung.floor, tried=rung.tried)

    # ---- what the loop tells ----

    def enter(self, key: str, *, ladder: tuple[str, ...], now: float) -> None:
        """The situation in which the worker is started next (see `situation`); `ladder`: ids of the plan's rungs. A
        rung that the plan does not have any more is forgotten."""
        left, self.situation = self.rung if self.situation else RungKept(), key
        if self.rung.id not in ladder:
            self.note("rung", f"`{self.rung.id}` is no rung of the plan any more: all of the plan is tried again",
                      now=now, save=False)
            self.rungs.pop(key, None)
        elif left.id != "full" and self.rung.id == "full":
            self.note("rung", f"another situation: all of the plan is tried again (it was `{left.id}`)", now=now,
                      save=False)
        self.save()

    def note_fault(self, fault: Fault, *, now: float, answered_s: float, candidate_id: str = "") -> None:
        """Remember a fault of the present situation, before `next_step` is asked about it."""
        self.faults.append(FaultSeen(
            name=fault.name, at=now, rung=self.rung.id, answered_s=answered_s, situation=self.situation,
            id=candidate_id, sentence=fault.sentence[:SENTENCE]))
        self.restarts_total[fault.name] = self.restarts_total.get(fault.name, 0) + 1
        self.save()

    def take(self, step: Step, fault: Fault, *, now: float) -> None:
        """Remember the rung that a step chose. Roll-backs are `fail_trial`'s."""
        rung = self.rung
        if step.action == "roll-back" or step.action == "stop" or step.rung == rung.id:
            return
        floor = step.rung if fault.kind == "capability" and step.action == "step-down" else rung.floor
        tried = tuple(dict.fromkeys((*rung.tried, rung.id, step.rung)))
        self.rungs.pop(self.situation, None)
        self.rungs[self.situation] = RungKept(id=step.rung, reason=step.sentence[:SENTENCE], since=now, floor=floor,
                                              tried=tried)
        self.note("rung", step.sentence, now=now)

    def begin_trial(self, candidate: Candidate, sentence: str, *, now: float) -> None:
        """The candidate is on trial from now; one that is on trial already goes on as it was."""
        if self.trial is not None and self.trial.candidate.id == candidate.id:
            return
        self.trial = Trial(candidate=candidate, began_at=now)
        self.note("trial", sentence, candidate.id, now=now)

    def trial_started(self) -> None:
        if self.trial is not None:
            self.trial = self.trial.started()
            self.save()

    def trial_ready(self, *, now: float) -> None:
        if self.trial is not None:
            self.trial = self.trial.ready(now)
            self.save()

    def end_trial(self) -> None:
        """The trial is over without a result: something else is wanted now."""
        if self.trial is not None:
            self.trial = None
            self.save()

    def keep(self, candidate: Candidate, sentence: str, *, now: float) -> None:
        """The trial passed: this is the good one."""
        self.trial = None
        if self.good is not None and self.good.id != candidate.id:
            self.previous = self.good
        self.good = candidate
        self.failed.pop(candidate.id, None)
        self.refused.pop(measured.decision(candidate.digest, candidate.figures), None)
        self.note("kept", sentence, candidate.id, now=now)

    def adopt(self, candidate: Candidate, sentence: str, *, now: float) -> None:
        """The good one, planned by other figures: it stays the good one."""
        self.good = candidate
        self.note("figures", sentence, candidate.id, now=now)

    def fail_trial(self, candidate: Candidate, reason: str, *, now: float, event: str = "rolled-back") -> None:
        """The candidate is given up, for this reason. The good one never is: nothing would be left to serve."""
        self.trial = None
        if self.good is not None and candidate.id == self.good.id:
            return
        if self.good is not None and trial.only_figures(self.good, candidate):
            given_up, key = self.refused, measured.decision(candidate.digest, candidate.figures)
        else:
            given_up, key = self.failed, candidate.id
        given_up.pop(key, None)
        given_up[key] = reason[:SENTENCE]
        self.note(event, reason, candidate.id, now=now)

    def roll_back_refusal(self) -> str | None:
        """Why there is nothing to go back to; None when there is."""
        if self.good is not None and self.trial is not None:
            return None
        if self.good is not None and self.previous is not None and not self._went_back():
            version = trial.worker_version(self.previous.worker_python)
            if version and not Path(self.previous.worker_python).exists():
                return (f"the worker before, {version}, went when its successor was kept; "
                        f"`apt install appliance={version} appliance-worker={version}` brings it back")
            return None
        if self.good is not None and self._went_back():
            return "the last good configuration is served already; choose another with `applianctl apply`"
        return "no earlier configuration is known to be good"

    def roll_back(self, *, now: float) -> str | None:
        """By hand: give up the trial, or the good one for the one before it. The reason when that is not possible."""
        if refusal := self.roll_back_refusal():
            return refusal
        reason = "rolled back by the operator"
        if self.trial is not None:
            self.fail_trial(self.trial.candidate, reason, now=now)
        elif self.good is not None and self.previous is not None:
            given_up, self.good, self.previous = self.good, self.previous, None
            self.failed.pop(self.good.id, None)
            self.refused.pop(measured.decision(self.good.digest, self.good.figures), None)
            self.fail_trial(given_up, reason, now=now)
        return None

    def _went_back(self) -> bool:
        """Whether the latest change was the way back to the good configuration."""
        changes = [one["event"] for one in self.history if one["event"] in ("trial", "kept", "rolled-back", "reset")]
        return changes[-1:] == ["rolled-back"]

    def note_speed(self, candidate_id: str, tokens_per_s: float) -> None:
        """Decode speed of a candidate on this node, measured while nobody else asked."""
        self.speeds.pop(candidate_id, None)
        self.speeds[candidate_id] = round(tokens_per_s, 2)
        self.save()

    def reset(self, *, now: float) -> None:
        """Forget rungs, what was given up, and faults; the good configuration, the totals and the history stay."""
        self.rungs.clear()
        self.failed.clear()
        self.refused.clear()
        self.faults.clear()
        self.note("reset", "rungs, failed configurations and faults were forgotten by the operator", now=now)

    def say(self, *, state: str, sentence: str, exit_code: int | None, now: float) -> None:
        """The agent's last word, for `status` when no agent runs."""
        self.last_word = {"at": now, "state": state, "sentence": sentence, "exit_code": exit_code}
        self.save()

    def note(self, event: str, sentence: str, candidate_id: str = "", *, now: float, save: bool = True) -> None:
        """One line of the history."""
        self.history.append({"at": now, "event": event, "sentence": sentence[:SENTENCE], "id": candidate_id})
        if save:
            self.save()

    # ---- the file ----

    def save(self) -> str | None:
        """Write it; the reason when that is not possible (also in `problem`)."""
        self._bound()
        draft = self.path.with_name(f".{FILE}.{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            disk.replace(self.path, json.dumps(self.to_json(), indent=1), draft=draft)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            self.problem = f"{self.path} cannot be written: {error.strerror or error}"
            return self.problem
        self.problem = ""
        return None

    def to_json(self) -> dict[str, Any]:
        """The JSON value of the file; `rung` is the present situation's, for readers."""
        return {
            "schema": SCHEMA, "situation": self.situation, "rung": asdict(self.rung),
            "rungs": {key: asdict(rung) for key, rung in self.rungs.items()},
            "faults": [asdict(one) for one in self.faults],
            "good": trial.to_json(self.good) if self.good else None,
            "previous": trial.to_json(self.previous) if self.previous else None,
            "trial": {"candidate": trial.to_json(self.trial.candidate), "began_at": self.trial.began_at,
                      "ready_at": self.trial.ready_at, "attempts": self.trial.attempts} if self.trial else None,
            "failed": self.failed, "refused": self.refused, "history": self.history,
            "restarts_total": self.restarts_total, "speeds": self.speeds, "last_word": self.last_word,
        }

    def _bound(self) -> None:
        del self.faults[:-FAULTS]
        del self.history[:-HISTORY]
        for by_key in (self.failed, self.refused, self.speeds):
            for key in list(by_key)[:-FAILED]:
                del by_key[key]
        for key in list(self.rungs)[:-SITUATIONS]:
            del self.rungs[key]


def load(state: Path, *, keep: bool = False) -> Record:
    """Read the record of this state folder; an empty one when there is none. Never raises: what is wrong is in
    `warning`. `keep`: only look, and leave a file that cannot be read where it is."""
    path = state / FILE
    try:
        data = read_regular(path, most_bytes=MAX_BYTES)
        if len(data) > MAX_BYTES:
            raise ValueError("too large")
        return _read(path, json.loads(data))
    except FileNotFoundError:
        return Record(path=path)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError):
        why = "is damaged"
    if keep:
        return Record(path=path, warning=f"{path} {why}")
    aside = path.with_name(f"{FILE}.bad")
    try:
        path.replace(aside)
    except OSError as error:
        return Record(path=path, warning=f"{path} {why}, and cannot be moved to {aside.name} ({error.strerror}): move "
                                         "it away, or rungs, trials and history are forgotten at each start")
    return Record(path=path, warning=f"{path} {why} and is kept as {aside.name}: rungs, trials and history begin anew")


def check_written(known: Record) -> None:
    """For commands, which unlike the service cannot go on without it: raise StoreError when it is not in the file."""
    if known.problem:
        raise StoreError("the record cannot be changed", why=known.problem, do="check the disk and the file's owner")


def _read(path: Path, tree: Any) -> Record:
    if tree["schema"] != SCHEMA:
        raise ValueError("another schema")
    on_trial = tree["trial"]
    began = trial.from_json(on_trial["candidate"]) if on_trial else None
    ready_at = on_trial["ready_at"] if on_trial else None
    word = tree["last_word"]
    return Record(
        path=path,
        situation=str(tree["situation"]),
        rungs={str(key): RungKept(id=str(one["id"]), reason=str(one["reason"]), since=_time(one["since"]),
                                  floor=str(one["floor"]), tried=tuple(map(str, one["tried"])))
               for key, one in tree["rungs"].items()},
        faults=[FaultSeen(name=str(one["name"]), at=_time(one["at"]), rung=str(one["rung"]),
                          answered_s=_amount(one["answered_s"]), situation=str(one["situation"]), id=str(one["id"]),
                          sentence=str(one["sentence"])) for one in tree["faults"]],
        good=trial.from_json(tree["good"]),
        previous=trial.from_json(tree["previous"]),
        trial=Trial(candidate=began, began_at=_time(on_trial["began_at"]), attempts=int(on_trial["attempts"]),
                    ready_at=None if ready_at is None else _time(ready_at)) if began else None,
        failed={str(key): str(reason) for key, reason in tree["failed"].items()},
        refused={str(key): str(reason) for key, reason in tree.get("refused", {}).items()},
        history=[{"at": _time(one["at"]), "event": str(one["event"]), "sentence": str(one["sentence"]),
                  "id": str(one["id"])} for one in tree["history"]],
        restarts_total={str(name): int(count) for name, count in tree["restarts_total"].items()},
        speeds={str(name): _amount(speed) for name, speed in tree.get("speeds", {}).items()},
        last_word={"at": _time(word["at"]), "state": str(word["state"]), "sentence": str(word["sentence"]),
                   "exit_code": None if word["exit_code"] is None else int(word["exit_code"])} if word else None,
    )


def _amount(value: Any) -> float:
    """What can be measured. Raises ValueError."""
    if not 0 <= float(value) < math.inf:
        raise ValueError("no amount")
    return float(value)


def _time(value: Any) -> float:
    """Seconds since 1970 that a calendar can show. Raises ValueError."""
    if not 0 <= float(value) <= LAST_TIME:
        raise ValueError("no time")
    return float(value)
