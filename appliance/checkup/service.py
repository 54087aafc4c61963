"""The service's symptoms: does its agent live and answer, what did it say last, who is in its way.

Looks at processes, sockets and the port; starts and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping

import psutil

from appliance import client, status
from appliance.checkup.patient import Patient
from appliance.directories import AGENT_SOCKET, sockets
from appliance.errors import ApplianceError, ConfigError, TransientError
from appliance.identity import reused
from appliance.supervisor import health, worker
from appliance.symptoms import Problem, ServiceFacts

HOUR_S = 3600.0



def service(case: Patient, unseen: list[str]) -> ServiceFacts:
    running, place = case.running, case.directories
    word = running if running is not None else status.last_word(place.state, place.runtime) or {}
    probe = word.get("probe")
    probe = probe if isinstance(probe, Mapping) else {}
    failed = case.record.get("failed")
    rung = running if running is not None else {}
    return ServiceFacts(
        running=running is not None, state=word.get("state"), sentence=str(word.get("sentence") or ""),
        exit_code=word.get("exit_code") or (case.unit.exit_status if case.unit and running is None else None),
        answers=_answers(case, unseen), probes_failed=probe.get("failed"),
        probe_sentence=str(probe.get("sentence") or ""),
        rung=rung.get("rung"), rung_reason=str(rung.get("rung_reason") or ""),
        rolled_back=rung.get("rolled_back") or None, failed=failed if isinstance(failed, Mapping) else {},
        faults=_recent_faults(case), agents=tuple(_agents()), orphans=tuple(_orphans(case)), holder=_holder(case),
        unit=case.unit.name if case.unit else None, unit_active=case.unit.active if case.unit else None,
        unit_result=case.unit.result if case.unit else "", unit_enabled=case.unit.enabled if case.unit else None,
        unit_needs_reload=case.unit.needs_reload if case.unit else None,
    )


def _answers(case: Patient, unseen: list[str]) -> bool | None:
    if case.running is None:
        return None
    path = sockets(case.directories.runtime) / AGENT_SOCKET
    if path.exists() and not os.access(path, os.W_OK):
        unseen.append(f"the agent's socket {path}")
        return None
    try:
        return client.ask(path, "GET", "/livez", timeout_s=5).status == 200
    except ApplianceError:
        return False


def _recent_faults(case: Patient) -> dict[str, int]:
    counts: dict[str, int] = {}
    for fault in case.remembered("faults"):
        at = fault.get("at")
        if isinstance(at, (int, float)) and 0 <= case.now - at < HOUR_S:
            counts[str(fault.get("name"))] = counts.get(str(fault.get("name")), 0) + 1
    return counts


def _agents() -> Iterator[int]:
    """Pids of the agents of this machine, whoever runs them, as far as they can be seen."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if is_agent(process.cmdline()):
                yield process.pid


def is_agent(words: list[str]) -> bool:
    """Whether a command line is an agent's: the program itself under Python, not a shell or sudo around it."""
    if len(words) < 3 or "serve" not in words or not os.path.basename(words[0]).startswith("python"):  # noqa: PTH119
        return False
    options = [word for word in words[1:] if word != "-P"]
    return options[:2] == ["-m", "appliance.cli.main"] or options[0].endswith("/applianctl")


def _orphans(case: Patient) -> list[int]:
    """Processes of a worker whose agent is gone."""
    if case.running is not None:
        return []
    with contextlib.suppress(OSError, ValueError, KeyError):
        leader = json.loads((case.directories.runtime / worker.RECORD).read_text())
        if not reused(leader):
            return sorted(process.pid for process in worker.members(leader["pid"]))
    return []


def _holder(case: Patient) -> str | None:
    if case.running is not None or isinstance(case.parsed, Problem):
        return None
    listen = case.settings.listen
    with contextlib.suppress(ConfigError):
        try:
            health.check_port(listen.host, listen.port)
        except TransientError as error:
            return error.why
    return None
