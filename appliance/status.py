"""The service's status: what the agent writes, and how anybody reads and shows it.

The agent replaces `runtime/status.json` atomically at each tick. A reader trusts it only while the agent that wrote it
lives (appliance.identity); a file left by a dead agent means "not running".
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from appliance.budget import show
from appliance.errors import NotReachable
from appliance.identity import alive

SCHEMA = 1
FILE = "status.json"


def write(runtime: Path, status: Mapping[str, Any]) -> None:
    """Replace the status file; a full or read-only disk never stops the service, so OSError is passed over."""
    with contextlib.suppress(OSError):
        draft = runtime / f".{FILE}.{os.getpid()}"
        draft.write_text(json.dumps({"schema": SCHEMA, **status}))
        draft.replace(runtime / FILE)


def read(runtime: Path) -> dict[str, Any]:
    """The status of the running agent. Raises NotReachable when none runs."""
    path = runtime / FILE
    try:
        found: Any = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        found = None
    status: dict[str, Any] = {}
    if isinstance(found, dict) and found.get("schema") == SCHEMA and isinstance(found.get("sentence"), str):
        status = found
    if alive(status.get("agent")):
        return status
    last = f"; last word: {status['sentence']}" if status.get("state") == "failed" else ""
    raise NotReachable("the service is not running", why=f"no agent writes {path}{last}", do="run `applianctl serve`")


def render(status: Mapping[str, Any], *, now: float) -> Iterator[str]:
    """Lines for people: the sentence first, then what an operator asks next."""
    yield status["sentence"]
    planned, last = status.get("model") is not None, status.get("last_answer_at")
    rows = [
        ("address", status.get("address")),
        ("model", f"{status['model']} ({status['digest'][:12]})" if planned else None),
        ("tier, kernel", f"{status['tier']}, {status['kernel']}" if planned else None),
        ("rung", status.get("rung")),
        ("threads", status.get("threads")),
        ("context", f"{status['context']} tokens" if planned else None),
        ("memory", f"{show(status['memory_bytes'])} used, {show(status['ceiling_bytes'])} ceiling"
         if status.get("memory_bytes") and status.get("ceiling_bytes") else None),
        ("cache", show(status["cache_bytes"]) if status.get("cache_bytes") is not None else None),
        ("last answer", f"{max(0, now - last):.0f} s ago" if last else "none yet"),
        ("ready after", f"{status['ready_after_s']:.0f} s" if status.get("ready_after_s") else None),
        ("worker log", status.get("log")),
        ("version", status.get("version")),
    ]
    for name, value in rows:
        if value is not None:
            yield f"  {name:<14}{value}"
