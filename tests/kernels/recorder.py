"""Recorders of what really ran: the rows of every call of torch's int4 matmul, and the largest tensor made."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Int4Calls:
    """Context manager; `rows` afterwards: the number of rows of each call of torch's int4 matmul, in order.

    The profiler sees calls from inside custom operators and compiled code, which a Python dispatch mode does not.
    """

    OPERATOR = "aten::_weight_int4pack_mm_for_cpu"

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __enter__(self) -> Int4Calls:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        self.rows = [event.input_shapes[0][0] for event in self._profile.events() if event.name == self.OPERATOR]


class LargestTensor(TorchDispatchMode):
    """Context manager; `bytes` afterwards: the largest storage that an operator made (views and `out` not counted)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result
