"""The status: one value that says everything, built after each turn and published to the board and the status file.

Does: collect, keep what lasts between turns, measure memory and folders in the background. Does not: decide. Times that
end in `_at` are wall clock seconds; `None` means unknown or not yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from appliance import __version__, status
from appliance.board import Board
from appliance.budget import show
from appliance.errors import ApplianceError
from appliance.faults import Fault
from appliance.identity import identity
from appliance.node import Node
from appliance.plan import Rung
from appliance.quantize.format import parse_config
from appliance.recovery import Step
from appliance.supervisor import folders
from appliance.supervisor.background import Background
from appliance.supervisor.course import Course
from appliance.supervisor.life import Life
from appliance.supervisor.notify import Notifier
from appliance.supervisor.worker import WorkerTree

if TYPE_CHECKING:
    from appliance.front.door import FrontDoor

MEMORY_EVERY_S = 15.0
SIZES_EVERY_S = 300.0
WRITE_EVERY_S = 1.0
RESTARTS = 20


class Snapshot:
    """Made once an agent; `publish` once a turn."""

    def __init__(self, *, board: Board, course: Course, notifier: Notifier, unit: str | None) -> None:
        self.board = board
        self.course = course
        self.was_ready = False
        self.address = ""
        self.ready_after_s = 0.0
        self._began = time.time()
        self._restarts: list[dict[str, Any]] = []
        self._warnings: dict[str, str] = {}
        self._measured: Background[dict[str, int]] | None = None
        self._measured_at = -1e9
        self._sizes: Background[dict[str, int]] | None = None
        self._sizes_at = -1e9
        self._written = (-1e9, "")
        managed = "systemd" if notifier.listening else None
        self.values: dict[str, Any] = {
            "schema": status.SCHEMA, "agent": identity(), "version": __version__, "started_at": self._began,
            "state": "starting", "sentence": "starting", "last_answer_at": None, "ready_at": None,
            "managed_by": managed, "unit": (unit or "appliance.service") if managed else None,
            "log": str(course.directories.state / "worker.log"),
            "agent_log": str(course.directories.state / "agent.log"),
        }

    def plan(self, node: Node, rung: Rung) -> None:
        """What the next worker will be."""
        kernels = {choice.name: choice.value for choice in node.plan.choices}
        config = parse_config(node.model.quantization)
        self.values |= {
            "model": node.model.name, "digest": node.model.digest, "tier": node.host.cpu.tier,
            "recipe": {"bits_per_weight": round(node.model.bits_per_weight, 2), "group_size": node.model.group_size,
                       "table_bits": config.stored_table_bits},
            "kernel": f"{kernels['kernel, one row']} / {kernels['kernel, many rows']}", "rung": rung.id,
            "threads": rung.threads, "engines": max(1, len(rung.engines)), "context": rung.context,
            "ceiling_bytes": node.plan.ceiling_bytes, "usable_bytes": node.plan.usable_bytes,
            "fingerprint": node.plan.fingerprint, "versions": dict(node.versions), "max_running": rung.running,
            "chat": node.model.chat, "chat_fault": node.model.template_fault, "tools": kernels["tool calls"],
            "figures": dict(self.course.choice.candidate.figures) if self.course.choice else {},
        }

    def plan_sentence(self, node: Node, rung: Rung) -> str:
        on = f" on rung `{rung.id}`" if rung.id != "full" else ""
        return (f"plan: {node.model.name} on {node.host.cpu.tier}{on}, {_threads(rung)}, context {rung.context}, "
                f"key/value cache {show(rung.kv_bytes)}, peak {show(node.plan.peak_bytes)} of "
                f"{show(node.plan.usable_bytes or 0)}")

    def ready(self, life: Life, now: float) -> None:
        self.was_ready = True
        self.values["fault"] = None
        self._measured_at = self._sizes_at = -1e9  # the figures from before the load say little
        self.ready_after_s = time.time() - self._began if self.values["ready_at"] is None else now - life.began
        self.values |= {"ready_at": time.time(), "ready_after_s": round(self.ready_after_s, 1)}

    def fault(self, fault: Fault, step: Step) -> None:
        self._restarts.append({"at": time.time(), "fault": fault.name, "sentence": step.sentence})
        del self._restarts[:-RESTARTS]
        self.values["fault"] = fault.name

    def warn(self, topic: str, sentence: str) -> None:
        """A warning under a topic of `metrics.TOPICS`; an empty sentence takes it away."""
        self._warnings[topic] = sentence

    def without_worker(self) -> None:
        self.values |= {"memory_bytes": None, "worker_pid": None, "pids": [], "tokens_per_s": None}
        self._measured = None

    def publish(self, *, state: str, phase: str, ready: bool, life: Life | None, worker: WorkerTree | None,
                door: FrontDoor | None, now: float, progress: Mapping[str, Any] | None, until: float | None) -> str:
        """Publish this moment; returns the sentence without ages, which systemd and the log get."""
        sentence = _sentence(state, phase, progress, self.values)
        traffic = self.board.traffic
        self.address = door.address if door is not None else ""
        self._measure(worker, now)
        wall = time.time()
        trial = self.course.record.trial
        choice = self.course.choice
        rolled_back = choice.sentence if choice is not None and not choice.on_trial else ""
        said: dict[str, Sequence[str]] = {
            **{topic: (text,) for topic, text in self._warnings.items()}, "worker": (life.worn if life else "",),
            "record": (self.course.record.problem,), "settings": self.course.parsed.warnings,
            "access": traffic.warnings}
        if life is not None and life.answered is not None:
            self.values["last_answer_at"] = wall - (now - life.answered)
        self.values |= {
            "state": state, "sentence": sentence, "phase": phase, "progress": dict(progress) if progress else None,
            "live": True, "ready": ready, "running": traffic.running, "queued": traffic.queued,
            "address": self.address or None, "max_queued": door.max_queued if door is not None else None,
            "tokens_per_s": life.tokens_per_s if life is not None else None,
            "decode_tokens_per_s": self.course.record.speeds.get(choice.candidate.id) if choice is not None else None,
            "rung_reason": self.course.record.rung.reason if self.values.get("rung") != "full" else None,
            "retry_at": wall + until - now if until is not None else None,
            "probe": {"seconds": life.last_answer.seconds if life.last_answer else None,
                      "deadline_s": life.deadline_s, "failed": life.probe_failures,
                      "sentence": life.probe_failure or life.sentence_of_trouble} if life is not None else None,
            "restarts": list(self._restarts), "restarts_total": dict(self.course.record.restarts_total),
            "trial": {"id": trial.candidate.id, "since": trial.began_at, "sentence": choice.sentence if choice else "",
                      "until": (trial.ready_at + self.course.parsed.settings.trial_s) if trial.ready_at else None}
            if trial is not None else None,
            "rolled_back": rolled_back or None, "figures_given_up": self.course.given_up or None,
            "warnings": [text for texts in said.values() for text in texts if text],
            "warned": sorted(topic for topic, texts in said.items() if any(texts)),
            "worker_pid": worker.pid if worker is not None else None,
        }
        self.board.publish(dict(self.values))
        if now - self._written[0] >= WRITE_EVERY_S or sentence != self._written[1]:
            self._written = (now, sentence)
            status.write(self.course.directories.runtime, self.values)
        return sentence

    def last_word(self, error: ApplianceError | None) -> None:
        """The agent ends: what `status` says from now on, in the runtime folder and in the record."""
        state = "failed" if error is not None else "stopped"
        sentence = f"failed: {error.line}" if error is not None else "stopped: no worker process is left"
        code = error.exit_code if error is not None else 0
        self.values |= {"state": state, "sentence": sentence, "exit_code": code, "ready": False, "live": False,
                        "running": 0, "queued": 0, "worker_pid": None}
        status.write(self.course.directories.runtime, self.values)
        self.course.record.say(state=state, sentence=sentence, exit_code=code, now=time.time())

    def _measure(self, worker: WorkerTree | None, now: float) -> None:
        if self._measured is not None and self._measured.done:
            self.values |= self._measured.result or {}
            self._measured = None
        if self._sizes is not None and self._sizes.done:
            self.values |= self._sizes.result or {}
            self._sizes = None
        if worker is not None and self._measured is None and now - self._measured_at >= MEMORY_EVERY_S:
            self._measured_at = now
            members = worker.members(now)
            self.values["pids"] = [process.pid for process in members]
            self._measured = Background(lambda: {"memory_bytes": folders.tree_bytes(members),
                                                 "agent_memory_bytes": _own_bytes()}, name="memory")
        if self._sizes is None and now - self._sizes_at >= SIZES_EVERY_S:
            self._sizes_at = now
            self._sizes = Background(lambda: folders.sizes(self.course.directories), name="sizes")


def _sentence(state: str, phase: str, progress: Mapping[str, Any] | None, values: Mapping[str, Any]) -> str:
    if state == "ready":
        lower = f", on rung `{values['rung']}`" if values.get("rung") not in (None, "full") else ""
        return f"ready: serving {values.get('model')}{lower}"
    share = ""
    if progress and progress.get("total"):
        share = f", {int(progress['done'] or 0) * 100 // int(progress['total'])} %"
    return f"{state}: {phase}{share}"


def _threads(rung: Rung) -> str:
    return (f"{len(rung.engines)} engines of " if rung.engines else "") + f"{rung.threads} threads"


def _own_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
