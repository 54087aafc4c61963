"""Jobs: a child process with the worker's Python that reports in JSON lines.

Does: find the worker's Python, ask it for its contract, run one job in its own process group with a clean
environment, hand its events on, turn its end into a report or one error of the tree. Does not: know what a job does.
Rules: no process of a job outlives `run_job`; a line that is no event is ignored; the child's exit code decides, its
`error` event only explains; nothing of the agent's environment reaches the child but PATH and OMP_NUM_THREADS.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from appliance import disk, installation, workers
from appliance.errors import (
    ApplianceError,
    ConfigError,
    CpuNotSupported,
    DoesNotFit,
    StoreError,
    TransientError,
    by_exit_code,
)
from appliance.settings import Settings

CONTRACT = 1
"""Major number of the worker contract that this agent understands."""
PACKAGED_PYTHON = "/usr/lib/appliance/worker/bin/python"
_GRACE_S = 5.0
_LONGEST_LINE = 1 << 20

Event = Mapping[str, Any]
"""`{"event": "phase", "phase", "note"}` or `{"event": "progress", "done_bytes", "total_bytes", "item"}`."""


def find_worker_python(settings: Settings, *, prefix: str = sys.prefix, packaged: str = PACKAGED_PYTHON) -> str:
    """The worker's Python: the setting `worker.python`, the package's, or .venv-worker beside the agent's own.

    The package's by the folder of its version, so that another version is another configuration. Raises ConfigError
    when the configured one is missing, or none is found.
    """
    beside = str(Path(prefix).parent / ".venv-worker/bin/python")
    places = [settings.worker.python] if settings.worker.python else [packaged, beside]
    for place in places:
        if os.access(place, os.X_OK, effective_ids=True) and not Path(place).is_dir():
            return workers.resolved(place) if place == packaged else place
    for place in places:
        if gone := workers.lost_interpreter(place):
            raise _interpreter_changed(place, gone)
    raise ConfigError("the worker's Python is missing", why=f"not found: {', '.join(places)}",
                      do=installation.remedy(installation.WORKER))


def worker_contract(worker_python: str, *, env: Mapping[str, str], timeout_s: float = 60.0) -> dict[str, Any]:
    """What the worker's environment says of itself: `{contract: {major, minor}, versions, kernels}`.

    Raises ConfigError when it does not answer or speaks another major contract.
    """
    try:
        done = subprocess.run(
            [worker_python, "-m", "appliance.worker", "--contract"], stdin=subprocess.DEVNULL, capture_output=True,
            env=job_env(env, home=Path("/nonexistent")), timeout=timeout_s, check=False, text=True, errors="replace",
        )
    except OSError as error:
        if gone := workers.lost_interpreter(worker_python):
            raise _interpreter_changed(worker_python, gone) from None
        raise _unusable(worker_python, error.strerror or str(error)) from None
    except subprocess.TimeoutExpired:
        raise _unusable(worker_python, f"no answer within {timeout_s:.0f} s") from None
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
        major = said["contract"]["major"]
    except (IndexError, ValueError, KeyError, TypeError):
        raise _unusable(worker_python, _last_line(done.stderr)) from None
    if major != CONTRACT:
        raise ConfigError("agent and worker do not fit together",
                          why=f"the worker speaks contract {major}, this agent {CONTRACT}",
                          do=installation.remedy(installation.BOTH))
    return dict(said)


def job_env(env: Mapping[str, str], *, home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a job: offline, no telemetry, every temp and cache file below `home` (case 14)."""
    own = {
        "PATH": env.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        "LANG": "C.UTF-8",
        "HOME": str(home),
        "TMPDIR": str(home),
        "XDG_CACHE_HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # A uid without a passwd entry has no name to look up; torch names its temp folder by it.
        "USER": "appliance",
        "LOGNAME": "appliance",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
    }
    if env.get("OMP_NUM_THREADS"):
        own["OMP_NUM_THREADS"] = env["OMP_NUM_THREADS"]
    return {**own, **(extra or {})}


def run_job(
    worker_python: str, args: Sequence[str], *, on_event: Callable[[Event], None], env: Mapping[str, str], cwd: Path,
    keep_open: Sequence[int] = (), silence_s: float = 900.0,
) -> dict[str, Any]:
    """Run `worker_python ARGS...` and return the report of its `result` event.

    `env` is the child's whole environment (see `job_env`), `keep_open` descriptors it inherits (a lock). Raises the
    error that the child's end stands for; TransientError when it says nothing for `silence_s`. However this is left,
    the child's process group is gone.
    """
    with disk.mapped("cannot start the job", cwd):
        stderr = tempfile.TemporaryFile(dir=cwd)  # noqa: SIM115 (closed below; only its creation is mapped)
    with stderr:
        try:
            child = subprocess.Popen(
                [worker_python, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=dict(env),
                cwd=cwd, process_group=0, pass_fds=tuple(keep_open),
            )
        except OSError as error:
            raise _unusable(worker_python, error.strerror or str(error)) from None
        last: dict[str, Event] = {}
        try:
            _yield_to_the_service(child.pid)
            for event in _events(child, silence_s):
                if event["event"] in ("result", "error"):
                    last[str(event["event"])] = event
                else:
                    on_event(event)
        finally:
            _end_group(child)
        failure = _failure(child.returncode, last.get("error"), stderr)
    if failure is not None:
        raise failure
    report = last.get("result", {}).get("report")
    if not isinstance(report, dict):
        raise TransientError("the job ended without a result", do="try again")
    return report


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave this block as SystemExit(128 + signal), so that children end and drafts go.

    Does nothing where a caller has a handler of its own (which must raise to end a job), and outside the main thread,
    where no handler can be set.
    """

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    ours = [s for s in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(s) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _interpreter_changed(worker_python: str, gone: str) -> ConfigError:
    return ConfigError("the node's interpreter changed", why=f"{worker_python} is {gone}, which is not there any more",
                       do="install the appliance-worker package that was built for this distribution")


def _unusable(worker_python: str, why: str) -> ConfigError:
    return ConfigError(f"the worker's Python {worker_python} cannot be used", why=why,
                       do=installation.remedy(installation.WORKER_AGAIN))


def _yield_to_the_service(pid: int) -> None:
    """A running model goes first: in time, and when memory runs out."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 10)
        Path(f"/proc/{pid}/oom_score_adj").write_text("500")


def _exited(child: subprocess.Popen[bytes]) -> bool:
    """True when the child is dead; it is left unreaped, so that its process group cannot be reused meanwhile."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _events(child: subprocess.Popen[bytes], silence_s: float) -> Iterator[Event]:
    assert child.stdout is not None
    pipe = child.stdout.fileno()
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    pending, open_, heard = b"", True, time.monotonic()
    while True:
        exited = _exited(child)
        ready = poll.poll(0 if exited else 250) if open_ else []
        if ready:
            block = os.read(pipe, 1 << 16)
            open_ = bool(block)
            heard = time.monotonic()
            *lines, pending = (pending + block).split(b"\n")
            yield from filter(None, map(_event, lines))
            pending = pending if len(pending) <= _LONGEST_LINE else b""
        elif exited:  # and a grandchild that still holds the pipe does not count
            return
        elif time.monotonic() - heard > silence_s:
            raise TransientError(f"the job said nothing for {silence_s:.0f} s", do="try again")
        elif not open_:
            time.sleep(0.05)


def _event(line: bytes) -> Event | None:
    try:
        raw = json.loads(line)
    except ValueError:
        return None
    return raw if isinstance(raw, dict) and isinstance(raw.get("event"), str) else None


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, a short grace, SIGKILL for the whole group; then reap. Harmless when all of it is gone."""
    try:
        if not _exited(child):
            os.killpg(child.pid, signal.SIGTERM)
            until = time.monotonic() + _GRACE_S
            while not _exited(child) and time.monotonic() < until:
                time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _failure(code: int, said: Event | None, stderr: IO[bytes]) -> ApplianceError | None:
    if code == 0:
        return None
    if code < 0:
        return _killed(-code)
    kind = by_exit_code(code)
    if said is not None:
        return kind(str(said.get("what") or "the job failed"), why=str(said.get("why", "")), do=str(said.get("do", "")))
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 8192))
    line = _last_line(stderr.read().decode(errors="replace"))
    if "No space left on device" in line:
        return StoreError("the job failed", why="the disk is full", do="free some space, or set `store` elsewhere")
    if "No module named" in line:
        return ConfigError("the worker's environment is not complete", why=line,
                           do=installation.remedy(installation.WORKER_AGAIN))
    return kind(f"the job failed with exit code {code}", why=line)


def _killed(number: int) -> ApplianceError:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGILL:
        return CpuNotSupported("the job died", why="SIGILL: the CPU does not know an instruction that torch uses",
                               do="run `applianctl probe`")
    if number == signal.SIGKILL:
        return DoesNotFit("the job was killed", why="SIGKILL: most likely memory ran out",
                          do="free memory or raise the limit, see `applianctl probe`")
    return TransientError("the job died", why=name, do="try again; if it happens again, verify the source's files")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
