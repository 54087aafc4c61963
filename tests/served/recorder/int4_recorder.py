"""A vLLM plugin for tests: records how many rows reach torch's int4 kernel, and for which [N, K]."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

seen: set[tuple[int, int]] = set()
lock = threading.Lock()


def register() -> None:
    import torch

    original = torch.ops.aten._weight_int4pack_mm_for_cpu

    def record(x: Any, packed: Any, group: int, scale_zero: Any) -> Any:
        call = (int(x.shape[0]), int(scale_zero.shape[1]))
        if call not in seen:
            with lock, open(os.environ["INT4_RECORD"], "a") as file:
                seen.add(call)
                file.write(json.dumps({"rows": call[0], "channels": call[1]}) + "\n")
        return original(x, packed, group, scale_zero)

    torch.ops.aten._weight_int4pack_mm_for_cpu = record
