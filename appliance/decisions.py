"""PURE: all that measurements can decide of a worker, together: by a record of this node, or by rules of thumb alone.

    decide(..., measured=record)   what a plan goes by, each with its reason
    tuned(found, rules)            name -> value of what the record decides otherwise than the rules

Does not: measure, weigh memory or plan. Names and values of `tuned` are part of a configuration's identity
(`appliance.trial`) and lie in files: another name for a thing is another configuration to every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance import tuning
from appliance.facts import HostFacts, KernelTrial, ModelFacts
from appliance.fitting import BATCHES
from appliance.measured import Record
from appliance.quantize.format import NATIVE_VARIANTS
from appliance.refusal import ranges
from appliance.settings import Settings
from appliance.threads import ThreadChoice, choose_threads
from appliance.tuning import Preference

BLOCK = 32
"""Tokens per key/value block: with vLLM's own 128 short prompts share no prefix; AMX attention wants 32n."""
SAFE_DEQUANT_THRESHOLD = 2


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """`variant`: the native kernel's instruction set to force, empty for its own choice; `rows`, `batch`, `block`: None
    where nothing was measured, the defaults then count."""

    threads: ThreadChoice
    variant: str
    gemm: Preference
    rows: Preference | None
    batch: Preference | None
    block: Preference | None
    compile: Preference
    threshold: Preference

    @property
    def batch_tokens(self) -> int:
        """The first batch to try; memory may ask for a smaller one."""
        return int(self.batch.value) if self.batch else BATCHES[0]

    @property
    def block_tokens(self) -> int:
        return int(self.block.value) if self.block else BLOCK

    @property
    def library_rows(self) -> str:
        """Rows from which an AMX host takes torch's GEMM; empty for the worker's default."""
        return str(self.rows.value) if self.rows else ""

    def values(self) -> dict[str, Any]:
        return {"threads": self.threads.count, "cpus": ranges(self.threads.cpus or ()), "variant": self.variant,
                "gemm": self.gemm.value, "batch tokens": self.batch_tokens, "block": self.block_tokens,
                "compile": self.compile.value, "library rows": self.library_rows,
                "dequant_threshold": self.threshold.value}


def decide(host: HostFacts, model: ModelFacts, settings: Settings, *, kernel: str, fused: bool,
           trial: KernelTrial | None, measured: Record | None) -> Decisions:
    """`kernel`: what serves; `fused`: its operators run whole layers; `trial`: its self-test; `measured`: None for the
    rules of thumb."""
    tier = host.cpu.tier or "scalar"
    gemm = _gemm(tier, model, measured)
    return Decisions(
        threads=choose_threads(host.topology, settings, tuning.thread_trials(measured, model.digest, kernel)),
        variant=_variant(kernel, model, settings, trial, measured), gemm=gemm,
        rows=tuning.library_rows(measured, model.digest, gemm.value) if tier == "amx" else None,
        batch=tuning.served(measured, model.digest, "batch_tokens", BATCHES[0]),
        block=tuning.served(measured, model.digest, "block", BLOCK),
        compile=_compile(host, model, settings, measured, fused=fused),
        threshold=_threshold(kernel, model, measured))


def tuned(found: Decisions, rules: Decisions) -> Mapping[str, Any]:
    """What was decided otherwise than by the rules of thumb; JSON values."""
    by_rule = rules.values()
    return {name: value for name, value in found.values().items() if value != by_rule[name]}


def tier_gemm(tier: str) -> str:
    """The type of torch's GEMM that the CPU's instructions are for."""
    return "bf16" if tier in ("avx512_bf16", "amx") else "fp32"


def _gemm(tier: str, model: ModelFacts, measured: Record | None) -> Preference:
    """The type of torch's GEMM: as measured where the CPU multiplies bf16, else fp32."""
    found = tuning.gemm(measured, model.digest, "bf16") if tier_gemm(tier) == "bf16" else None
    return found or Preference(value=tier_gemm(tier), evidence="no canary has passed for this host", reason=
                               "bf16 GEMM has its own instructions here" if tier_gemm(tier) == "bf16" else
                               "bf16 GEMM is several times slower than fp32 on this tier")


def _variant(kernel: str, model: ModelFacts, settings: Settings, trial: KernelTrial | None,
             measured: Record | None) -> str:
    """The operator's instruction set, or the one measured to be faster than the kernel's own."""
    if kernel != "native" or settings.kernel in NATIVE_VARIANTS:
        return settings.kernel if settings.kernel in NATIVE_VARIANTS else ""
    return tuning.preferred_variant(measured, model.digest, left_out=trial.left_out if trial else ())


def _threshold(kernel: str, model: ModelFacts, measured: Record | None) -> Preference:
    """From how many rows on torch's int4 kernel is left: 2, unless it was measured to be safe and faster here."""
    found = tuning.threshold(measured, model.digest) if kernel == "aten" else None
    return found or Preference(value=SAFE_DEQUANT_THRESHOLD, evidence="safety rule",
                               reason="only one-row steps take the int4 kernel, the head included")


def _compile(host: HostFacts, model: ModelFacts, settings: Settings, measured: Record | None, *,
             fused: bool) -> Preference:
    """Whether torch compiles the model, where memory allows it."""
    if settings.compile is False:
        return Preference(value=False, reason="switched off by the operator", evidence="settings compile")
    if fused:
        return Preference(value=False, evidence="docs/profile.md",
                          reason="native operators run each decoder layer whole: nothing is left to compile")
    if host.software.compiler is None:
        return Preference(value=False, evidence="PATH", reason=
                          "torch.compile needs g++ and none was found; layers run one by one, decode is slower")
    if host.software.python_headers is None:
        return Preference(value=False, evidence="include path",
                          reason="torch.compile needs Python.h and none was found; decode is slower")
    found = tuning.served(measured, model.digest, "compile", True) if settings.compile is None else None
    return found or Preference(value=True, evidence=host.software.compiler,
                               reason="fuses the work between matrix products; cached for later starts")
