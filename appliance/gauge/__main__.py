"""`python -m appliance.gauge ORDER`: one measurement, as JSON lines (see `appliance.report`).

ORDER is a JSON object: `gauge` (bandwidth, weights, canary), `cpus` (where to run, or null) and the gauge's own keys.
Events: `{"event": "trying", "settings": {...}}` before a measurement, so that a crash has a name, and
`{"event": "figure", "settings": {...}, "figures": {name: [values]}}` after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.report import Event, reporting


def run(order: Mapping[str, Any], emit: Event) -> dict[str, Any]:
    """Go where the order says, before any thread exists, and measure."""
    if order.get("cpus"):
        os.sched_setaffinity(0, set(order["cpus"]))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, this goes before any service
    if order["gauge"] == "bandwidth":
        from appliance.gauge import memory

        memory.measure(order, emit)
    elif order["gauge"] == "weights":
        from appliance.gauge import weights

        weights.measure(order, emit)
    elif order["gauge"] == "canary":
        from appliance.gauge import canary

        canary.measure(order, emit)
    else:
        raise ValueError(f"no gauge {order['gauge']!r}")
    return {}


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m appliance.gauge ORDER", file=sys.stderr)
        return 2
    order = json.loads(argv[0])
    return reporting(lambda emit: run(order, emit), noun="measurement", spinning=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
