"""The agent: one loop that never waits, from a taken lock to an empty process list. Drawn in docs/architecture.md.

    preparing -> loading -> answering -> ready <-> busy
                    any fault: ending -> waiting -> preparing   (retry, a rung down, the last good configuration)
                               ending -> failed                 (nothing helps: one sentence, an exit code)
    drained (requests refused, the worker kept) -> stopping -> stopped

`_turn` is what the present stage does in one turn; each takes well below 100 ms. After every turn the status is
published, systemd told, the watchdog fed. Rules: one agent per runtime folder; the front door opens first and closes
last; a new worker starts only when nothing of the old one is left; on every way out no child is left. What a fault
changes is decided by `course`, how a worker is judged by `life`.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from appliance.board import Board, Command, gate
from appliance.directories import AGENT_SOCKET, WORKER_SOCKET, Directories, ensure, sockets
from appliance.errors import ApplianceError, TransientError
from appliance.faults import Fault, of_error
from appliance.node import Node
from appliance.plan import Rung
from appliance.settings import Parsed
from appliance.supervisor import folders, leaf
from appliance.supervisor import worker as worker_process
from appliance.supervisor.background import Background
from appliance.supervisor.course import Course
from appliance.supervisor.life import Life
from appliance.supervisor.limits import LimitWatch
from appliance.supervisor.notify import Notifier
from appliance.supervisor.signals import as_commands
from appliance.supervisor.snapshot import Snapshot
from appliance.supervisor.stages import Ending, Preparation
from appliance.supervisor.start import start

if TYPE_CHECKING:
    from appliance.front.door import FrontDoor

STOP_GRACE_S = 10.0
"""What a worker without requests gets between SIGTERM and SIGKILL."""
EXTEND_S = 120.0
COMMANDS_A_TURN = 16
DOOR_DEAD_S = 15.0
"""A front door that has not moved for so long is no front door: the agent ends, and whoever started it starts anew."""

Say = Callable[[str], None]


class Agent:
    """One run of `applianctl serve`. `configure` reads the settings anew; `say` receives each new sentence."""

    def __init__(self, *, configure: Callable[[], Parsed], directories: Directories, env: Mapping[str, str],
                 notifier: Notifier, say: Say) -> None:
        self.configure = configure
        self.directories = directories
        self.env = env
        self.notifier = notifier
        self.say = say
        self.board = Board()
        self.sockets = sockets(directories.runtime)
        self.door: FrontDoor | None = None
        self.error: ApplianceError | None = None
        self._turn: Callable[[float], None] = self._prepare
        self._after: Callable[[float], None] = self._prepare
        self._until = 0.0
        self._preparation: Preparation | None = None
        self._planning: Background[Node] | None = None
        self._leaf: leaf.Leaf | None = None
        self._worker: worker_process.WorkerTree | None = None
        self._ending: Ending | None = None
        self._life: Life | None = None
        self._announced: Life | None = None
        self._delay_s = 0.0
        self._stopping = False
        self._drained = False
        self._finished = False
        self._reloading = False
        self._said = ""
        self._turned = self._resumed = time.monotonic()

    def run(self) -> None:
        """Serve until a signal or a fault that nothing helps. Raises that fault's error; returns after a clean stop."""
        for folder in (self.directories.state, self.directories.cache, self.directories.runtime, self.sockets):
            ensure(folder)
        if self.notifier.warning:
            self.say(self.notifier.warning)
        signals = as_commands(self.board.commands.put, service=self.notifier.listening)
        with folders.only_agent(self.directories.runtime), signals:
            self.course = Course(directories=self.directories, env=self.env, say=self.say)
            self.snapshot = Snapshot(board=self.board, course=self.course, notifier=self.notifier,
                                     unit=self.env.get("APPLIANCE_UNIT"))
            self.limits = LimitWatch(self.snapshot.warn)
            try:
                self._serve()
            except ApplianceError as error:
                self.error = error
            except BaseException as error:
                self.error = ApplianceError("the agent failed by a defect", why=f"{type(error).__name__}: {error}",
                                            do="report it with `applianctl support-bundle`")
                raise
            finally:
                self._close()
        if self.error is not None:
            raise self.error

    def _serve(self) -> None:
        from appliance.front.door import FrontDoor
        from appliance.keys import FILE as KEYS
        from appliance.keys import KeyRing, configured_key

        self._leaf = leaf.claim() if self.notifier.listening else None  # in a terminal the group is not ours
        for pid in worker_process.end_leftovers(self.directories.runtime):
            self.say(f"ended process {pid}, left by an earlier run")
        parsed = self.configure()
        self.course.want(parsed)
        keys = KeyRing(self.directories.state / KEYS, configured_key(parsed.settings.api_key_file, self.env))
        door = FrontDoor(settings=parsed.settings, board=self.board, worker_socket=self.sockets / WORKER_SOCKET,
                         agent_socket=self.sockets / AGENT_SOCKET, keys=keys)
        door.start()
        self.door = door
        while not self._finished:
            now = time.monotonic()
            self._turn(now)
            self._publish(now)
            if not self._finished:
                self._rest()

    # ---- the stages ------------------------------------------------------------------------------------------------

    def _prepare(self, now: float) -> None:
        """Begin: the model must be present before it can be planned."""
        try:
            self._preparation = Preparation(self.course.order(), env=self.env, now=now)
            self._turn = self._preparing
        except ApplianceError as error:
            self._handle(of_error(error), answered_s=0.0, now=now)

    def _preparing(self, now: float) -> None:
        preparation = self._preparation
        assert preparation is not None
        preparation.tick(now)
        if not preparation.done:
            return
        self._preparation = None
        try:
            if preparation.error is not None:
                raise preparation.error
            result = preparation.result or {}
            if not result.get("cached", True):
                self.say(f"model {self.course.model}: quantized in {result.get('seconds', 0):.0f} s")
            self.snapshot.warn("mended", str(result.get("mended") or ""))
            for note in filter(None, (result.get("mended"), result.get("note"))):
                self.say(f"model {self.course.model}: {note}")
            if not self.course.provisioned(result, now=time.time()):
                self._turn = self._prepare  # another configuration was chosen
                return
        except ApplianceError as error:
            self._handle(of_error(error), answered_s=0.0, now=now)
            return
        self._planning = Background(self.course.ahead, name="plan")
        self._turn = self._planned

    def _planned(self, now: float) -> None:
        if self._planning is None or not self._planning.done:
            return
        try:
            node = self._planning.take()
            self._start(node, self.course.enter(node), now)
        except ApplianceError as error:
            self._handle(of_error(error), answered_s=0.0, now=now)

    def _start(self, node: Node, rung: Rung, now: float) -> None:
        self.snapshot.plan(node, rung)
        self.limits.plan(node.host)
        self._worker, self._life = start(
            node, rung, directories=self.course.directories, worker_python=self.course.worker_python, env=self.env,
            probe_s=self.course.settings.probe_s, traffic=lambda: self.board.traffic, leaf=self._leaf, now=now)
        self.say(self.snapshot.plan_sentence(node, rung))
        self._turn = self._living

    def _living(self, now: float) -> None:
        life = self._life
        assert life is not None
        life.tick(now)
        if life.fault is not None:
            self._handle(life.fault, answered_s=life.answered_s(now), now=now)
            return
        if life.state == "ready":
            if self._announced is not life and life.last_answer is not None:
                self._announced = life
                self.snapshot.ready(life, now)
                self.say(f"ready: {self.snapshot.address}/v1 answered {life.last_answer.text.strip()!r} in "
                         f"{life.last_answer.seconds:.1f} s; started in {self.snapshot.ready_after_s:.0f} s")
                self.course.ready(time.time())
                self.notifier.ready()
                self._reloading = False
            self.course.measured(life.speed)
            failed = self.course.judge(life.answered_s(now), time.time(), speed_within_s=life.speed_within_s)
            if self.limits.tick(now, idle=not self._requests(), outdated=self.course.outdated) or failed:
                self._switch(now)

    def _end(self, after: Callable[[float], None], now: float, *, drain_s: float = 0.0,
             grace_s: float = STOP_GRACE_S) -> None:
        """End what is left of the worker, its requests finished for up to `drain_s`; then go on with `after`."""
        self._after, self._turn, self._planning = after, self._gone, None
        if self._worker is not None:
            self._ending = Ending(self._worker, self._life, now=now, drain_s=drain_s, grace_s=grace_s)

    def _gone(self, now: float) -> None:
        if self._preparation is not None and not self._preparation.gone(now):
            return
        self._preparation = None
        if self._ending is not None:
            self._ending.tick(now, requests=self._requests())
            if not self._ending.done:
                return
        self._ending = self._worker = self._life = None
        folders.sweep_sockets(self.sockets)
        self.snapshot.without_worker()
        self._turn = self._after
        self._turn(now)

    def _wait(self, now: float) -> None:
        if now >= self._until:
            self._turn = self._prepare

    def _finish(self, now: float) -> None:
        self._finished = True

    # ---- faults ----------------------------------------------------------------------------------------------------

    def _handle(self, fault: Fault, *, answered_s: float, now: float) -> None:
        """Record a fault, do what the rules say, and begin by ending what is left of the worker."""
        step = self.course.fault(fault, answered_s=answered_s, now=time.time())
        self.say(step.sentence)
        self.snapshot.fault(fault, step)
        if step.action == "stop":
            self.error = fault.exception()
        self._delay_s = step.delay_s
        self._end(self._finish if self.error is not None else self._begin_wait, now, grace_s=0.0)

    def _begin_wait(self, now: float) -> None:
        self._until = now + self._delay_s
        self._turn = self._wait if self._delay_s else self._prepare

    # ---- what operators ask ----------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Sleep until the next turn, or until somebody asks for something."""
        quick = self._life is not None and self._life.state == "answering"
        with contextlib.suppress(queue.Empty):
            command = self.board.commands.get(timeout=0.05 if quick else self.notifier.tick_s)
            for _ in range(COMMANDS_A_TURN):
                self._obey(command, time.monotonic())
                command = self.board.commands.get_nowait()

    def _obey(self, command: Command, now: float) -> None:
        if self._finished or self.error is not None:
            return
        self.say(f"asked to {command.name}")
        if command.name == "stop":
            self._stop(now)
        elif self._stopping:
            return
        elif command.name == "drain":
            self._drained = True
        elif command.name == "resume":
            self._drained = False
        elif command.name == "restart":
            self._drained = False
            self._switch(now)
        elif command.name == "reset":
            if self.course.reset(time.time()) or self._turn == self._wait:
                self._switch(now)
        elif command.name == "rollback":
            if reason := self.course.roll_back(time.time()):
                self.say(reason)
            else:
                self._switch(now)
        elif command.name == "reload":
            self._reload(now)

    def _reload(self, now: float) -> None:
        """Read the configuration again. A wrong one changes nothing; another worker configuration goes on trial."""
        self.notifier.reloading()
        self._reloading = True
        self.snapshot.values["reloaded_at"] = time.time()
        try:
            parsed = self.configure()
            self.course.check(parsed)
            another = self.course.want(parsed)
        except ApplianceError as error:
            self.snapshot.warn("reload", f"the configuration is not taken: {error.line}")
            self.say(f"reload refused: {error.line}")
            self._reloaded()
            return
        reason = self.door.reload(parsed.settings) if self.door is not None else None
        self.snapshot.warn("reload", reason or "")
        if another:
            self._switch(now)
        else:
            self._reloaded()

    def _reloaded(self) -> None:
        self._reloading = False
        if self.snapshot.was_ready:
            self.notifier.ready()

    def _switch(self, now: float) -> None:
        """Start anew with what is wanted now, letting requests in work finish."""
        if self._turn == self._gone:
            self._after = self._prepare
        else:
            serving = self._life is not None and self._turn == self._living
            self._end(self._prepare, now, drain_s=self.course.settings.drain_s if serving else 0.0)

    def _stop(self, now: float) -> None:
        """The first time requests in work may finish; the second time nothing is waited for."""
        again, self._stopping = self._stopping, True
        self.notifier.stopping(within_s=self.course.settings.drain_s + 2 * STOP_GRACE_S)
        if again:
            self._end(self._finish, now, grace_s=0.0)
        elif self._ending is not None:
            self._after = self._finish
        else:
            serving = self._life is not None and self._life.state in ("ready", "busy")
            self._end(self._finish, now, drain_s=self.course.settings.drain_s if serving else 0.0)

    # ---- what others see -------------------------------------------------------------------------------------------

    def _publish(self, now: float) -> None:
        state, phase = self._state()
        life = self._life
        ready = state == "ready" and not self._drained
        self.board.gate = gate(state, wait_s=self._until - now if self._turn == self._wait else 0.0)
        sentence = self.snapshot.publish(
            state=state, phase=phase, ready=ready, life=life, worker=self._worker, door=self.door, now=now,
            progress=self._preparation.progress if self._preparation else None,
            until=self._until if self._turn == self._wait else None)
        if sentence != self._said:
            self._said = sentence
            self.notifier.status(sentence)
            if not ready:
                self.say(sentence)
        if self._reloading or not self.snapshot.was_ready:
            self.notifier.extend_on_progress(self._progress(state, phase, now), EXTEND_S, now)
        self._resumed = now if now - self._turned > DOOR_DEAD_S / 3 else self._resumed  # both threads stood still
        self._turned = now
        if now - max(self.board.traffic.at, self._resumed) > DOOR_DEAD_S:
            raise TransientError("the front door does not move", why=f"no sign of life for {DOOR_DEAD_S:.0f} s",
                                 do="report it with `applianctl support-bundle`")
        self.notifier.feed(now)

    def _state(self) -> tuple[str, str]:
        """The state's word and what is done in it."""
        if self.error is not None:
            return "failed", self.error.line
        if self._finished:
            return "stopped", "no worker process is left"
        if self._turn == self._gone:
            finishing = self._requests() > 0 and self._ending is not None and not self._ending.asked
            phase = f"finishing {self._requests()} requests" if finishing else "ending the worker"
            return ("stopping" if self._stopping else "restarting"), phase
        if self._turn == self._wait:
            return "waiting", self.course.last_sentence
        if self._life is not None:
            if self._drained and self._life.state in ("ready", "busy"):
                left = self._requests()
                return "draining", f"{left} requests left" if left else "no request is left; `applianctl start` resumes"
            return self._life.state, self._life.sentence_of_trouble or self._life.phase
        return "preparing", self._preparation.phase if self._preparation else "planning the start"

    def _progress(self, state: str, phase: str, now: float) -> tuple[object, ...]:
        """Changes whenever a start gets on; systemd is asked for more time on nothing else."""
        prepared = self._preparation.moved if self._preparation else None
        loaded = self._life.progress if self._life is not None else None
        # A short wait between two tries is part of the work.
        waited = now if state == "waiting" and self._until - now < EXTEND_S else None
        return state, phase, prepared, loaded, waited

    def _requests(self) -> int:
        return self.board.traffic.running + self.board.traffic.queued

    def _close(self) -> None:
        """On every way out: nothing of ours is left running, and the last word is kept."""
        with contextlib.suppress(Exception):
            if self._preparation is not None:
                worker_process.end_session(self._preparation.pid)
            if self._worker is not None:
                worker_process.end_session(self._worker.pid)
        if self.door is not None:
            self.door.stop(grace_s=1.0)
        self.snapshot.last_word(self.error)
        if self.error is not None:
            self.say(f"failed: {self.error.line}")
