"""Write the `cpu_int4` checkpoint of a model: block by block, with bounded memory.

Reads any source that `appliance.importing` knows and fills an empty directory; it makes nothing durable and publishes
nothing (the agent's store does). Runs in the worker's environment as a child of the agent.
Rules: never more than one block of rows of one tensor in memory, or one layer while calibrating; codes of lattices of
the source are kept, only their scale and offset are rounded; tables have the min/max grid, since a search by the error
of the weights makes a model worse there; what cannot be calibrated is searched, and the report says so; a folder that
is `cpu_int4` already is checked and copied, not converted; every choice and every loss stands in the report.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import ModelError, UsageError
from appliance.importing.reader import open_source
from appliance.importing.source import Source, inspect
from appliance.importing.template import settle as settle_template
from appliance.importing.tensors import NormalForm, StoredTensor, float_rows, lattice_rows, raw_rows
from appliance.quantize.format import PACKED, SCALE, ZERO, Int4Config, packed_columns
from appliance.quantize.layers import (
    SMALL_MODEL_PARAMETERS,
    Choice,
    LayerPlan,
    Recipe,
    is_head,
    is_table,
    plan_layers,
    refuse_architecture,
)
from appliance.quantize.shards import SHARD_BYTES, Output, ShardWriter

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 21
"""Weights worked on at once: 8 MB in float32, some 60 MB with all intermediates."""

Event = Callable[[dict[str, Any]], None]


@dataclass
class Tally:
    """What the run measured, summed over blocks: signal and error energy per layer, rounding of kept lattices."""

    signal: float = 0.0
    noise: float = 0.0
    roundings: list[tuple[float, float, int]] = field(default_factory=list)  # (max, sum, count) of relative error


def quantize(path: Path, out: Path, recipe: Recipe, event: Event, *, shard_bytes: int = SHARD_BYTES,
             outline: bool = False) -> dict[str, Any]:
    """Convert the source at `path` into the empty or absent directory `out`; returns the report.

    `outline`: weights are files of their full size with headers and no data, so that all but the weights can be judged.
    `event` receives the progress lines. Raises ModelError when the source cannot be used, OSError when the disk fails.
    """
    event({"event": "phase", "phase": "reading", "note": ""})
    source = inspect(path)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ModelError(f"{out} is not empty", do="give an empty or absent directory")
    if source.kind == "cpu_int4":
        from appliance.quantize.adopt import adopt

        return adopt(source, out, event, chat_template=recipe.chat_template)
    form = open_source(source)
    refuse_architecture(form.config, path)
    form.write_extras(out)  # before the long part: a tokenizer that cannot be had ends the run at once
    template = settle_template(out, recipe.chat_template)
    tied, tensors = _settle_tie(form, weights_there=not outline)
    plan = plan_layers(tensors, recipe, form.config)
    _write_config(out, form.config, plan.config, tied)
    event({"event": "phase", "phase": "quantizing", "note": f"{len(plan.choices)} tensors"})
    if outline:
        with ShardWriter(out, [_outputs(c) for c in plan.choices], limit=shard_bytes, hollow=True):
            return _report(source, form, plan, out, [], "", template)
    grid = recipe.grid
    if grid == "auto":
        grid = "calibrated" if plan.parameters < SMALL_MODEL_PARAMETERS else "search"
    layers, roundings, note = _write_tensors(out, form, plan, grid, event, shard_bytes)
    event({"event": "phase", "phase": "writing", "note": ""})
    report = _report(source, form, plan, out, layers, _loss(roundings), template)
    return {**report, "grid": grid, **({"grid_note": note} if note else {})}


def _settle_tie(form: NormalForm, *, weights_there: bool) -> tuple[bool, list[StoredTensor]]:
    """Make the tie flag and the stored tensors agree. Returns the flag and the tensors to write.

    Without a flag an equal head is a tied one: some of vLLM's files (Gemma) refuse an untied model, and one table is
    enough. Without weights to compare it counts as its own, which needs more memory and not less.
    """
    tensors = dict(form.tensors)
    head = next((name for name in tensors if is_head(name)), None)
    table = next((name for name in tensors if is_table(name) and not is_head(name)), None)
    declared = form.config.get("tie_word_embeddings")
    if table is None:
        raise ModelError("the model has no token embedding", why="no tensor is named embed_tokens.weight",
                         do="use a model of a supported architecture")
    if head is None:
        if declared is False:
            raise ModelError("the model is incomplete", do="download the model again",
                             why="lm_head.weight is missing and tie_word_embeddings is false")
        return True, list(tensors.values())
    if declared or (declared is None and weights_there):
        equal = _equal(tensors[head], tensors[table])
        if not equal and declared is None:
            return False, list(tensors.values())
        if not equal:
            raise ModelError("the model contradicts itself", why=f"tie_word_embeddings is true, but {head} and {table} "
                             "differ", do="set tie_word_embeddings to false if the head is meant to be its own")
        del tensors[head]
        return True, list(tensors.values())
    return False, list(tensors.values())


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    import torch

    if a.shape != b.shape:
        return False
    return all(torch.equal(float_rows(a, *span), float_rows(b, *span)) for span in _spans(a))


def _spans(t: StoredTensor) -> list[tuple[int, int]]:
    rows = max(1, BLOCK_ELEMENTS // max(t.columns, 1))
    return [(start, min(start + rows, t.rows)) for start in range(0, t.rows, rows)]


def _write_config(out: Path, config: Mapping[str, Any], int4: Int4Config, tied: bool) -> None:
    """config.json with the complete `quantization_config`, bfloat16 everywhere and the settled tie flag."""
    written = copy.deepcopy(dict(config))
    written.pop("dtype", None)
    written["torch_dtype"] = "bfloat16"
    for part in written.values():
        if isinstance(part, dict) and ("torch_dtype" in part or "dtype" in part):
            part.pop("dtype", None)
            part["torch_dtype"] = "bfloat16"
    written["tie_word_embeddings"] = tied
    written["quantization_config"] = int4.to_dict()
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def _outputs(choice: Choice) -> list[Output]:
    t = choice.tensor
    if choice.group is None:
        if not t.is_float:
            return [Output(name=t.name, dtype=t.kind, shape=t.shape, bytes=t.bytes)]
        return [Output(name=t.name, dtype="BF16", shape=t.shape, bytes=2 * t.parameters)]
    n, k, groups = t.rows, t.columns, t.columns // choice.group
    return [
        Output(name=f"{choice.module}.{PACKED}", dtype="U8", shape=(n, packed_columns(k, choice.bits)),
               bytes=n * packed_columns(k, choice.bits)),
        Output(name=f"{choice.module}.{SCALE}", dtype="BF16", shape=(n, groups), bytes=2 * n * groups),
        Output(name=f"{choice.module}.{ZERO}", dtype="BF16", shape=(n, groups), bytes=2 * n * groups),
    ]


def _write_tensors(out: Path, form: NormalForm, plan: LayerPlan, grid: str, event: Event, shard_bytes: int,
                   ) -> tuple[list[dict[str, Any]], Tally, str]:
    """Write every tensor. Returns the report's layers, the roundings of kept lattices, and why none was calibrated."""
    total = sum(c.tensor.bytes for c in plan.choices)
    done, layers, all_rounding = 0, [], Tally()
    with ShardWriter(out, [_outputs(c) for c in plan.choices], limit=shard_bytes) as writer:
        calibrated, note = _write_calibrated(writer, out, form, plan, event) if grid == "calibrated" else ({}, "")
        for choice in plan.choices:
            t, tally = choice.tensor, calibrated.get(choice.module, Tally())
            searched = grid != "minmax" and not is_table(t.name)
            for start, stop in _spans(t):
                if choice.module not in calibrated:
                    _write_block(writer, choice, start, stop, searched, tally)
                done += (stop - start) * t.row_bytes
                event({"event": "progress", "done_bytes": done, "total_bytes": total, "item": t.name})
            all_rounding.roundings += tally.roundings
            if choice.group is not None:
                route = "calibrated" if choice.module in calibrated else "searched" if searched else "min/max"
                layers.append({
                    "name": choice.module, "shape": [t.rows, t.columns], "group": choice.group, "bits": choice.bits,
                    "route": "codes kept" if choice.lattice else route, "snr_db": _decibel(tally),
                })
    return layers, all_rounding, note


def _write_calibrated(writer: ShardWriter, out: Path, form: NormalForm, plan: LayerPlan, event: Event,
                      ) -> tuple[dict[str, Tally], str]:
    """Write the linears that can be calibrated; returns what was written, and why nothing was."""
    from appliance.quantize.grid import pack

    groups = {c.module: c.group for c in plan.choices
              if c.group is not None and not c.lattice and not is_table(c.tensor.name) and len(c.tensor.shape) == 2}
    sizes = {c.module: c.tensor.bytes for c in plan.choices if c.module in groups}
    done, total = 0, sum(sizes.values())
    written: dict[str, Tally] = {}
    if not groups:
        return written, ""
    from appliance.evaluate.weights import of_form
    from appliance.quantize.calibrate import Quantized, calibrate

    def store(module: str, found: Quantized) -> None:
        nonlocal done
        writer.write(f"{module}.{PACKED}", pack(found.codes))
        writer.write(f"{module}.{SCALE}", found.scale)
        writer.write(f"{module}.{ZERO}", found.zero)
        written[module] = Tally(signal=found.signal, noise=found.noise)
        done += sizes[module]
        event({"event": "progress", "done_bytes": done, "total_bytes": total, "item": module})

    event({"event": "phase", "phase": "calibrating", "note": f"{len(groups)} layers"})
    note = ""
    try:
        calibrate(out, of_form(form), groups, store)
    except (ModelError, UsageError) as error:  # UsageError: the tokenizer makes too few tokens of the text
        note = f"not calibrated: {error.why or error.what}"
    event({"event": "phase", "phase": "quantizing", "note": note or f"the other tensors of {len(plan.choices)}"})
    return written, note


def _write_block(writer: ShardWriter, choice: Choice, start: int, stop: int, search: bool, tally: Tally) -> None:
    import torch

    from appliance.quantize.grid import SMALLEST_STEP, dequantize, minmax, pack, searched

    t = choice.tensor
    if choice.group is None:
        raw = float_rows(t, start, stop).to(torch.bfloat16) if t.is_float else raw_rows(t, start, stop)
        writer.write(t.name, raw)
        return
    if choice.lattice:
        codes, exact_scale, exact_zero = lattice_rows(t, start, stop, choice.bits)
        values = dequantize(codes, exact_scale, exact_zero, choice.bits)
        scale, zero = exact_scale.to(torch.bfloat16), exact_zero.to(torch.bfloat16)
        scale = scale.masked_fill(scale == 0, SMALLEST_STEP)  # a constant group: its zero says it all
        tally.roundings += [_rounding(exact_scale, scale), _rounding(exact_zero, zero)]
    else:
        values = float_rows(t, start, stop)
        codes, scale, zero = (searched if search else minmax)(values, choice.group, choice.bits)
    tally.signal += _energy(values)
    tally.noise += _energy(dequantize(codes, scale, zero, choice.bits).sub_(values))
    writer.write(f"{choice.module}.{PACKED}", pack(codes, choice.bits))
    writer.write(f"{choice.module}.{SCALE}", scale)
    writer.write(f"{choice.module}.{ZERO}", zero)


def _energy(values: torch.Tensor) -> float:
    flat = values.flatten()
    return float(flat @ flat)


def _rounding(exact: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float, int]:
    some = exact != 0
    if not bool(some.any()):
        return 0.0, 0.0, 0
    error = ((rounded.float() - exact).abs() / exact.abs())[some]
    return float(error.max()), float(error.sum()), error.numel()


def _decibel(tally: Tally) -> float | None:
    """Signal-to-noise ratio; None where there is no signal or no error to compare."""
    import math

    if tally.signal == 0 or tally.noise == 0:
        return None
    return round(10 * math.log10(tally.signal / tally.noise), 2)


def _loss(tally: Tally) -> str:
    count = sum(n for _, _, n in tally.roundings)
    if count == 0:
        return ("weights rounded to 4 bits a value (8 in tables that say so); the stored bf16 scales and zeros are "
                "those the codes were chosen for")
    largest = max(m for m, _, _ in tally.roundings)
    mean = sum(s for _, s, _ in tally.roundings) / count
    return (f"codes of tensors that were 4-bit (in tables 8-bit) already kept; their scales and offsets rounded to "
            f"bf16: relative error at most {largest:.2%}, {mean:.2%} on average; the rest rounded to the bits it has")


def _report(source: Source, form: NormalForm, plan: LayerPlan, out: Path, layers: list[dict[str, Any]], loss: str,
            template: dict[str, Any] | None) -> dict[str, Any]:
    stored = sum(o.bytes for c in plan.choices for o in _outputs(c))
    kept = [{"name": c.module, "reason": c.reason, "bytes": 2 * c.tensor.parameters}
            for c in plan.choices if c.group is None and c.reported]
    return {
        "source_kind": form.kind,
        "architecture": form.config["architectures"][0],
        "parameters": plan.parameters,
        "group_size": plan.config.group_size,
        "group_size_overrides": dict(plan.config.group_size_overrides),
        "kept": kept,
        "layers": layers,
        "loss": loss,
        "experts": plan.experts,
        "chat": template is not None and not template["fault"],
        "template": template,
        "source_bytes": source.bytes,
        "out_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "bits_per_weight": round(8 * stored / plan.parameters, 3),
    }
