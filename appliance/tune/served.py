"""A whole worker, measured: started on a socket of its own beside the service, asked, ended.

Does: alter a planned rung (threads, batch, block, ...), start the real worker in a temp folder, measure decode, prefill
and four streams, end it. Rules: nothing of it outlives `serve`; its caches are its own, so that a measuring root leaves
no files in the service's; a worker that does not start is a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from appliance import client, measured
from appliance.errors import ApplianceError, NotReachable, TransientError
from appliance.facts import ModelFacts
from appliance.launch import Places
from appliance.measured import PREFILL_TOK_S, SERVED, STREAMS_TOK_S, TOK_S, Trial
from appliance.plan import Rung
from appliance.supervisor import worker
from appliance.supervisor.start import PATH_DEFAULT
from appliance.tune import quiet
from appliance.tune.requests import Target

START_S = 300.0
PROMPT, PREFILL, STREAMS, REPEATS = 32, 512, 4, 3
SHORTEST, LONGEST, ANSWER_S = 16, 128, 3.0
"""An answer has as many tokens as take about ANSWER_S, within these bounds."""
ELSEWHERE = "See root cause above"
"""What vLLM's API process says last of an engine that failed: not why."""
FLAGS = {"batch_tokens": "--max-num-batched-tokens", "block": "--block-size"}
Check = Callable[[Mapping[str, Any]], None]


def altered(rung: Rung, settings: Mapping[str, Any]) -> Rung:
    """The rung with the threads, variant, batch_tokens, block and compile of these settings (see `settings_of`)."""
    argv, env = list(rung.argv), dict(rung.env)
    for name, flag in FLAGS.items():
        if settings.get(name):
            argv[argv.index(flag) + 1] = str(settings[name])
    if settings.get("threads"):
        env["OMP_NUM_THREADS"] = str(settings["threads"])
    for name, variable in (("variant", "APPLIANCE_KERNEL"), ("cpus", "APPLIANCE_WORKER_CPUS")):
        if settings.get(name):
            env[variable] = str(settings[name])
        else:
            env.pop(variable, None)
    if settings.get("compile") is False and "--enforce-eager" not in argv:
        argv.append("--enforce-eager")
        env["TORCH_COMPILE_DISABLE"] = "1"
    return dataclasses.replace(rung, argv=tuple(argv), env=env)


def settings_of(rung: Rung) -> dict[str, Any]:
    """What a rung sets, in the words of a trial."""
    flags = {name: int(rung.argv[rung.argv.index(flag) + 1]) for name, flag in FLAGS.items() if flag in rung.argv}
    return {"threads": int(rung.env["OMP_NUM_THREADS"]), **flags, "kernel": str(rung.quantization.get("kernel")),
            "compile": "--enforce-eager" not in rung.argv,
            **{name: rung.env[variable] for name, variable in (("variant", "APPLIANCE_KERNEL"),
                                                               ("cpus", "APPLIANCE_WORKER_CPUS"))
               if rung.env.get(variable)}}


@contextlib.contextmanager
def folders(model_path: str, prepared: str) -> Iterator[Places]:
    """Places for one worker in a temp folder with a short name, gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="appl-tune-", dir="/tmp"))
    try:
        for name in ("cache", "cache/tmp"):
            (home / name).mkdir()
        yield Places(model=model_path, cache=str(home / "cache"), tmp=str(home / "cache/tmp"),
                     socket=str(home / "worker.sock"), sockets=str(home), prepared=prepared)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def serve(rung: Rung, places: Places, model: ModelFacts, *, python: str, env: Mapping[str, str], check: Check,
          cpus: tuple[int, ...], now: float, until: float = math.inf) -> Trial:
    """Start the worker of `rung`, measure it, end it. Raises what `check` raises, TimeIsUp at `until` (monotonic); all
    else is in the trial."""
    home = Path(places.sockets)
    trial = Trial(kind=SERVED, model=model.digest, settings=settings_of(rung), figures={}, at=now)
    Path(places.socket).unlink(missing_ok=True)
    began = time.monotonic()
    tree = worker.start(worker.WorkerCommand(
        python=python, argv=rung.argv, env={"PATH": env.get("PATH") or PATH_DEFAULT, **rung.env},
        log=home / "worker.log", cwd=Path(places.cache), runtime=home))
    try:
        _yield_to_the_service(tree.pid)
        _wait(tree, Path(places.socket), check)
        ready_s = time.monotonic() - began
        target = Target(socket=Path(places.socket), model="default", ids=ids(model), until=until)
        before, spent_s = quiet.usage(cpus), tree.cpu_seconds()[0]
        figures = _measure(target, min(PREFILL, rung.context // 2), check)
        share = quiet.others(before, quiet.usage(cpus), cpus, living_s=tree.cpu_seconds()[0] - spent_s)
        return dataclasses.replace(trial, figures={**figures, "ready s": measured.figure([ready_s])},
                                   notes={"disturbed": round(share, 2)} if share > quiet.DISTURBED else {})
    except (NotReachable, TransientError) as error:
        if type(error) not in (NotReachable, TransientError):
            raise  # the service wants its cores, or the time is up: no word about this worker
        return dataclasses.replace(trial, failure=_why(error, tree))
    finally:
        worker.end_session(tree.pid)
        with contextlib.suppress(Exception):
            tree.status()


def ids(model: ModelFacts) -> tuple[int, int]:
    """Token ids from the middle of the vocabulary: ordinary ones."""
    return model.vocab_size // 8, model.vocab_size * 7 // 8


def _yield_to_the_service(pid: int) -> None:
    """In time, and when memory runs out; what the worker forks inherits it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 10)
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _measure(target: Target, prompt: int, check: Check) -> dict[str, measured.Figure]:
    first = target.stream(PROMPT, SHORTEST, 1)
    tokens = min(LONGEST, max(SHORTEST, int(first.decode_tok_s * ANSWER_S)))
    target.prefill_tok_s(prompt, 2)  # the first of its kind is slower everywhere
    decode, prefill, together = [], [], []
    for number in range(REPEATS):
        check({})
        decode.append(target.stream(PROMPT, tokens, 10 + number).decode_tok_s)
        prefill.append(target.prefill_tok_s(prompt, 20 + number))
        if number < REPEATS - 1:
            together.append(target.together(STREAMS, PROMPT, tokens, 30 + number)[0])
    return {TOK_S: measured.figure(decode), PREFILL_TOK_S: measured.figure(prefill),
            STREAMS_TOK_S: measured.figure(together)}


def _wait(tree: worker.WorkerTree, socket: Path, check: Check) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        check({})
        if tree.status() is not None:
            raise TransientError("the worker ended while loading", why=f"status {tree.status()}")
        try:
            if client.ask(socket, "GET", "/health", timeout_s=2.0).status == 200:
                return
        except ApplianceError:
            pass
        time.sleep(0.2)
    raise TransientError("the worker did not start", why=f"nothing answers after {START_S:.0f} s")


def _why(error: ApplianceError, tree: worker.WorkerTree) -> str:
    lines = [line for line in tree.new_log_lines() if line.strip() and ELSEWHERE not in line]
    last = [line for line in lines if "Error" in line][-1:] or lines[-1:]
    return f"{error.what} ({error.why}{'; ' + last[0][-160:] if last else ''})"
