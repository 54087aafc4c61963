"""Observed times of the faults, collected in build/system/times.json and shown when the run ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "build/system/times.json"
COLUMNS = ("case", "fault", "detected_s", "answered_s", "sentence")


def record(*, case: str, fault: str, sentence: str, detected_s: float | None = None, answered_s: float | None = None) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    rows = {row["case"]: row for row in read()}
    rows[case] = {"case": case, "fault": fault, "sentence": sentence, "at": time.time(),
                  "detected_s": None if detected_s is None else round(detected_s, 2),
                  "answered_s": None if answered_s is None else round(answered_s, 2)}
    FILE.write_text(json.dumps(list(rows.values()), indent=1))


def read() -> list[dict[str, Any]]:
    try:
        return list(json.loads(FILE.read_text()))
    except (OSError, ValueError):
        return []


def table(rows: list[dict[str, Any]]) -> list[str]:
    def cell(value: object) -> str:
        return "-" if value is None else str(value)[:110]

    lines = [[cell(row.get(name)) for name in COLUMNS] for row in rows]
    widths = [max(len(line[n]) for line in [list(COLUMNS), *lines]) for n in range(len(COLUMNS))]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in [list(COLUMNS), *lines]]
