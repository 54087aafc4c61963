"""PURE: the worker's argument vector and environment for one set of dials.

The environment is complete: of the agent's own environment only PATH is inherited, so a stray variable in a shell or
a unit cannot change what was planned. Rules:

* every path the worker may write to lies below the appliance's own directories;
* nothing goes to the network: offline hub, no usage statistics, loopback only; the API listens on a unix socket, so
  that keys, TLS and the queue are the front door's alone;
* two processes: the API server, and the engine, forked from it, which runs the model itself
  (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) on all planned threads; or several engines, each on its own CPUs;
* Inductor's own cache instead of vLLM's AOT cache, which never loads on CPU in 0.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.parsers import FORCED_FORM, NONE
from appliance.settings import Settings

PLUGIN = "cpu_int4"
ATEN_CAPABILITY: Mapping[str, str] = {
    "scalar": "default",
    "avx2": "avx2",
    "avx512": "avx512",
    "avx512_vnni": "avx512",
    "avx512_bf16": "avx512",
    "amx": "avx512",
}
"""torch's own dispatch level per tier; always set, so that planner and worker agree about the packed layout."""

PLANNED_FLAGS = (
    "--model", "--served-model-name", "--host", "--port", "--uds", "--dtype", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--max-num-queued-reqs", "--kv-cache-memory-bytes", "--block-size", "--hf-overrides",
    "--model-loader-extra-config", "--shutdown-timeout", "--enforce-eager", "--ssl-certfile", "--ssl-keyfile",
    "--load-format", "--api-server-count", "--mm-tensor-ipc",
    "--compilation-config", "--optimization-level", "--tensor-parallel-size", "--data-parallel-size",
    "--data-parallel-size-local", "--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-address",
    "--data-parallel-rpc-port", "--data-parallel-backend", "--data-parallel-hybrid-lb", "--data-parallel-external-lb",
    "--distributed-executor-backend", "--pipeline-parallel-size", "--quantization", "--api-key", "--config",
    "--enable-auto-tool-choice",
    "--tool-call-parser", "--reasoning-parser",
)
"""What the plan or a setting decides; `worker.extra_args` may not say it again."""

CAPABILITIES = ("default", "avx2", "avx512")
"""torch's dispatch levels, lowest first."""

FORBIDDEN_ENV: Mapping[str, str] = {
    "OMP_NUM_THREADS": "use cpu.threads",
    "APPLIANCE_WORKER_CPUS": "use cpu.cpus",
    "APPLIANCE_ENGINE_CPUS": "use cpu.engines",
    "VLLM_DP_SIZE": "use cpu.engines",
    "CPU_VISIBLE_MEMORY_NODES": "each engine's memory lies where its CPUs are",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "threads and memory are planned for one engine process",
    "TORCH_COMPILE_DISABLE": "use compile",
    "VLLM_API_KEY": "use api_key_file",
    "HF_HUB_OFFLINE": "the service never asks a hub",
    "TRANSFORMERS_OFFLINE": "the service never asks a hub",
    "VLLM_CPU_KVCACHE_SPACE": "it overrides the planned key/value cache size",
    "NOTIFY_SOCKET": "only the agent talks to systemd",
    "WATCHDOG_USEC": "only the agent talks to systemd",
    "WATCHDOG_PID": "only the agent talks to systemd",
}


PROBE_SEATS = 1
"""Sequences beyond those of users: the agent's own probe never waits behind them."""
QUEUED = 1024
"""Sequences that wait inside vLLM at most. The front door bounds requests; this bounds what one request with many
prompts or choices makes of itself."""
TRIAL_FILE = "kernels.json"
"""In the cache of this CPU and these versions: what the worker's self-test found at its last start."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the worker reads and writes. All absolute; `socket` (its API listens there) and `sockets` must be short
    (AF_UNIX limit). `prepared`: the folder of mapped weights, empty where there is none and the worker packs in
    memory."""

    model: str
    cache: str
    tmp: str
    socket: str
    sockets: str
    prepared: str = ""


@dataclass(frozen=True, kw_only=True)
class Dials:
    """One rung's values, before they become arguments and variables. `running`: requests of users; with several engines
    this, `threads`, `batch_tokens` and `kv_bytes` are each one's. `engines`: the CPUs of each, empty for one; `copied`:
    each keeps the mapped weights in memory of its own."""

    model_name: str
    quantization: Mapping[str, Any]
    kernel: str
    threads: int
    cpus: tuple[int, ...] | None
    context: int
    running: int
    batch_tokens: int
    kv_bytes: int
    block: int
    compile: bool
    capability: str
    compiler: str | None
    drain_s: float
    tools: str = NONE
    reasoning: str = NONE
    """vLLM's parsers of tool calls and of thinking."""
    variant: str = ""
    """The native kernel's instruction set, forced; empty: the worker's self-test chooses."""
    gemm: str = ""
    """The type of torch's GEMM, where another than the CPU's own was measured to be faster."""
    engines: tuple[tuple[int, ...], ...] = ()
    copied: bool = False
    library_rows: str = ""
    """Rows from which an AMX host takes torch's GEMM, as measured; empty: the worker's default."""

    @property
    def seats(self) -> int:
        """Requests of users that all engines together compute at the same time."""
        return self.running * max(1, len(self.engines))


def argv(dials: Dials, places: Places, settings: Settings) -> tuple[str, ...]:
    """Arguments for `appliance.worker serve`, which hands them to vLLM's API server."""
    overrides: dict[str, Any] = {"quantization_config": dict(dials.quantization)}
    if dials.quantization.get("wide_residual"):
        # Hidden states reach the head in fp32; vLLM would cast head and hidden states to bf16 if not told.
        overrides["head_dtype"] = "float32"
    args = [
        "--model", places.model,
        "--served-model-name", dials.model_name, "default",
        "--uds", places.socket,
        "--dtype", "bfloat16",
        "--max-model-len", str(dials.context),
        "--max-num-seqs", str(dials.running + PROBE_SEATS),
        "--max-num-batched-tokens", str(dials.batch_tokens),
        "--max-num-queued-reqs", str(dials.seats + PROBE_SEATS * max(1, len(dials.engines)) + QUEUED),
        "--kv-cache-memory-bytes", str(dials.kv_bytes),
        "--block-size", str(dials.block),
        "--hf-overrides", json.dumps(overrides, sort_keys=True),
        "--load-format", PLUGIN,
        # vLLM does not notice missing tensors of quantized models unless told to.
        "--model-loader-extra-config", json.dumps({"enable_weights_track": True}),
        "--shutdown-timeout", str(int(dials.drain_s)),
        "--enable-server-load-tracking",
        "--disable-access-log-for-endpoints", "/health,/metrics,/load",
        "--disable-fastapi-docs",
    ]
    args.append("--enable-auto-tool-choice")
    if dials.tools != NONE:
        args += ["--tool-call-parser", dials.tools]
    else:
        # vLLM holds a call that is asked for by name to a form only where the free choice is open too (the front door
        # closes that one), and its arguments to their schema only when told to.
        args += ["--tool-call-parser", FORCED_FORM, "--tool-strict-level", "parameter"]
    if dials.reasoning != NONE:
        args += ["--reasoning-parser", dials.reasoning]
    if not dials.compile:
        args.append("--enforce-eager")
    if dials.engines:
        # For several engines vLLM would give each a process more, to run the model in.
        args += ["--data-parallel-size", str(len(dials.engines)), "--distributed-executor-backend", "uni"]
    return (*args, *settings.worker.extra_args)


def env(dials: Dials, places: Places, settings: Settings) -> dict[str, str]:
    """The worker's whole environment but PATH; `worker.env` has passed `env_refusal`."""
    own = {
        "CXX": (dials.compiler or "") if dials.compile else "",
        # Eager is not enough: vLLM compiles its sampler at the first request that needs it, a pause of seconds while
        # nothing else runs, and an error where there is no compiler.
        "TORCH_COMPILE_DISABLE": "" if dials.compile else "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # the phases of a start are read from the log
        "APPLIANCE_WORKER_CPUS": ",".join(map(str, dials.cpus or ())),
        "APPLIANCE_ENGINE_CPUS": "|".join(",".join(map(str, cpus)) for cpus in dials.engines),
        "APPLIANCE_COPIED": "1" if dials.copied else "",
        "APPLIANCE_PREPARED": places.prepared if dials.kernel == "native" else "",
        "APPLIANCE_PLANNED_KERNEL": dials.kernel,
        "APPLIANCE_KERNEL_TRIAL": f"{places.cache}/{TRIAL_FILE}",
        "APPLIANCE_GEMM": dials.gemm,
        "APPLIANCE_LIBRARY_ROWS": dials.library_rows,
        "ATEN_CPU_CAPABILITY": dials.capability,
        "OMP_NUM_THREADS": str(dials.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_PLUGINS": PLUGIN,
        # One request with n choices takes n seats.
        "VLLM_MAX_N_SEQUENCES": str(dials.seats),
        "VLLM_CACHE_ROOT": f"{places.cache}/vllm",
        "VLLM_CONFIG_ROOT": f"{places.cache}/vllm-config",
        "VLLM_RPC_BASE_PATH": places.sockets,
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TORCHINDUCTOR_CACHE_DIR": f"{places.cache}/inductor",
        "TRITON_CACHE_DIR": f"{places.cache}/triton",
        "XDG_CACHE_HOME": places.cache,
        "XDG_CONFIG_HOME": f"{places.cache}/config",
        "HF_HOME": f"{places.cache}/huggingface",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HOME": places.cache,
        "TMPDIR": places.tmp,
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "2",
        # A uid without a passwd entry has no name to look up; torch names its temp folder by it.
        "USER": "appliance",
        "LOGNAME": "appliance",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    own |= settings.worker.env
    # The operator may lower torch's dispatch level (a workaround), never raise it above the rung's.
    wanted = own["ATEN_CPU_CAPABILITY"]
    own["ATEN_CPU_CAPABILITY"] = min((wanted, dials.capability), key=_level)
    if dials.variant:
        own["APPLIANCE_KERNEL"] = dials.variant
    return {name: value for name, value in own.items() if value != ""}


def extra_args_refusal(extra: Sequence[str]) -> str | None:
    """Why these arguments may not be added: they would overrule what was planned, or show a secret; None if they may.

    vLLM takes `_` for `-`, unambiguous beginnings of a flag, `--flag.key value` for a part of a JSON flag, `--no-flag`
    and a few short forms; all of them count.
    """
    for word in extra:
        flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
        flag = "--" + flag[5:] if flag.startswith("--no-") else flag
        short = re.match(r"-(q|O|cc|tp|dp|pp)", flag)
        if short or (flag.startswith("--") and any(name.startswith(flag) for name in PLANNED_FLAGS)):
            return f"{word} is decided by the plan"
    return None


def env_refusal(env: Mapping[str, str]) -> str | None:
    """Why these variables may not be set in `worker.env`: each breaks what the plan relies on; None if they may."""
    for name, value in env.items():
        if name in FORBIDDEN_ENV:
            return f"{name} is not yours to set: {FORBIDDEN_ENV[name]}"
        if value == "":
            return f"{name} has no value"
        if name == "VLLM_PLUGINS" and PLUGIN not in value.split(","):
            return f"VLLM_PLUGINS without {PLUGIN} keeps the 4-bit model from being loaded"
    return None


def narrowed(dials: Dials, **changes: Any) -> Dials:
    """The dials with some values changed (a rung of the ladder). The quantization follows: its kernel, and that
    `wide_residual` is for a compiled graph (fused layers are wide by themselves)."""
    changed = replace(dials, **changes)
    wide = bool(changed.quantization.get("wide_residual")) and changed.compile
    return replace(changed, quantization={**changed.quantization, "kernel": changed.kernel, "wide_residual": wide})


def _level(capability: str) -> int:
    """The rank of a dispatch level; a name that torch does not know ranks highest, so it is never chosen."""
    return CAPABILITIES.index(capability) if capability in CAPABILITIES else len(CAPABILITIES)
