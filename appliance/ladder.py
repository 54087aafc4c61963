"""PURE: the rungs below `full`: what each changes, from least to most.

No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from appliance import budget, launch
from appliance.budget import MIN_CONTEXT, Shape
from appliance.facts import ModelFacts
from appliance.launch import Dials

LOWER_CAPABILITY = {"avx512": "avx2", "avx2": "default"}
LOWER_VARIANT = {"avx2": "avx2", "default": "scalar"}
"""The native kernel's instruction set on a lowered rung; else its self-test chooses."""


def changes(dials: Dials, model: ModelFacts, shape: Shape,
            unmapped: Shape | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rung id and the dials it changes against `full`. The memory rungs build on each other, and on `one-engine` where
    there are several. `unmapped`: what fits
    where the weights are not mapped but packed in memory, as `aten` does; None: nothing, so there is no such rung."""
    yield "full", {}
    alone: dict[str, Any] = {}
    if dials.engines:  # the engine that is left has the CPUs of the first and all its dials
        alone = {"engines": (), "copied": False, "cpus": dials.engines[0]}
        yield "one-engine", alone
    if dials.kernel == "native" and unmapped is not None:
        fits = {"context": unmapped.context, "batch_tokens": unmapped.batch_tokens,
                "kv_bytes": budget.kv_bytes(model, unmapped, dials.block)}
        yield "aten", {"kernel": "aten", **{name: value for name, value in fits.items()
                                            if value < getattr(dials, name)}}
    if dials.compile:
        yield "no-compile", {"compile": False}
    single = replace(shape, sequences=1)
    one = budget.kv_bytes(model, single, dials.block)
    memory = alone
    if one < dials.kv_bytes:
        memory = {**memory, "kv_bytes": one}
        yield "small-kv", memory
    half = max(shape.context // 2, min(MIN_CONTEXT, shape.context))
    if half < shape.context:
        memory = {**memory, "context": half,
                  "kv_bytes": budget.kv_bytes(model, replace(single, context=half), dials.block)}
        yield "short-context", memory
    running = max(1, dials.running // 4)
    yield "small-batch", {**memory, "batch_tokens": max(128, running + launch.PROBE_SEATS), "running": running}
    lower = LOWER_CAPABILITY.get(dials.capability)
    if lower:
        yield "lower-isa", {"capability": lower, "compile": False, "variant": LOWER_VARIANT[lower]}
