"""PURE: a new model, setting or worker version is on trial until it has proved itself; else the last good one serves.

    candidate    what would be served: model digest, the settings that reach the worker, the worker and its versions,
                 and what the node's measurements decide otherwise than rules of thumb (`Plan.tuned`)
    choose       wanted, last good, failed ones -> which candidate to serve, and whether it is on trial
    judge        the verdicts over a running trial -> Pass, Fail or None (not known yet)

Rules:

* A candidate's id says what it is, not what it is called: renaming a model is no change, another byte of it is.
* One that failed is not tried again while there is a good one to serve instead; it counts as new again as soon as
  anything about it changes, or after `applianctl reset`.
* The very first candidate is on trial too; it has nothing to go back to, so its failures are those of the service.
* The same worker folder with other versions in it cannot be turned back: the last good model and settings are then
  served by the versions that are there.
* Other figures alone need no trial, as they count at the next start, unless the operator asked for them
  (`tune --apply`). Figures that failed theirs are not wanted again, whatever else changes (`record.refused`): what is
  served then, by those before, is what is wanted.
* A trial fails when one verdict fails, and passes when all pass. Whether a fault ends a trial is decided by
  `appliance.recovery` (`roll-back`).
* Times are measured durations; wall clocks are kept to be shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.settings import Settings, from_tree, to_dict

WORKER_KEYS = ("memory.ceiling", "memory.reserve", "cpu.threads", "cpu.cpus", "cpu.engines", "context", "max_running",
               "kernel", "dtype", "compile", "worker.env", "worker.extra_args")
"""The settings that change what the worker does; all others may change without a trial."""
MAX_STARTS = 3
"""Starts of a trial without becoming ready, agent restarts and power cuts included."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Made by `candidate`. `id`: 12 hex digits over all but the model's name; `settings`: dotted key -> JSON value;
    `figures`: what measurements decided, empty where they decide nothing or none are known."""

    id: str
    model: str
    digest: str
    settings: Mapping[str, Any]
    worker_python: str
    versions: Mapping[str, str]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.model} ({self.id})"


def comparable(old: Candidate, new: Candidate) -> bool:
    """Whether only worker, versions and figures differ, so that a difference in speed is theirs."""
    return (old.digest, dict(old.settings)) == (new.digest, dict(new.settings)) and old.id != new.id


def only_figures(old: Candidate, new: Candidate) -> bool:
    """Whether nothing else differs than what measurements decided."""
    return old.id != new.id and with_figures(old, new.figures).id == new.id


def with_figures(what: Candidate, figures: Mapping[str, Any]) -> Candidate:
    """The same, planned by other figures."""
    return candidate(model=what.model, digest=what.digest, settings=what.settings, worker_python=what.worker_python,
                     versions=what.versions, figures=figures)


def candidate(*, model: str, digest: str, settings: Mapping[str, Any], worker_python: str,
              versions: Mapping[str, str], figures: Mapping[str, Any] | None = None) -> Candidate:
    """`settings`: of `worker_settings`; `versions`: what the worker says of itself; `figures`: `Plan.tuned`."""
    what = {"digest": digest, "settings": dict(settings), "worker_python": worker_python, "versions": dict(versions),
            **({"figures": dict(figures)} if figures else {})}
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return Candidate(id=hashlib.sha256(text.encode()).hexdigest()[:12], model=model, digest=digest,
                     settings=json.loads(text)["settings"], worker_python=worker_python, versions=dict(versions),
                     figures=dict(figures or {}))


def worker_version(python: str) -> str | None:
    """The version of a worker that a package has put into a folder of its own; None for another worker."""
    parts = python.split("/")[-4:]
    return parts[1] if parts[0] == "workers" else None


def to_json(what: Candidate) -> dict[str, Any]:
    return dataclasses.asdict(what)


def from_json(tree: Any) -> Candidate | None:
    """The candidate that `to_json` wrote; None for anything else. The id is computed anew, never believed."""
    try:
        if not isinstance(tree["settings"].get("worker.env") or {}, dict):
            return None
        return candidate(model=str(tree["model"]), digest=str(tree["digest"]), settings=dict(tree["settings"]),
                         worker_python=str(tree["worker_python"]),
                         versions={str(k): str(v) for k, v in dict(tree["versions"]).items()},
                         figures=dict(tree.get("figures") or {}))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def worker_settings(settings: Settings) -> dict[str, Any]:
    """The part of the settings that reaches the worker, as dotted key -> value."""
    return {key: _get(to_dict(settings), key) for key in WORKER_KEYS}


def served_settings(settings: Settings, what: Candidate) -> Settings:
    """The operator's settings with those of a candidate in the places that reach the worker. Raises ConfigError when
    the candidate's values cannot be read any more."""
    tree = to_dict(settings)
    for key in WORKER_KEYS:
        _set(tree, key, what.settings.get(key))
    _set(tree, "model", what.model)
    _set(tree, "worker.python", what.worker_python)
    return from_tree(tree, origin="the last good configuration")


def difference(old: Candidate, new: Candidate) -> str:
    """What changed between two candidates, as `name: old -> new` parts on one line. It is shown to everybody, so of the
    worker's environment only the names: a value may be a secret."""
    parts = []
    if old.digest != new.digest:
        parts.append("model: " + " -> ".join(f"{one.model} ({one.digest[:12] or 'not stored'})" for one in (old, new)))
    for key in WORKER_KEYS:
        if key == "worker.env":
            names = _differing(old.settings.get(key) or {}, new.settings.get(key) or {})
            parts += [f"{key}: other value of {', '.join(names)}"] if names else []
        elif old.settings.get(key) != new.settings.get(key):
            parts.append(f"{key}: {_shown(old.settings.get(key))} -> {_shown(new.settings.get(key))}")
    if old.worker_python != new.worker_python:
        parts.append(f"worker: {worker_version(old.worker_python) or old.worker_python} -> "
                     f"{worker_version(new.worker_python) or new.worker_python}")
    for name in _differing(old.figures, new.figures):
        before, after = (one.figures.get(name, "rule of thumb") for one in (old, new))
        parts.append(f"measured {name}: {before} -> {after}")
    for name in _differing(old.versions, new.versions):
        parts.append(f"{name}: {old.versions.get(name, 'none')} -> {new.versions.get(name, 'none')}")
    return "; ".join(parts)


# ---- which one is served ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`fallback`: what to roll back to, or None; `instead`: something else than what is wanted is served; `sentence`:
    why this one, empty when it is simply the wanted one; `adopted`: it takes the good one's place without a trial."""

    candidate: Candidate
    on_trial: bool
    sentence: str
    fallback: Candidate | None = None
    instead: bool = False
    adopted: bool = False


def choose(wanted: Candidate, good: Candidate | None, failed: Mapping[str, str], *, asked: bool = False) -> Choice:
    """`failed`: id -> the reason for which that candidate was given up; `asked`: the operator asked for the wanted
    one's figures."""
    fallback = _available(wanted, good, failed)
    if good is not None and wanted.id == good.id:
        return Choice(candidate=wanted, on_trial=False, sentence="")
    if good is not None and only_figures(good, wanted) and not asked and wanted.id not in failed:
        return Choice(candidate=wanted, on_trial=False, adopted=True, sentence="")
    if wanted.id not in failed:
        change = difference(good, wanted) if good else ""
        return Choice(candidate=wanted, on_trial=True, fallback=fallback,
                      sentence=f"on trial: {change}" if change else "on trial: the first configuration of this node")
    if fallback is None:
        return Choice(candidate=wanted, on_trial=True,
                      sentence=f"on trial again, because nothing else is known to be good; before: {failed[wanted.id]}")
    return Choice(candidate=fallback, on_trial=False, instead=True,
                  sentence=f"serving the last good configuration, not the wanted one ({difference(fallback, wanted)}): "
                           f"{failed[wanted.id]}")


def _available(wanted: Candidate, good: Candidate | None, failed: Mapping[str, str]) -> Candidate | None:
    """The good candidate as it can be served now; None when that is the wanted one itself, or has failed since."""
    if good is None:
        return None
    if good.worker_python == wanted.worker_python and good.versions != wanted.versions:
        good = candidate(model=good.model, digest=good.digest, settings=good.settings,
                         worker_python=good.worker_python, versions=wanted.versions, figures=good.figures)
    return None if good.id == wanted.id or good.id in failed else good


# ---- the trial -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`began_at`, `ready_at`: wall clock, to be shown; `attempts`: starts since it was ready last."""

    candidate: Candidate
    began_at: float
    ready_at: float | None = None
    attempts: int = 0

    def started(self) -> Trial:
        return dataclasses.replace(self, attempts=self.attempts + 1, ready_at=None)

    def ready(self, now: float) -> Trial:
        return dataclasses.replace(self, attempts=0, ready_at=now)


def start_refusal(trial: Trial) -> str | None:
    """Why a trial must not be started once more: it has had its starts. None when it may."""
    if trial.attempts >= MAX_STARTS:
        return f"it was started {trial.attempts} times and did not become ready"
    return None


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """What verdicts judge. `answered_s`: how long the present worker has answered without a fault, 0 while it does not.

    `trial_s`: the setting. `speed_before`: tokens/s of the last good candidate where it is `comparable`, else None;
    `speed_now`: of this one, None until it is measured, which takes an idle worker of its speed `speed_within_s`;
    `loss_pct`, `roll_back_on_loss`: what may be lost, and whether more than that ends the trial.
    """

    trial: Trial
    answered_s: float
    trial_s: float
    speed_before: float | None = None
    speed_now: float | None = None
    speed_within_s: float = 0.0
    loss_pct: float = 10.0
    roll_back_on_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class Pass:
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Fail:
    sentence: str


Verdict = Callable[[TrialView], Pass | Fail | None]


def health(view: TrialView) -> Pass | Fail | None:
    """Passes once the worker has answered for `trial_s` without a fault; with 0 s at its first answer."""
    if view.trial.ready_at is None:
        return None
    if view.answered_s >= view.trial_s:
        return Pass(sentence=f"it has answered for {view.answered_s:.0f} s without a fault")
    return None


def speed(view: TrialView) -> Pass | Fail | None:
    """An upgrade or other figures must not make it slower. Nothing to compare passes; so does a service that is never
    idle enough to be measured, after twice the trial and not before a slow worker could have been measured."""
    if view.speed_before is None:
        return Pass(sentence="")
    if view.speed_now is None:
        late = view.answered_s >= max(2 * view.trial_s, view.speed_within_s)
        return Pass(sentence="its speed could not be measured") if late else None
    loss_pct = 100 * (1 - view.speed_now / view.speed_before)
    figures = f"{view.speed_now:.1f} tokens/s, {view.speed_before:.1f} before"
    if loss_pct <= view.loss_pct:
        return Pass(sentence=figures)
    lost = f"{figures}: {loss_pct:.0f} % slower, {view.loss_pct:g} % are allowed"
    return Fail(sentence=lost) if view.roll_back_on_loss else Pass(sentence=lost)


VERDICTS: tuple[Verdict, ...] = (health, speed)


def judge(view: TrialView, verdicts: Sequence[Verdict] = VERDICTS) -> Pass | Fail | None:
    """One failure fails; a pass needs all of them; else None: go on."""
    found = [verdict(view) for verdict in verdicts]
    for one in found:
        if isinstance(one, Fail):
            return one
    passed = [one for one in found if isinstance(one, Pass)]
    if len(passed) < len(found):
        return None
    return Pass(sentence="; ".join(one.sentence for one in passed if one.sentence))


def _get(tree: Mapping[str, Any], dotted: str) -> Any:
    value: Any = tree
    for part in dotted.split("."):
        value = value[part]
    return value


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *groups, last = dotted.split(".")
    for part in groups:
        tree = tree[part]
    tree[last] = value


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _shown(value: Any) -> str:
    return "planned" if value is None else json.dumps(value)
