"""PURE: from facts and settings to a plan - every choice with its reason, every byte in the open.

    make_plan(host, model, settings, places, kernels=...) -> Plan

A plan holds a ladder of rungs; `full` is what serves, the others are what the supervisor may step down to after a
fault. Safety rules that no setting can change: `prefill_dequant` is true, and with the aten kernel
`dequant_threshold` is 2 (more than one row in torch's int4 kernel and then attention dies of SIGILL on AMX hosts).
The native kernel has no such limit; where it serves a model of plain decoder layers, those run fused and uncompiled.
No I/O, no clock, no environment: the same facts give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance import budget, ladder, launch, parsers, tuning
from appliance.bounds import NUMA_BOUND, UNKNOWN_CEILING, Fit, best_fit, misfit, running
from appliance.budget import MemoryItem, Shape
from appliance.decisions import SAFE_DEQUANT_THRESHOLD, Decisions, decide, tier_gemm, tuned
from appliance.engines import EngineChoice, choose_engines, engines_refusal
from appliance.facts import HostFacts, KernelTrial, ModelFacts
from appliance.fitting import Fitting, contexts
from appliance.launch import Dials, Places
from appliance.measured import Record
from appliance.quantize.format import NATIVE_VARIANTS, PLAIN_DECODERS, parse_config
from appliance.refusal import Refusal, early_refusal, ranges
from appliance.settings import Settings
from appliance.threads import ThreadChoice

SCHEMA = 1
DECODER_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""One of them kept in bf16, and the layers run one operator at a time."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision: `evidence` names the fact or measurement that `reason` rests on."""

    name: str
    value: Any
    reason: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Rung:
    """`engines`: the CPUs of each, empty for one; `threads` and `kv_bytes` are then each one's, `running` is of all."""

    id: str
    changes: Mapping[str, Any]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    quantization: Mapping[str, Any]
    threads: int
    cpus: tuple[int, ...] | None
    context: int
    kv_bytes: int
    running: int
    engines: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`tuned`: name -> value of what measurements decided otherwise than rules of thumb would; JSON values."""

    schema: int
    fingerprint: str
    model: str
    tier: str | None
    rungs: tuple[Rung, ...]
    memory: tuple[MemoryItem, ...]
    peak_phase: str
    peak_bytes: int
    ceiling_bytes: int | None
    usable_bytes: int | None
    choices: tuple[Choice, ...]
    refused: Refusal | None
    tuned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full(self) -> Rung:
        return self.rungs[0]


def make_plan(
    host: HostFacts,
    model: ModelFacts,
    settings: Settings,
    places: Places,
    *,
    kernels: tuple[str, ...] = ("native", "aten"),
    trial: KernelTrial | None = None,
    measured: Record | None = None,
) -> Plan:
    """Plan one worker for `model` on `host`. Never raises for a misfit: `Plan.refused` then says what would fit.

    `kernels`: what the worker's contract offers. `trial`: what its self-test found at its last start. `measured`: what
    was measured on this node; what has become stale decides nothing.
    """
    if refusal := early_refusal(host, settings, kernels=kernels):
        return _refused(host, model, refusal, ())
    if impossible := engines_refusal(host.topology, settings, experts=bool(model.experts)):
        return _refused(host, model, Refusal(exit_code=78, what=f"cpu.engines {settings.cpu.engines} is impossible",
                                             why=impossible, do="set cpu.engines to auto"), ())
    kernel = tuning.served_kernel(settings.kernel, kernels, trial)
    fused = _fused(kernel, model, settings)
    found, rules = (decide(host, model, settings, kernel=kernel, fused=fused, trial=trial, measured=known)
                    for known in (measured, None))
    engines = choose_engines(host.topology, settings, found.threads, experts=bool(model.experts))
    mapped = kernel == "native" and bool(places.prepared)
    fit = best_fit(host, settings, Fitting(
        model=model, wanted_context=settings.context, running=running(settings, found.threads.count),
        can_compile=found.compile.value, block=found.block_tokens, mapped=mapped, batch=found.batch_tokens,
        gemm_bytes=2 if found.gemm.value == "bf16" else 4), engines, found.threads.cpus)
    engines = fit.engines if fit else engines
    choices = [_tier_choice(host), *_thread_choices(found.threads, engines),
               *_kernel_choices(kernel, host, model, settings, trial, measured, found), *_measurements(measured)]
    if fit is None:
        return _refused(host, model, UNKNOWN_CEILING, tuple(choices))
    choices.append(_running_choice(fit, found.threads, settings))
    if fit.shape is None:
        return _refused(host, model, misfit(fit, settings), tuple(choices))
    shape, lines = fit.shape, fit.fitting.lines(fit.shape)
    tools, reasoning = (choose(model.architecture, model.template_marks, wanted, model.absent_tokens)
                        for choose, wanted in ((parsers.choose_tools, settings.tools),
                                               (parsers.choose_reasoning, settings.reasoning)))
    wide = shape.compile and model.architecture in PLAIN_DECODERS
    choices += [*_shape_choices(fit, shape, settings, found), _compile_choice(shape, found),
                *_with_more(fit, shape, settings),
                *(Choice(name=name, value=parser.parser, reason=parser.reason, evidence=parser.evidence)
                  for name, parser in (("tool calls", tools), ("reasoning", reasoning))),
                _residual_choice(wide=wide or fused)]
    tier = host.cpu.tier or "scalar"
    dials = Dials(
        model_name=model.name, kernel=kernel, threads=engines.threads or found.threads.count,
        quantization={**parse_config(model.quantization).to_dict(), "prefill_dequant": True, "kernel": kernel,
                      "dequant_threshold": found.threshold.value, "wide_residual": wide},
        cpus=tuple(sorted(cpu for cpus in engines.cpus for cpu in cpus)) or found.threads.cpus,
        engines=engines.cpus, copied=mapped and engines.apart,
        context=shape.context, running=shape.running, batch_tokens=shape.batch_tokens,
        kv_bytes=budget.kv_bytes(model, shape, found.block_tokens), block=found.block_tokens, compile=shape.compile,
        capability=launch.ATEN_CAPABILITY[tier], compiler=host.software.compiler, drain_s=settings.drain_s,
        tools=tools.parser, reasoning=reasoning.parser, variant=found.variant,
        gemm=found.gemm.value if found.gemm.value != tier_gemm(tier) else "", library_rows=found.library_rows,
    )
    unmapped = replace(fit.fitting, mapped=False).fit(fit.usable_bytes)
    rungs = tuple(_rung(name, changes, dials, places, settings)
                  for name, changes in ladder.changes(dials, model, shape, unmapped))
    phase, peak = budget.peak(lines)
    return Plan(schema=SCHEMA, fingerprint=host.fingerprint, model=model.name, tier=host.cpu.tier, rungs=rungs,
                memory=lines, peak_phase=phase, peak_bytes=peak, ceiling_bytes=fit.ceiling_bytes,
                usable_bytes=fit.usable_bytes, choices=tuple(choices), refused=None, tuned=tuned(found, rules))


def _fused(kernel: str, model: ModelFacts, settings: Settings) -> bool:
    """Whether native operators run each decoder layer whole: all of them one plain shape, and nothing kept in bf16."""
    kept = {layer.name.removesuffix(".weight").rpartition(".")[2] for layer in model.kept}
    return (kernel == "native" and model.architecture in PLAIN_DECODERS and settings.compile is not True
            and kept.isdisjoint(DECODER_LINEARS))


def _refused(host: HostFacts, model: ModelFacts, refusal: Refusal, choices: tuple[Choice, ...]) -> Plan:
    return Plan(schema=SCHEMA, fingerprint=host.fingerprint, model=model.name, tier=host.cpu.tier, rungs=(), memory=(),
                peak_phase="", peak_bytes=0, ceiling_bytes=host.memory.ceiling_bytes, usable_bytes=None,
                choices=choices, refused=refusal)


# ---- choices -------------------------------------------------------------------------------------------------------


def _tier_choice(host: HostFacts) -> Choice:
    blocked = next((f"{t.name}: {t.reason}" for t in host.cpu.tiers if not t.usable and t.reason), "")
    return Choice(name="tier", value=host.cpu.tier,
                  reason="highest that CPU, system and a live proof confirm" + (f" ({blocked})" if blocked else ""),
                  evidence="flags, XGETBV and a child process that ran the instructions")


def _thread_choices(threads: ThreadChoice, engines: EngineChoice) -> Iterator[Choice]:
    if not engines.cpus:
        yield Choice(name="threads", value=threads.count, reason=threads.reason, evidence=threads.evidence)
    elif engines.threads == threads.count:
        own = [part for part in threads.reason.split("; ") if not part.startswith(NUMA_BOUND)]
        yield Choice(name="threads", value=engines.threads, reason="; ".join([*own, "in each engine"]),
                     evidence=threads.evidence)
    else:
        yield Choice(name="threads", value=engines.threads, reason="as many as the engine with the fewest cores has",
                     evidence=engines.evidence)
    if engines.reason:
        yield Choice(name="engines", value=engines.count, reason=engines.reason, evidence=engines.evidence)
    if engines.cpus:
        yield Choice(name="cpus", value=" | ".join(map(ranges, engines.cpus)), evidence=engines.evidence,
                     reason="each engine is confined to its cores")
        yield Choice(name="weights", value="copied" if engines.apart else "shared", evidence="NUMA nodes", reason=(
            "a copy in each engine's own memory: the page cache is one copy, on one node, far from the others"
            if engines.apart else "all engines lie on one node and map the same pages"))
    elif threads.cpus is not None:
        yield Choice(name="cpus", value=ranges(threads.cpus), evidence=threads.evidence,
                     reason="the worker is confined to the chosen cores")


def _running_choice(fit: Fit, threads: ThreadChoice, settings: Settings) -> Choice:
    if settings.max_running:
        return Choice(name="max running requests", value=settings.max_running, reason="set by the operator",
                      evidence="settings")
    each = f"{fit.fitting.running} in each engine: " if fit.engines.cpus else ""
    return Choice(name="max running requests", value=fit.fitting.running * fit.engines.count,
                  evidence=f"{fit.engines.threads or threads.count} threads",
                  reason=f"{each}one read of the weights serves all of them; more would each be too slow on these "
                         "threads")


def _compile_choice(shape: Shape, found: Decisions) -> Choice:
    if found.compile.value and not shape.compile:
        return Choice(name="compile", value=False, reason="the compiler's peak does not fit under the ceiling",
                      evidence="memory arithmetic")
    return Choice(name="compile", value=shape.compile, reason=found.compile.reason, evidence=found.compile.evidence)


def _residual_choice(*, wide: bool) -> Choice:
    return Choice(name="residual stream", value="fp32" if wide else "bf16", evidence="docs/benchmarks.md",
                  reason="takes a quarter of the error against an fp32 reference" if wide else
                  "only the fused layers or the compiled graph of a plain RMSNorm model can keep it wider")


def _kernel_choices(
    kernel: str, host: HostFacts, model: ModelFacts, settings: Settings, trial: KernelTrial | None,
    measured: Record | None, decided: Decisions,
) -> Iterator[Choice]:
    gemm, rows, threshold = decided.gemm, decided.rows, decided.threshold
    why = "set by the operator" if settings.kernel != "auto" else ""
    left_out = "; ".join(trial.left_out) if trial else ""
    forced = settings.kernel if settings.kernel in NATIVE_VARIANTS else ""
    if kernel == "native":
        found = None if forced else tuning.variant(measured, model.digest, left_out=trial.left_out if trial else ())
        if found is not None:
            yield Choice(name="kernel variant", value=found.value, reason=found.reason, evidence=found.evidence)
        else:
            yield Choice(name="kernel variant", value=forced or (trial and trial.variant) or "the CPU's best",
                         reason=f"left out: {left_out}" if left_out else
                         "each start tries it against the reference first",
                         evidence="self-test at the last start" if trial else "not started yet")
        first, faster = (rows.value, rows.reason) if rows else (64, "which AMX makes faster")
        by_library = host.cpu.tier == "amx" and first
        amx = f"; from {first} rows on the library GEMM in {gemm.value}: {faster}" if by_library else ""
        yield Choice(name="kernel, one row", value="native", evidence="worker contract",
                     reason=why or "int16 activations, exact sums, weights read once and mapped from the store")
        yield Choice(name="kernel, many rows", value="native", evidence=rows.evidence if rows else "worker contract",
                     reason=f"the same copy of the weights serves any number of rows{amx}")
    else:
        yield Choice(name="kernel, one row", value="aten", evidence="worker contract",
                     reason=why or (f"torch's int4 kernel; left out: {left_out}" if left_out else
                                    "torch's int4 kernel; the only int4 kernel this worker has"))
        yield Choice(name="kernel, many rows", value=f"dequantize to {gemm.value} and library GEMM",
                     reason="more than one row in torch's int4 kernel is unsafe before attention (SIGILL on AMX hosts)"
                     + f"; {gemm.reason}", evidence=gemm.evidence)
        yield Choice(name="dequant_threshold", value=threshold.value, reason=threshold.reason,
                     evidence=threshold.evidence)
    table_bits = parse_config(model.quantization).stored_table_bits
    yield Choice(name="table bits", value=table_bits, evidence="checkpoint",
                 reason=f"embedding table and head in {table_bits} bits" if table_bits < 16 else
                 "embedding table and head kept in bf16, logits in fp32")
    yield Choice(name="group size", value=model.group_size, evidence="checkpoint",
                 reason=f"{model.bits_per_weight:.2f} bits per weight" +
                 (f"; {len(model.group_size_overrides)} layers differ" if model.group_size_overrides else "") +
                 (f"; {len(model.kept)} weights kept in bf16" if model.kept else ""))
    declared = "" if model.dtype in ("bfloat16", "") else f" (the model declares {model.dtype})"
    yield Choice(name="dtype", value="bfloat16", reason=f"cpu_int4 computes in bfloat16{declared}", evidence="format")


def _measurements(measured: Record | None) -> Iterator[Choice]:
    """What is known by measuring, and whether it still counts."""
    if measured is not None and measured.stale:
        yield Choice(name="measurements", value="damaged" if measured.damaged else "stale",
                     reason="; ".join(measured.stale), evidence="rules of thumb until `applianctl tune` has run")
    elif (found := tuning.read_bandwidth(measured)) is not None:
        yield Choice(name="read bandwidth", value=found.value, reason=found.reason, evidence=found.evidence)


def _with_more(fit: Fit, shape: Shape, settings: Settings) -> Iterator[Choice]:
    """What one GiB more of ceiling, and of free memory, would buy."""
    if fit.ceiling_source.startswith(NUMA_BOUND):
        return  # a higher ceiling of the unit would buy nothing
    kept, kept_then = (budget.reserve_bytes(ceiling, settings.memory.reserve)
                       for ceiling in (fit.ceiling_bytes, fit.ceiling_bytes + budget.GIB))
    if bought := fit.fitting.with_more(shape, fit.usable_bytes + budget.GIB - (kept_then - kept)):
        yield Choice(name="with 1 GiB more", value=bought, evidence="memory arithmetic",
                     reason="what a ceiling that much higher would buy, where the memory is free")


def _shape_choices(fit: Fit, shape: Shape, settings: Settings, found: Decisions) -> Iterator[Choice]:
    fitting, batch, block = fit.fitting, found.batch, found.block
    model = fitting.model
    yield Choice(name="memory ceiling", value=fit.ceiling_bytes, evidence=fit.ceiling_source,
                 reason="the lowest limit on the way to the root")
    if shape.context < fitting.context:
        reason = f"cut from {fitting.context} tokens to fit under the ceiling"
    elif settings.context and settings.context > model.max_context:
        reason = f"the model's maximum; {settings.context} was asked for"
    elif settings.context:
        reason = "set by the operator"
    elif model.short_context:
        reason = f"its rotation changes above that; {model.max_context} at most where `context` asks for it"
    else:
        reason = "the model's maximum"
    yield Choice(name="context", value=shape.context, reason=reason, evidence="memory arithmetic")
    window = (f", {model.sliding_layers} of {model.layers} layers hold a window of {model.sliding_window}"
              if model.sliding_layers else "")
    yield Choice(name="key/value cache", value=budget.kv_bytes(model, shape, fitting.block),
                 evidence="memory arithmetic",
                 reason=f"room for {contexts(shape.sequences)} at {budget.kv_bytes_per_token(model)} bytes "
                        f"a token{window}" + (f", in each of {fitting.engines} engines" if fitting.engines > 1 else ""))
    measured = batch is not None and shape.batch_tokens == batch.value
    yield Choice(name="batch tokens", value=shape.batch_tokens,
                 evidence=batch.evidence if batch and measured else "memory arithmetic",
                 reason=batch.reason if batch and measured else
                 "prompt chunk of one step: bounds the step time and the warm-up")
    yield Choice(name="block size", value=fitting.block, reason="short prompts can share a cached prefix" if
                 block is None else block.reason,
                 evidence="vLLM shares whole blocks only" if block is None else block.evidence)


def _rung(name: str, changes: Mapping[str, Any], dials: Dials, places: Places, settings: Settings) -> Rung:
    changed = launch.narrowed(dials, **changes)
    if name != "full":  # whatever was measured: somebody who steps down has just been hurt
        changed = replace(changed, quantization={**changed.quantization, "dequant_threshold": SAFE_DEQUANT_THRESHOLD})
    return Rung(id=name, changes=dict(changes), argv=launch.argv(changed, places, settings),
                env=launch.env(changed, places, settings), quantization=dict(changed.quantization),
                threads=changed.threads, cpus=changed.cpus, context=changed.context, kv_bytes=changed.kv_bytes,
                running=min(changed.seats, settings.max_running or changed.seats), engines=changed.engines)
