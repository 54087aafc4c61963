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
from appliance.bounds import NUMA_BOUND, UNKNOWN_CEILING, lowest_ceiling, misfit, node_bytes, usable_bytes
from appliance.budget import MemoryItem, Shape
from appliance.engines import EngineChoice, choose_engines, engines_refusal
from appliance.facts import HostFacts, KernelTrial, ModelFacts
from appliance.fitting import BATCHES, Fitting, contexts, lost
from appliance.launch import Dials, Places
from appliance.measured import Record
from appliance.quantize.format import NATIVE_VARIANTS, PLAIN_DECODERS, parse_config
from appliance.refusal import Refusal, early_refusal, ranges
from appliance.settings import Settings
from appliance.threads import ThreadChoice, choose_threads
from appliance.tuning import Preference

SCHEMA = 1
BLOCK = 32
"""Tokens per key/value block: with vLLM's own 128 short prompts share no prefix; AMX attention wants 32n."""
SAFE_DEQUANT_THRESHOLD = 2
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
    tier = host.cpu.tier or "scalar"
    choices: list[Choice] = [_tier_choice(host)]
    kernel = tuning.served_kernel(settings.kernel, kernels, trial)
    threads = choose_threads(host.topology, settings, tuning.thread_trials(measured, model.digest, kernel))
    if impossible := engines_refusal(host.topology, settings, experts=bool(model.experts)):
        return _refused(host, model, Refusal(exit_code=78, what=f"cpu.engines {settings.cpu.engines} is impossible",
                                             why=impossible, do="set cpu.engines to auto"), ())
    engines = choose_engines(host.topology, settings, threads, experts=bool(model.experts))
    gemm = _gemm(tier, model, measured)
    rows = tuning.library_rows(measured, model.digest, gemm.value) if tier == "amx" else None
    choices += _kernel_choices(kernel, tier, model, settings, trial, measured, gemm, rows)
    choices += _measurements(measured)
    running = settings.max_running or _default_running(threads.count)
    kept = {layer.name.removesuffix(".weight").rpartition(".")[2] for layer in model.kept}
    fused = (kernel == "native" and model.architecture in PLAIN_DECODERS and settings.compile is not True
             and kept.isdisjoint(DECODER_LINEARS))
    compiled = tuning.served(measured, model.digest, "compile", True) if settings.compile is None else None
    can_compile, compile_reason, compile_evidence = _compile(host, settings, compiled, fused=fused)
    ceiling, ceiling_source = lowest_ceiling(host, settings, threads.cpus, EngineChoice())
    usable = usable_bytes(host, ceiling, settings)
    batch = tuning.served(measured, model.digest, "batch_tokens", BATCHES[0])
    blocks = tuning.served(measured, model.digest, "block", BLOCK)
    block = int(blocks.value) if blocks else BLOCK
    mapped = kernel == "native" and bool(places.prepared)
    if ceiling is None or usable is None:
        return _refused(host, model, UNKNOWN_CEILING, tuple(choices))
    fitting = Fitting(model=model, wanted_context=settings.context, running=running, can_compile=can_compile,
                      block=block, gemm_bytes=2 if gemm.value == "bf16" else 4, mapped=mapped,
                      batch=int(batch.value) if batch else BATCHES[0])
    shape = fitting.fit(usable)
    if engines.cpus:
        share = -(-settings.max_running // engines.count) if settings.max_running else _default_running(engines.threads)
        several = replace(fitting, running=share, engines=engines.count, copies=engines.count if engines.apart else 1,
                          node_bytes=node_bytes(host, settings, engines))
        wide, wide_source = lowest_ceiling(host, settings, threads.cpus, engines)
        spread = several.fit(usable_bytes(host, wide, settings) or 0)
        if settings.cpu.engines is None and (worse := lost(shape, spread)):
            engines = EngineChoice(reason=f"{engines.count} engines {worse}", evidence="memory arithmetic")
        else:
            fitting, shape, ceiling, ceiling_source = several, spread, wide or 0, wide_source
            usable = usable_bytes(host, wide, settings) or 0
    choices[1:1] = _thread_choices(threads, engines)
    choices.append(_running_choice(fitting.running, engines.threads or threads.count, settings, engines))
    if shape is None:
        return _refused(host, model, misfit(fitting, ceiling, usable, settings), tuple(choices))
    lines = fitting.lines(shape)
    if can_compile and not shape.compile:
        compile_reason, compile_evidence = "the compiler's peak does not fit under the ceiling", "memory arithmetic"
    choices += _shape_choices(fitting, settings, shape, ceiling, ceiling_source, batch, blocks)
    choices.append(Choice(name="compile", value=shape.compile, reason=compile_reason, evidence=compile_evidence))
    choices += _with_more(fitting, shape, ceiling, ceiling_source, usable, settings)
    tools = parsers.choose_tools(model.architecture, model.template_marks, settings.tools, model.absent_tokens)
    reasoning = parsers.choose_reasoning(model.architecture, model.template_marks, settings.reasoning,
                                         model.absent_tokens)
    choices += (Choice(name=name, value=found.parser, reason=found.reason, evidence=found.evidence)
                for name, found in (("tool calls", tools), ("reasoning", reasoning)))
    wide = shape.compile and model.architecture in PLAIN_DECODERS
    choices.append(Choice(name="residual stream", value="fp32" if wide or fused else "bf16",
                          evidence="docs/benchmarks.md",
                          reason="takes a quarter of the error against an fp32 reference" if wide or fused else
                          "only the fused layers or the compiled graph of a plain RMSNorm model can keep it wider"))
    quantization = {**parse_config(model.quantization).to_dict(), "prefill_dequant": True,
                    "dequant_threshold": _threshold(kernel, model, measured).value, "kernel": kernel,
                    "wide_residual": wide}
    dials = Dials(
        model_name=model.name, quantization=quantization, kernel=kernel, threads=engines.threads or threads.count,
        cpus=tuple(sorted(cpu for cpus in engines.cpus for cpu in cpus)) or threads.cpus,
        engines=engines.cpus, copied=mapped and engines.apart,
        context=shape.context, running=shape.running, batch_tokens=shape.batch_tokens,
        kv_bytes=budget.kv_bytes(model, shape, block), block=block, compile=shape.compile,
        capability=launch.ATEN_CAPABILITY[tier], compiler=host.software.compiler, drain_s=settings.drain_s,
        tools=tools.parser, reasoning=reasoning.parser, variant=_variant(kernel, model, settings, trial, measured),
        gemm=gemm.value if gemm.value != _tier_gemm(tier) else "", library_rows=str(rows.value) if rows else "",
    )
    rule = choose_threads(host.topology, settings)
    decided = {
        "threads": (threads.count, rule.count), "cpus": (ranges(threads.cpus or ()), ranges(rule.cpus or ())),
        "variant": (dials.variant, _variant(kernel, model, settings, trial, None)), "gemm": (dials.gemm, ""),
        "batch tokens": (fitting.batch, BATCHES[0]), "block": (block, BLOCK),
        "compile": (can_compile, _compile(host, settings, None, fused=fused)[0]),
        "library rows": (dials.library_rows, ""),
        "dequant_threshold": (quantization["dequant_threshold"], SAFE_DEQUANT_THRESHOLD)}
    unmapped = replace(fitting, mapped=False).fit(usable)
    rungs = tuple(_rung(name, changes, dials, places, settings)
                  for name, changes in ladder.changes(dials, model, shape, unmapped))
    phase, peak = budget.peak(lines)
    return Plan(schema=SCHEMA, fingerprint=host.fingerprint, model=model.name, tier=host.cpu.tier, rungs=rungs,
                memory=lines, peak_phase=phase, peak_bytes=peak, ceiling_bytes=ceiling, usable_bytes=usable,
                choices=tuple(choices), refused=None,
                tuned={name: value for name, (value, by_rule) in decided.items() if value != by_rule})


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


def _running_choice(running: int, threads: int, settings: Settings, engines: EngineChoice) -> Choice:
    if settings.max_running:
        return Choice(name="max running requests", value=settings.max_running, reason="set by the operator",
                      evidence="settings")
    each = f"{running} in each engine: " if engines.cpus else ""
    return Choice(name="max running requests", value=running * engines.count, evidence=f"{threads} threads",
                  reason=f"{each}one read of the weights serves all of them; more would each be too slow on these "
                         "threads")


def _kernel_choices(
    kernel: str, tier: str, model: ModelFacts, settings: Settings, trial: KernelTrial | None, measured: Record | None,
    gemm: Preference, rows: Preference | None,
) -> Iterator[Choice]:
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
        amx = f"; from {first} rows on the library GEMM in {gemm.value}: {faster}" if tier == "amx" and first else ""
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
        threshold = _threshold(kernel, model, measured)
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


def _variant(kernel: str, model: ModelFacts, settings: Settings, trial: KernelTrial | None,
             measured: Record | None) -> str:
    """The native kernel's instruction set to force: the operator's, or the one measured to be faster than its own."""
    if kernel != "native" or settings.kernel in NATIVE_VARIANTS:
        return settings.kernel if settings.kernel in NATIVE_VARIANTS else ""
    return tuning.preferred_variant(measured, model.digest, left_out=trial.left_out if trial else ())


def _tier_gemm(tier: str) -> str:
    return "bf16" if tier in ("avx512_bf16", "amx") else "fp32"


def _gemm(tier: str, model: ModelFacts, measured: Record | None) -> Preference:
    """The type of torch's GEMM: as measured where the CPU multiplies bf16, else fp32."""
    found = tuning.gemm(measured, model.digest, "bf16") if _tier_gemm(tier) == "bf16" else None
    return found or Preference(value=_tier_gemm(tier), evidence="no canary has passed for this host", reason=
                               "bf16 GEMM has its own instructions here" if _tier_gemm(tier) == "bf16" else
                               "bf16 GEMM is several times slower than fp32 on this tier")


def _threshold(kernel: str, model: ModelFacts, measured: Record | None) -> Preference:
    """From how many rows on torch's int4 kernel is left: 2, unless it was measured to be safe and faster here."""
    found = tuning.threshold(measured, model.digest) if kernel == "aten" else None
    return found or Preference(value=SAFE_DEQUANT_THRESHOLD, evidence="safety rule",
                               reason="only one-row steps take the int4 kernel, the head included")


def _measurements(measured: Record | None) -> Iterator[Choice]:
    """What is known by measuring, and whether it still counts."""
    if measured is not None and measured.stale:
        yield Choice(name="measurements", value="stale", reason="; ".join(measured.stale),
                     evidence="rules of thumb until `applianctl tune` has run")
    elif (found := tuning.read_bandwidth(measured)) is not None:
        yield Choice(name="read bandwidth", value=found.value, reason=found.reason, evidence=found.evidence)


def _default_running(threads: int) -> int:
    return 8 if threads <= 4 else 16 if threads <= 16 else 32


def _compile(host: HostFacts, settings: Settings, measured: Preference | None, *,
             fused: bool) -> tuple[bool, str, str]:
    if settings.compile is False:
        return False, "switched off by the operator", "settings compile"
    if fused:
        return False, "native operators run each decoder layer whole: nothing is left to compile", "docs/profile.md"
    if host.software.compiler is None:
        return False, "torch.compile needs g++ and none was found; layers run one by one, decode is slower", "PATH"
    if host.software.python_headers is None:
        return False, "torch.compile needs Python.h and none was found; decode is slower", "include path"
    if measured is not None:
        return bool(measured.value), measured.reason, measured.evidence
    return True, "fuses the work between matrix products; cached for later starts", host.software.compiler


def _with_more(fitting: Fitting, shape: Shape, ceiling: int, ceiling_source: str, usable: int,
               settings: Settings) -> Iterator[Choice]:
    """What one GiB more of ceiling, and of free memory, would buy."""
    if ceiling_source.startswith(NUMA_BOUND):
        return  # a higher ceiling of the unit would buy nothing
    reserve = settings.memory.reserve
    growth = budget.GIB - (budget.reserve_bytes(ceiling + budget.GIB, reserve) - budget.reserve_bytes(ceiling, reserve))
    if bought := fitting.with_more(shape, usable + growth):
        yield Choice(name="with 1 GiB more", value=bought, evidence="memory arithmetic",
                     reason="what a ceiling that much higher would buy, where the memory is free")


def _shape_choices(fitting: Fitting, settings: Settings, shape: Shape, ceiling: int | None, ceiling_source: str,
                   batch: Preference | None, block: Preference | None) -> Iterator[Choice]:
    model = fitting.model
    yield Choice(name="memory ceiling", value=ceiling, evidence=ceiling_source,
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
