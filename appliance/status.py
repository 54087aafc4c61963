"""The service's status: what the agent writes, and how anybody reads it, also when no agent runs.

The agent replaces `runtime/status.json` atomically, at least once a second. A reader trusts it only while the agent
that wrote it lives (appliance.identity) and writes. One that does not write is asked on its socket, because the file's
disk may be full; if it does not answer there either it is `stuck`, whatever it said last. When none lives, the last
word is in `state/record.json`, which outlives the runtime folder; an account that may not read the record finds it in
the dead agent's status.
Does not: show it (cli/glance.py). Rule: readers change nothing, whatever they find.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance import client
from appliance.directories import AGENT_SOCKET, sockets
from appliance.errors import ConfigError, CpuNotSupported, DoesNotFit, ModelError, NotReachable
from appliance.identity import alive
from appliance.record import load
from appliance.unit import Unit

SCHEMA = 1
FILE = "status.json"
STUCK_S = 10.0
"""The agent writes once a second; one that has not written for so long does not turn any more."""
ASK_S = 2.0
ENDED = ("failed", "stopped")
NO_RESTART = {
    ModelError.exit_code: "an unusable model", DoesNotFit.exit_code: "a lack of memory",
    CpuNotSupported.exit_code: "an unsupported CPU", ConfigError.exit_code: "a configuration error",
}
"""Exit codes after which systemd does not start the service again, and what they mean."""


def write(runtime: Path, status: Mapping[str, Any]) -> None:
    """Replace the status file; a full or read-only disk never stops the service, so OSError is passed over.

    Whatever the umask, everybody may read it: it holds no secret, and whoever wants to know should not need a right.
    """
    with contextlib.suppress(OSError):
        draft = runtime / f".{FILE}.{os.getpid()}"
        draft.write_text(json.dumps({"schema": SCHEMA, **status, "turned_at": _since_boot()}))
        draft.chmod(0o644)
        draft.replace(runtime / FILE)


def read(runtime: Path) -> dict[str, Any]:
    """The status of the running agent, `stuck` when its loop stands still. Raises NotReachable when none runs."""
    path = runtime / FILE
    status = _object(path)
    if not isinstance(status.get("sentence"), str):
        status = {}
    if alive(status.get("agent")):
        still_s = _still_s(status.get("turned_at"))
        if still_s <= STUCK_S:
            return status
        return _asked(runtime) or status | {"state": "stuck", "ready": False, "live": False,
                                            "sentence": f"stuck: the agent has not turned for {still_s:.0f} s"}
    last = f"; last word: {status['sentence']}" if status.get("state") == "failed" else ""
    raise NotReachable("the service is not running", why=f"no agent writes {path}{last}", do="run `applianctl serve`")


def current(runtime: Path) -> dict[str, Any] | None:
    """The status of the running agent, or None."""
    with contextlib.suppress(NotReachable):
        return read(runtime)
    return None


def is_ready(status: Mapping[str, Any]) -> bool:
    """Whether a real answer is recent enough; the agent's own word for it."""
    return bool(status.get("ready", status.get("state") == "ready"))


def news(status: Mapping[str, Any]) -> str:
    """What must differ for another line on the screen: the sentence, unless it only counts on."""
    return "stuck" if status.get("state") == "stuck" else str(status.get("sentence"))


def last_word(state: Path, runtime: Path) -> dict[str, Any] | None:
    """What the last agent said before it ended: `{at, state, sentence, exit_code}`; None when none has run."""
    found = record(state).get("last_word")
    if isinstance(found, dict) and isinstance(found.get("sentence"), str):
        return found
    left = _object(runtime / FILE)
    if not isinstance(left.get("sentence"), str):
        return None
    with contextlib.suppress(OSError):
        left["at"] = (runtime / FILE).stat().st_mtime
    return {key: left.get(key) for key in ("at", "state", "sentence", "exit_code")}


def record(state: Path) -> dict[str, Any]:
    """The agent's record for readers, whole and of the right types; an empty one when there is none to read."""
    return load(state, keep=True).to_json()


def without_agent(word: Mapping[str, Any] | None, unit: Unit | None) -> dict[str, Any] | None:
    """A status for a service that does not run, from its last word and from systemd; None when both know nothing."""
    if word is None and unit is None:
        return None
    code = _code(word, unit)
    sentence = _ended_sentence(word, unit, code)
    return {"state": "failed" if code else "stopped", "ready": False, "live": False, "sentence": sentence,
            "exit_code": code, "last_word": dict(word) if word else None,
            "managed_by": "systemd" if unit else None, "unit": unit.name if unit else None,
            "unit_sentence": unit.sentence() if unit else None}


def _code(word: Mapping[str, Any] | None, unit: Unit | None) -> int | None:
    said = word.get("exit_code") if word else None
    if isinstance(said, int) and said:
        return said
    return unit.exit_status if unit is not None and unit.active == "failed" and unit.exit_status else None


def _ended_sentence(word: Mapping[str, Any] | None, unit: Unit | None, code: int | None) -> str:
    said = str(word["sentence"]) if word else ""
    do = "then `applianctl start`" if unit else "then `applianctl serve`"
    if unit is not None and unit.running and unit.sub == "auto-restart":
        return f"waiting: systemd starts the service again; last word: {said}" if said else "waiting: systemd restarts"
    if code in NO_RESTART:
        return f"stopped by {NO_RESTART[code]} (exit {code}): {said.removeprefix('failed: ')}; fix it, {do}"
    if code:
        return f"stopped by a fault (exit {code}): {said.removeprefix('failed: ')}; see `applianctl doctor`, {do}"
    if word is not None and word.get("state") not in ENDED:
        return f"not running: the agent ended without a word; before that: {said}"
    if unit is not None and unit.active == "failed":
        return f"stopped: {unit.sentence()}; see `applianctl doctor`, {do}"
    return f"{said or 'stopped'}; run `applianctl start`" if unit else f"{said}; run `applianctl serve`"


def clean(text: str) -> str:
    """Printable characters only: a worker's words may hold escape sequences."""
    return "".join(c if c.isprintable() else " " for c in text)


def _still_s(turned_at: Any) -> float:
    """For how long the agent has not written; 0 where an older release wrote, which did not say."""
    return _since_boot() - turned_at if isinstance(turned_at, (int, float)) else 0.0


def _asked(runtime: Path) -> dict[str, Any] | None:
    """What an agent says that turns and cannot write its file any more; None when it does not turn."""
    agent = sockets(runtime) / AGENT_SOCKET
    try:
        if client.ask(agent, "GET", "/livez", timeout_s=ASK_S).status != 200:
            return None
        found = client.ask(agent, "GET", "/status", timeout_s=ASK_S).json()
    except NotReachable:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("sentence"), str):
        return None
    warning = f"{runtime / FILE} cannot be written: the disk is full or not writable"
    return found | {"warnings": [*(found.get("warnings") or ()), warning]}


def _since_boot() -> float:
    """Counts while the machine sleeps, and nobody can set it. The boot is known by the agent's identity."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty when there is none."""
    try:
        found: Any = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
