"""The setup's symptoms: configuration, the worker's environment, stored models, the plan; and, when asked, whether the
kernels and the model really work.

Starts the worker's contract, and its self-test when asked; writes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance import client, jobs, library, node
from appliance.checkup.patient import Patient, problem
from appliance.directories import AGENT_SOCKET, sockets
from appliance.errors import ApplianceError, ConfigError, StoreError
from appliance.facts import HostFacts
from appliance.launch import TRIAL_FILE
from appliance.settings import DEFAULT_MODEL, Parsed
from appliance.store import Store
from appliance.symptoms import Problem, SetupFacts
from appliance.tune import archive

SELFTEST_S = 600.0
GENERATION_S = 120.0
GENERATED_TOKENS = 8



def worker_python(case: Patient) -> str | Problem:
    try:
        return jobs.find_worker_python(case.settings)
    except ConfigError as error:
        return problem(error)


def contract(python: str, env: Mapping[str, str]) -> dict[str, Any] | Problem:
    try:
        return jobs.worker_contract(python, env=env)
    except ConfigError as error:
        return problem(error)


def setup(case: Patient, host: HostFacts, python: str | Problem, contract: dict[str, Any] | Problem) -> SetupFacts:
    software = host.software
    trial = node.read_trial(case.directories.cache / host.fingerprint / TRIAL_FILE)
    broken = isinstance(contract, Problem)
    damaged, not_laid_out = _models(case)
    return SetupFacts(
        config=case.parsed if isinstance(case.parsed, Problem) else None,
        config_warnings=case.parsed.warnings if isinstance(case.parsed, Parsed) else (),
        worker=contract if isinstance(contract, Problem) else None,
        kernels=None if isinstance(contract, Problem) else tuple(contract["kernels"]),
        kernel_setting=case.settings.kernel, left_out=trial.left_out if trial else (),
        compile_setting=case.settings.compile,
        compiler=software.compiler is not None and software.python_headers is not None,
        plan=None if broken or not isinstance(python, str) or damaged else _plan(case, python),
        damaged=damaged, not_laid_out=not_laid_out, measurements=_measurements(case, host),
    )


def _plan(case: Patient, python: str) -> Problem | None:
    """What the plan refuses, under the unit's limits too: this command's own control group is another."""
    if case.running is not None or isinstance(case.parsed, Problem) or case.names is None:
        return None  # what runs was planned; what is wrong with it is in its status
    limits = [case.settings.memory.ceiling]
    if case.unit is not None:
        limits += [case.unit.memory_max_bytes, case.unit.memory_high_bytes]
    memory = dataclasses.replace(case.settings.memory, ceiling=min((x for x in limits if x is not None), default=None))
    parsed = dataclasses.replace(case.parsed, settings=dataclasses.replace(case.settings, memory=memory))
    try:
        node.refuse_early(parsed, case.directories, python, env=case.env)
        name = library.active_name(parsed, case.directories)
        if name == DEFAULT_MODEL and name not in case.names:
            return None
        refused = node.read_node(parsed, case.directories, python, env=case.env).plan.refused
    except ApplianceError as error:
        return problem(error)
    return problem(refused.error()) if refused else None


def _measurements(case: Patient, host: HostFacts) -> str:
    """Why this host's measurements cannot be read; a state folder that is closed to this account says nothing."""
    state = case.directories.state
    record = archive.load(state, host) if os.access(state, os.R_OK | os.X_OK) else None
    return record.damaged if record is not None else ""


def _models(case: Patient) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences on damaged models, and the active model's name when it is not laid out. Sizes only: no byte is read."""
    store = Store(case.directories.store)
    damaged = [case.store_problem] if case.store_problem else []
    for name in case.names or ():
        try:
            store.get(name)
        except ApplianceError as error:
            damaged.append(f"{error.what}: {error.why}" if error.why else error.what)
    if isinstance(case.parsed, Problem) or damaged or case.names is None:
        return tuple(damaged), ()
    try:
        active = library.active_name(case.parsed, case.directories)
    except StoreError:  # the plan's problem
        return (), ()
    missing = active in case.names and store.prepared(store.pointed(active)) is None
    return tuple(damaged), (active,) if missing else ()




def selftest(python: str, case: Patient) -> Problem | None:
    """The kernels against the reference, with the worker's Python."""
    try:
        done = subprocess.run([python, "-m", "appliance.kernels.selftest", "--json"], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=SELFTEST_S, check=False,
                              env=jobs.job_env(case.env, home=Path("/nonexistent")))
        said = json.loads(done.stdout.strip().splitlines()[-1])
        wrong = [f"{one['name']} {one.get('reason', '')}".strip() for one in said["variants"] if not one.get("ok")]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, subprocess.TimeoutExpired) as error:
        return Problem(what="the kernels' self-test did not run", why=str(error) or type(error).__name__,
                       do="install the worker again", exit_code=78)
    return Problem(what="the kernels give wrong results here", why="; ".join(wrong),
                   do="report it with `applianctl support-bundle`", exit_code=77) if wrong or done.returncode else None


def generation(case: Patient) -> Problem | None:
    """A real answer through the front door's socket."""
    began = time.monotonic()
    body = {"model": "default", "prompt": "The capital of France is", "max_tokens": GENERATED_TOKENS, "temperature": 0}
    try:
        answer = client.ask(sockets(case.directories.runtime) / AGENT_SOCKET, "POST", "/v1/completions", body,
                            timeout_s=GENERATION_S)
    except ApplianceError as error:
        return problem(error)
    found = answer.json()
    if answer.status != 200 or not isinstance(found, dict) or not found.get("choices"):
        return Problem(what="the model did not answer", why=f"status {answer.status}: {answer.message()}"
                       f" after {time.monotonic() - began:.1f} s", do="see `applianctl status`", exit_code=69)
    return None
