"""One call in a thread of its own, for what may wait long: a probe, a look at the worker's counters.

The loop starts it, goes on turning, and takes the result when there is one. A call that never ends keeps its thread (a
daemon, so it does not keep the agent); whoever starts a second one beside it breaks the rule "one in flight".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """`began`: monotonic. `done` becomes true after `result` was set; a call must not raise."""

    def __init__(self, call: Callable[[], Result], *, name: str) -> None:
        self.began = time.monotonic()
        self.result: Result | None = None
        self.done = False
        self._call = call
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        self.result = self._call()
        self.done = True
