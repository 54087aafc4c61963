"""Frozen values: what is known about a host and about a model.

Facts carry no decisions and do no I/O. `None` means *unknown*; zero is never a guess. All sizes are bytes,
all CPU numbers are the kernel's logical CPU numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TIERS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""Instruction-set tiers, slowest first. Each tier includes the ones before it."""

TIER_FLAGS: Mapping[str, tuple[str, ...]] = {
    "scalar": (),
    "avx2": ("avx", "avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
}
"""The /proc/cpuinfo flags that each tier adds to the one before it."""


@dataclass(frozen=True, kw_only=True)
class TierFact:
    """What is known of one tier, in the order of trust: the CPU's flags, the OS's state, a live proof.

    `reason` says in a few words why the tier is not usable or not proven; empty when it is usable.
    """

    name: str
    flags: bool | None
    os_enabled: bool | None
    proven: bool | None
    reason: str = ""

    @property
    def usable(self) -> bool:
        """True only when flags, operating system and a live proof all say yes."""
        return self.flags is True and self.os_enabled is True and self.proven is True


@dataclass(frozen=True, kw_only=True)
class CpuFacts:
    architecture: str | None
    vendor: str | None
    model_name: str | None
    flags: frozenset[str]
    hypervisor: bool
    tiers: tuple[TierFact, ...]
    tier: str | None
    """The highest usable tier; `scalar` when no vector tier is usable; None when the CPU is not x86-64."""


@dataclass(frozen=True, kw_only=True)
class Core:
    """One physical core that holds at least one usable CPU (online and allowed for this process)."""

    cpus: tuple[int, ...]
    kind: str | None
    """`performance`, `efficiency`, or None where all cores are of one kind or the kind is unknown."""
    node: int | None


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    node: int
    cpus: tuple[int, ...]
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class CpuQuota:
    """A CPU bandwidth limit: `cpus` = quota / period, and the cgroup file that says so."""

    cpus: float
    source: str


@dataclass(frozen=True, kw_only=True)
class TopologyFacts:
    online: tuple[int, ...]
    allowed: tuple[int, ...]
    """online ∩ affinity ∩ cpuset of the own cgroup and its parents."""
    cores: tuple[Core, ...]
    smt: bool | None
    nodes: tuple[NumaNode, ...]
    quota: CpuQuota | None
    """The tightest quota on the path from the own cgroup to the root."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """One cgroup limit that applies to this process."""

    bytes: int
    source: str
    soft: bool
    """True for memory.high: reclaim and throttling start here, nothing is killed."""


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    total_bytes: int | None
    available_bytes: int | None
    """MemAvailable of the host."""
    swap_total_bytes: int | None
    limits: tuple[MemoryLimit, ...]
    """All finite limits from the own cgroup to the root, own group first."""
    ceiling_bytes: int | None
    """The lowest of `limits` and `total_bytes`; None when neither is known."""
    ceiling_source: str
    used_bytes: int | None
    """What is not free below the ceiling: held there (this process included, reclaimable page cache not counted), or
    taken by others below a wider limit that leaves less."""


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """Programs and libraries the worker needs; a value is a path or version, None = not found."""

    compiler: str | None = None
    python_headers: str | None = None
    lscpu: str | None = None
    libnuma: str | None = None
    libgomp: str | None = None
    libc: str | None = None
    """`glibc 2.36`, `musl`, ..."""
    userland: str | None = None
    """Debian architecture of the userland (`amd64`, `i386`, `armhf`, `arm64`)."""
    kernel: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package name -> version for appliance, and for torch and vllm as the worker reports them."""
    executable_mappings: bool | None = None
    """False where MemoryDenyWriteExecute or SELinux forbids the code that oneDNN and Inductor generate."""


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    store_path: str | None = None
    store_free_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    cpu: CpuFacts
    topology: TopologyFacts
    memory: MemoryFacts
    software: SoftwareFacts
    disk: DiskFacts

    @property
    def fingerprint(self) -> str:
        """12 hex digits over what must be equal for compiled code, packed layouts and measurements to be reused.

        Memory sizes, free disk and limits are left out: they change what is planned, not what may be reused.
        """
        parts = {
            "vendor": self.cpu.vendor,
            "model": self.cpu.model_name,
            "tier": self.cpu.tier,
            "flags": sorted(self.cpu.flags),
            "compiler": self.software.compiler,
            "versions": dict(sorted(self.software.versions.items())),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class KeptLayer:
    """A weight that stays in bf16, and why."""

    name: str
    reason: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What planning needs of one stored `cpu_int4` model; read from its headers and config alone."""

    name: str
    digest: str
    architecture: str
    """First entry of config.json `architectures`, e.g. `LlamaForCausalLM`."""
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    sliding_window: int | None
    sliding_layers: int
    """Number of layers that attend to a window of `sliding_window` tokens only."""
    tied: bool
    parameters: int
    group_size: int
    group_size_overrides: Mapping[str, int]
    quantize_embedding: bool
    linear_bytes: int
    """int4 linears: packed codes, scales and zeros."""
    table_bytes: int
    """Embedding table and untied head as stored (int4 or kept)."""
    kept_bytes: int
    """Everything else (norms, biases, kept layers) as stored."""
    largest_linear: tuple[int, int]
    """[N, K] of the largest fused linear as the worker sees it; (0, 0) when there is none."""
    kept: tuple[KeptLayer, ...]
    experts: int
    chat: bool
    dtype: str
    """torch_dtype the source declared; the worker runs bfloat16 whatever it says."""
    bits_per_weight: float
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config` of the checkpoint as it stands in config.json."""
    roles: tuple[str, ...] = ()
    """Whose messages the chat template takes, as tried when the model was added."""
    template_marks: tuple[str, ...] = ()
    """The words of tool calls and of thinking that stand in the chat template (`parsers.MARKS`)."""
    short_context: int | None = None
    """LongRoPE: up to so many tokens the short rotation factors hold. A worker that may go beyond uses the long ones
    for every prompt, and short prompts are then answered worse."""
    absent_tokens: tuple[str, ...] = ()
    """Of the tokens that vLLM's parsers demand (`parsers.TOOL_TOKENS`) those that the vocabulary does not have."""
    template_fault: str = ""
    """Why the chat template cannot be used; `chat` is then false."""


def to_json(value: Any) -> Any:
    """Turn facts (or any tree of dataclasses, mappings, sets and tuples) into plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(to_json(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


@dataclass(frozen=True, kw_only=True)
class KernelTrial:
    """What the worker's self-test found at its last start: the native variant in use (None: none works here), and each
    one that was left out, with what happened."""

    variant: str | None
    left_out: tuple[str, ...]
