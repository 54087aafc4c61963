"""Figures of the drills for the documentation: a row of build/system/fleet.json for each, and a line with `pytest -s`.

Does: keep the last run of each drill with this machine's load then. Does not: judge.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = Path(__file__).parents[2] / "build/system/fleet.json"


def keep(drill: str, **facts: object) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(FILE.read_text()) if FILE.is_file() else {}
    rows[drill] = {**facts, "load": round(os.getloadavg()[0], 1)}
    FILE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(f"\n{drill}: {', '.join(f'{name} {value}' for name, value in rows[drill].items())}")
