"""PURE: a fleet as a table: the lines of status.yml and benchmark.yml.

Does not: reach a node, or judge it (rollout.py). Rules: a node that could not be looked at is a line too; unknown is
None, shown as `-`; rows are plain values, so that the same rows go into JSON and CSV.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

STATUS_COLUMNS = ("host", "state", "tier", "kernel", "tok/s", "memory", "version", "last answer or error")
BENCH_COLUMNS = ("host", "model", "tier", "version", "decode tok/s", "prefill tok/s", "streams", "streams tok/s",
                 "first token ms", "roofline %", "refused")


def status_row(host: str, node: Mapping[str, Any] | None, unreachable: str = "", decode_tok_s: float | None = None,
               now: float | None = None) -> dict[str, Any]:
    """A node's line. `node`: None where it could not be looked at; `decode_tok_s`: stored for what it is now."""
    if node is None:
        return {**dict.fromkeys(STATUS_COLUMNS), "host": host, "state": "unreachable", STATUS_COLUMNS[-1]: unreachable}
    status, version = node["status"], node["version"]
    if version and node["worker_version"] not in ("", version):
        version = f"{version}, worker {node['worker_version']}"
    return {
        "host": host, "state": node["state"], "tier": status.get("tier"), "kernel": status.get("kernel"),
        "tok/s": decode_tok_s, "memory": _memory(status), "version": version or None,
        STATUS_COLUMNS[-1]: _last_word(node, time.time() if now is None else now)}


def bench_refusal(node: Mapping[str, Any] | None, unreachable: str = "") -> str:
    """Why a node is not measured; empty when it may be."""
    if node is None:
        return unreachable
    if not node["ready"]:
        return f"does not answer: {node['sentence']}"
    waiting = int(node["status"].get("running") or 0) + int(node["status"].get("queued") or 0)
    return f"busy: {waiting} requests are running or waiting" if waiting else ""


def bench_row(host: str, node: Mapping[str, Any] | None, figures: str, refusal: str = "") -> dict[str, Any]:
    """A node's line. `figures`: what `applianctl bench --json` printed; `refusal`: why it was not measured."""
    row: dict[str, Any] = {**dict.fromkeys(BENCH_COLUMNS), "host": host, "refused": refusal}
    if node is not None:
        row |= {"model": node["model"] or None, "tier": node["status"].get("tier"), "version": node["version"] or None}
    if refusal:
        return row
    found = json.loads(figures)
    share = found.get("share of roofline")
    return {**row, **{name: found[name] for name in ("decode tok/s", "prefill tok/s", "streams", "streams tok/s")},
            "first token ms": found["first token alone s"] * 1000, "roofline %": None if share is None else share * 100}


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = STATUS_COLUMNS) -> list[str]:
    """Lines of one aligned table."""
    cells = [list(columns), *[[_cell(row.get(name)) for name in columns] for row in rows]]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def bench_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return table(rows, BENCH_COLUMNS)


def bench_csv(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Comma separated values; what holds a comma, a quote or a line's end is quoted."""
    def quoted(value: Any) -> str:
        text = "" if value is None else str(value)
        return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n') else text

    lines: list[Sequence[Any]] = [BENCH_COLUMNS, *[[row.get(name) for name in BENCH_COLUMNS] for row in rows]]
    return [",".join(map(quoted, line)) for line in lines]


def _last_word(node: Mapping[str, Any], now: float) -> str:
    status = node["status"]
    if status.get("rolled_back"):
        return f"went back by itself: {status['rolled_back']}"
    at = status.get("last_answer_at")
    if node["ready"] and at:
        return f"answered {_age(now - float(at))} ago{', on trial' if status.get('trial') else ''}"
    return str(node["sentence"])


def _memory(status: Mapping[str, Any]) -> str | None:
    used, ceiling = status.get("memory_bytes"), status.get("ceiling_bytes")
    return f"{used / 1024**3:.1f} of {ceiling / 1024**3:.1f} GiB" if used and ceiling else None


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else " ".join(str(value).split())


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"status_row": status_row, "bench_refusal": bench_refusal, "bench_row": bench_row, "table": table,
                "bench_table": bench_table, "bench_csv": bench_csv}
