"""`python -m appliance.quantize SOURCE OUT --recipe JSON`: the child of the agent that converts one model.

Standard output carries JSON lines only (phase, progress, result, error); everything else goes to standard error.
The exit code is the error's. SIGTERM ends the process at once, as the default action does; the agent removes OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import IO, Any

from appliance.errors import ApplianceError, StoreError, UsageError

PROGRESS_STEPS = 500
"""Progress lines per run, at most; the first and the last always come."""


def main() -> int:
    """Run the command line; returns the exit code."""
    # Libraries print to stdout as they like: keep the real one for events and give them stderr.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    # Before torch is loaded: threads that spin while waiting cost a multiple of the work when others use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(prog="python -m appliance.quantize")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="{}", help="JSON: grid, group_size, table_bits, ignore")
    args = parser.parse_args()
    try:
        report = _run(args.source, args.out, args.recipe, events)
    except ApplianceError as error:
        return _fail(events, error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _fail(events, StoreError("the checkpoint cannot be written", why=f"{error.strerror}{where}",
                                        do="free space or choose another store"))
    except Exception as error:
        traceback.print_exc()
        return _fail(events, ApplianceError("quantizing failed by a defect", why=f"{type(error).__name__}: {error}",
                                            do="report it with the log"))
    _emit(events, {"event": "result", "report": report})
    return 0


def _run(source: Path, out: Path, recipe_text: str, events: IO[str]) -> dict[str, Any]:
    from appliance.quantize.checkpoint import quantize
    from appliance.quantize.layers import parse_recipe

    try:
        raw = json.loads(recipe_text)
        if not isinstance(raw, dict):
            raise ValueError
    except ValueError:
        raise UsageError("the recipe cannot be used", why="it is not a JSON object") from None
    recipe = parse_recipe(raw)
    reached = -1

    def event(line: dict[str, Any]) -> None:
        nonlocal reached
        if line["event"] == "progress":
            step = line["done_bytes"] * PROGRESS_STEPS // max(line["total_bytes"], 1)
            if step == reached:
                return
            reached = step
        _emit(events, line)

    return quantize(source, out, recipe, event)


def _emit(events: IO[str], line: dict[str, Any]) -> None:
    events.write(json.dumps(line) + "\n")
    events.flush()


def _fail(events: IO[str], error: ApplianceError) -> int:
    code = error.exit_code
    _emit(events, {"event": "error", "exit_code": code, "what": error.what, "why": error.why, "do": error.do})
    return code


if __name__ == "__main__":
    sys.exit(main())
