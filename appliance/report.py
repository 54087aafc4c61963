"""How a child tells its agent what it does: JSON lines on standard output, and the exit code of its error.

Does: keep standard output for events, limit progress lines, turn errors into an `error` event and an exit code. Does
not know what the child does. Rules: everything else that is printed goes to standard error; SIGTERM ends the process
at once, as the default action does; the agent removes what was half written.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from appliance.errors import ApplianceError, StoreError

PROGRESS_STEPS = 500
"""Progress lines per run, at most; the first and the last always come."""

Event = Callable[[dict[str, Any]], None]


def reporting(work: Callable[[Event], Mapping[str, Any]], *, noun: str, spinning: bool = False) -> int:
    """Run `work` with a receiver of events, report its result or error, and return the exit code.

    `noun` names the result in sentences, as in `the checkpoint cannot be written`. `spinning`: leave it to OpenMP how
    its threads wait, as a worker does.
    """
    # Libraries print to stdout as they like: keep the real one for events and give them stderr.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    # Before torch is loaded: threads that spin while waiting cost a multiple of the work when others use the cores.
    if not spinning:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        report = work(_thinned(events))
    except ApplianceError as error:
        return _fail(events, error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _fail(events, StoreError(f"the {noun} cannot be written", why=f"{error.strerror}{where}",
                                        do="free space or choose another store"))
    except Exception as error:
        traceback.print_exc()
        return _fail(events, ApplianceError(f"the {noun} failed by a defect", why=f"{type(error).__name__}: {error}",
                                            do="report it with the log"))
    _emit(events, {"event": "result", "report": dict(report)})
    return 0


def _thinned(events: IO[str]) -> Event:
    reached = -1

    def event(line: dict[str, Any]) -> None:
        nonlocal reached
        if line["event"] == "progress":
            step = line["done_bytes"] * PROGRESS_STEPS // max(line["total_bytes"], 1)
            if step == reached:
                return
            reached = step
        _emit(events, line)

    return event


def _emit(events: IO[str], line: Mapping[str, Any]) -> None:
    events.write(json.dumps(line) + "\n")
    events.flush()


def _fail(events: IO[str], error: ApplianceError) -> int:
    code = error.exit_code
    _emit(events, {"event": "error", "exit_code": code, "what": error.what, "why": error.why, "do": error.do})
    return code
