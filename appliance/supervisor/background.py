"""One call in a thread of its own, for what may wait long: a probe, a look at the worker's counters, planning.

The loop starts it, goes on turning, and takes the result, or the error, when there is one. A call that never ends keeps
its thread (a daemon, so it does not keep the agent); whoever starts a second one beside it breaks the rule "one in
flight".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """`began`: monotonic. `done` becomes true after `result`, or the error that `take` raises, was set."""

    def __init__(self, call: Callable[[], Result], *, name: str) -> None:
        self.began = time.monotonic()
        self.result: Result | None = None
        self.done = False
        self._error: Exception | None = None
        self._call = call
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # for `take`, in the thread that asked for it
            self._error = error
        finally:
            self.done = True

    def take(self) -> Result:
        """The result of a call that is done. Raises what the call raised."""
        if self._error is not None:
            raise self._error
        if self.result is None:
            raise RuntimeError("the call ended without a result")
        return self.result
