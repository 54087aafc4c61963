"""vLLM's data-parallel coordinator as a thread of the API server.

With several engines vLLM starts one more process: it counts their requests, and the API server sends the next request
where fewest are. Spawned it takes 420 MiB, forked 200, for a loop over three sockets that runs a few times a second; as
a thread it takes nothing, and there is no process whose death nobody sees. vLLM learns the addresses from its process
through a pipe; here they are chosen beforehand, paths of sockets in the worker's own folder, and who connects before
the coordinator listens is connected then. Rules: the thread lives as long as the process; should it fail, the process
ends, and its engines with it, because requests would be shared out blindly.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from typing import Any

NAME = "DPCoordinator"


class Undying:
    """What vLLM watches in place of the coordinator's process: `sentinel` is a file that never becomes readable."""

    name = NAME
    exitcode = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.sentinel, self._kept_open = multiprocessing.Pipe(duplex=False)


def threaded(original: Any) -> Any:
    """The class that takes the place of vLLM's `DPCoordinator` (`original`)."""

    class ThreadedCoordinator(original):  # type: ignore[misc]  # vLLM is not typed here
        def __init__(self, parallel_config: Any, enable_wave_coordination: bool = True,
                     logging_config: Any = None) -> None:
            from vllm.utils.network_utils import get_open_zmq_ipc_path

            self.proc: Any = Undying()
            self.stats_publish_address, self.coord_in_address, self.coord_out_address = (
                get_open_zmq_ipc_path() for _ in range(3))
            threading.Thread(target=_run, name=NAME, daemon=True, kwargs={
                "engine_count": parallel_config.data_parallel_size,
                "front_publish_address": self.stats_publish_address,
                "back_output_address": self.coord_out_address,
                "back_publish_address": self.coord_in_address,
                "enable_wave_coordination": enable_wave_coordination,
            }).start()

        def shutdown(self, timeout: float | None = None) -> None:
            """vLLM asks for it when everything ends; the thread ends with the process."""

    return ThreadedCoordinator


def untitled(_set_process_title: Any) -> Any:
    """The coordinator names its process; here that would be the API server."""

    def keep(*_names: str) -> None:
        return None

    return keep


def _run(**options: Any) -> None:
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    try:
        DPCoordinatorProc.run_coordinator(**options)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
