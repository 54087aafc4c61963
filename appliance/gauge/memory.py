"""How fast this machine reads memory with so many threads: a matrix larger than the caches times a vector.

torch's fp32 product of matrix and vector computes next to nothing for a byte, reads each once, and runs on the same
threads as the worker's kernels. Order: `threads` (a list), `mib` (the matrix), `budget_s` (for each).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from appliance.gauge.clock import repeat
from appliance.report import Event

COLUMNS = 4096


def measure(order: Mapping[str, Any], emit: Event) -> None:
    """One figure `GB/s` for each number of threads."""
    rows = max(1, int(order["mib"]) * 2**20 // (4 * COLUMNS))
    torch.set_num_threads(max(order["threads"]))
    matrix, vector = torch.ones(rows, COLUMNS), torch.ones(COLUMNS)
    out = torch.empty(rows)
    size = matrix.numel() * 4
    for threads in order["threads"]:
        torch.set_num_threads(threads)
        emit({"event": "trying", "settings": {"threads": threads}})
        seconds = repeat(lambda: torch.mv(matrix, vector, out=out), budget_s=order["budget_s"])
        emit({"event": "figure", "settings": {"threads": threads},
              "figures": {"GB/s": [size / s / 1e9 for s in seconds]}})
