"""PURE: which tensors of a model become 4-bit (tables perhaps 8-bit), at which group size, which stay bf16 and why.

Decides from names, shapes and the recipe alone; no torch, no I/O. Rules: a 2-D `.weight` inside a numbered layer is a
linear unless its name says norm, router, gate or expert; the embedding table and the head are decided together; the
modules that vLLM fuses share one fate and one group size; a code lattice of the source (Q4_0, Q4_1, in an 8-bit table
Q8_0) keeps its group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import ModelError, UsageError
from appliance.importing.tensors import LATTICE, LATTICE_GROUP, TABLE_LATTICE, StoredTensor
from appliance.quantize.format import FUSED, HEADS, TABLES, Int4Config, choose_group, group_refusal

SMALL_MODEL_PARAMETERS = 1_000_000_000
"""Below this the group size is 32 and tables have 8 bits: a small model has little to spare (docs/fidelity.md)."""
TRANSPOSED = ("gpt2",)
"""Model types whose linears are stored [K, N] (Conv1D); groups would run along the wrong axis."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the operator asked for; None = by the model. `table_bits`: 4, 8, or 16 to keep table and head bf16."""

    grid: str = "minmax"
    group_size: int | None = None
    table_bits: int | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fate of one tensor: `group` columns per scale, or None and the `reason` why it stays as it is.

    `lattice`: the source's own codes are kept. `reported`: it has two dimensions or more, so its size matters.
    """

    tensor: StoredTensor
    group: int | None
    bits: int = 4
    reason: str = ""
    lattice: bool = False
    reported: bool = False

    @property
    def module(self) -> str:
        return self.tensor.name.removesuffix(".weight")


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    choices: tuple[Choice, ...]
    config: Int4Config
    parameters: int
    experts: int
    """Experts of one layer, all kept in bf16; 0 for a dense model."""


def parse_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Read the recipe's JSON value. Raises UsageError on an unknown key or a value that is not offered."""
    unknown = sorted(set(raw) - {"grid", "group_size", "table_bits", "ignore"})
    group = raw.get("group_size", "auto")
    ignore = raw.get("ignore", [])
    why = None
    if unknown:
        why = f"unknown field {unknown[0]!r}"
    elif raw.get("grid", "minmax") != "minmax":
        why = f"grid {raw['grid']!r} is not `minmax`"
    elif group != "auto" and group_refusal(group):
        why = group_refusal(group)
    elif raw.get("table_bits", "auto") not in ("auto", 4, 8, 16):
        why = f"table_bits {raw['table_bits']!r} is not auto, 4, 8 or 16"
    elif not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        why = "ignore is not a list of module names"
    if why:
        raise UsageError("the recipe cannot be used", why=why)
    bits = raw.get("table_bits", "auto")
    return Recipe(group_size=None if group == "auto" else group, table_bits=None if bits == "auto" else bits,
                  ignore=tuple(ignore))


def plan_layers(tensors: Iterable[StoredTensor], recipe: Recipe, config: Mapping[str, Any]) -> LayerPlan:
    """Decide every tensor. `config`: the model's config.json value. Raises ModelError when nothing can be quantized."""
    tensors = list(tensors)
    for pattern in recipe.ignore:
        if not any(_named(t.name.removesuffix(".weight"), (pattern,)) for t in tensors):
            raise UsageError(f"--ignore {pattern} names no layer of this model", do="see its layers with `model show`")
    parameters = sum(t.parameters for t in tensors)
    lattice = any(t.kind in LATTICE for t in tensors)
    small = parameters < SMALL_MODEL_PARAMETERS
    preferred = recipe.group_size or (32 if small or lattice else 64)
    bits = recipe.table_bits or _table_bits([t for t in tensors if is_table(t.name)], small)
    transposed = str(config.get("model_type")) in TRANSPOSED
    choices = {t.name: _choose(t, preferred, recipe, transposed, bits) for t in tensors}
    _join_fused(choices)
    _join_tables(choices)
    quantized = [c for c in choices.values() if c.group is not None]
    if not quantized:
        raise ModelError("no layer of this model can be quantized", do="report the model's architecture",
                         why="no linear layer was found that a group size divides")
    overrides = {c.module: c.group for c in quantized if c.group is not None and c.group != preferred}
    # Embeddings are switched by `quantize_embedding`, everything else by name.
    kept = [c for c in choices.values() if c.group is None and c.reported and c.tensor.name.endswith(".weight")]
    ignore = tuple(c.module for c in kept if not is_table(c.tensor.name))
    tables = any(is_table(c.tensor.name) for c in quantized)
    int4 = Int4Config(group_size=preferred, ignore=ignore, quantize_embedding=tables, group_size_overrides=overrides,
                      table_bits=8 if tables and bits == 8 else None,
                      format_version=1 if overrides or (tables and bits == 8) else None)
    return LayerPlan(choices=tuple(choices.values()), config=int4, parameters=parameters,
                     experts=_experts(tensors, config))


def _table_bits(tables: list[StoredTensor], small: bool) -> int:
    """Bits of table and head where the recipe leaves them open: 8 in a small model, unless they are 4-bit already."""
    return 8 if small and not all(t.kind in LATTICE for t in tables) else 4


def is_table(name: str) -> bool:
    """Whether a tensor is the token embedding or the output head."""
    parts = name.split(".")
    return len(parts) >= 2 and parts[-1] == "weight" and parts[-2] in TABLES + HEADS


def is_head(name: str) -> bool:
    parts = name.split(".")
    return len(parts) >= 2 and parts[-1] == "weight" and parts[-2] in HEADS


def _choose(
    t: StoredTensor, preferred: int, recipe: Recipe, transposed: bool, table_bits: int
) -> Choice:
    def kept(reason: str) -> Choice:
        return Choice(tensor=t, group=None, reason=reason, reported=len(t.shape) >= 2)

    if is_table(t.name) and t.is_float:
        named = _named(t.name.removesuffix(".weight"), recipe.ignore)
        reason = "the recipe keeps the table" if table_bits == 16 else None
        reason = reason or ("named in the recipe's ignore list" if named else None)
    else:
        reason = _not_linear(t, recipe)
    if reason:
        return kept(reason)
    if transposed and not is_table(t.name):
        return kept("stored transposed (Conv1D)")
    bits = table_bits if is_table(t.name) else 4
    lattice = t.kind in (TABLE_LATTICE if bits == 8 else LATTICE)
    group = LATTICE_GROUP if lattice else choose_group(t.columns, preferred)
    if group is None:
        return kept(f"no allowed group size divides {t.columns} columns")
    return Choice(tensor=t, group=group, bits=bits, lattice=lattice, reported=True)


def _not_linear(t: StoredTensor, recipe: Recipe) -> str | None:
    if len(t.shape) == 1 or not t.is_float:
        return "not a matrix"
    if re.search(r"\.experts?\.|experts$|\.experts\.", t.name) or len(t.shape) > 2:
        return "expert weights are not quantized" if "expert" in t.name else "not a matrix"
    if not t.name.endswith(".weight") or not re.search(r"(^|\.)(layers|h|blocks|block)\.\d+\.", t.name):
        return "not a linear layer of the transformer"
    if re.search(r"vision|visual|audio|image", t.name):
        return "not part of the language model"
    module = t.name.split(".")[-2]
    if "norm" in module or "embed" in module or module.startswith("ln_"):
        return "not a linear layer of the transformer"
    if module in ("gate", "router", "shared_expert_gate") or ".router." in t.name:
        return "a router decides between experts and stays exact"
    if _named(t.name.removesuffix(".weight"), recipe.ignore):
        return "named in the recipe's ignore list"
    return None


def _named(module: str, patterns: Iterable[str]) -> bool:
    for pattern in patterns:
        head, _, last = pattern.rpartition(".")
        for name in FUSED.get(last, (last,)):
            full = f"{head}.{name}" if head else name
            if module == full or module.endswith(f".{full}"):
                return True
    return False


def _join_fused(choices: dict[str, Choice]) -> None:
    """Give the parts of a fused module one group size, or keep all of them when one must be kept."""
    for name in list(choices):
        for parts in FUSED.values():
            if not name.endswith(f".{parts[0]}.weight"):
                continue
            prefix = name.removesuffix(f"{parts[0]}.weight")
            members = [choices[f"{prefix}{part}.weight"] for part in parts if f"{prefix}{part}.weight" in choices]
            lost = next((m for m in members if m.group is None), None)
            groups = [m.group for m in members if m.group is not None]
            for m in members:
                if lost is not None and m.group is not None:
                    choices[m.tensor.name] = dataclasses.replace(
                        m, group=None, lattice=False, reason=f"fused with {lost.module.split('.')[-1]}, which is kept")
                elif lost is None and not m.lattice:
                    choices[m.tensor.name] = dataclasses.replace(m, group=min(groups))


def _join_tables(choices: dict[str, Choice]) -> None:
    """One switch of the format covers the table and the head: keep both when one must be kept."""
    tables = [c for c in choices.values() if is_table(c.tensor.name)]
    if any(c.group is None for c in tables):
        for c in tables:
            if c.group is not None:
                kept = dataclasses.replace(c, group=None, lattice=False, reason="the other table is kept")
                choices[c.tensor.name] = kept


def _experts(tensors: Iterable[StoredTensor], config: Mapping[str, Any]) -> int:
    numbers = [int(m[1]) for t in tensors if (m := re.search(r"\.experts\.(\d+)\.", t.name))]
    if numbers:
        return max(numbers) + 1
    if any("experts" in t.name for t in tensors):
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((int(config[key]) for key in keys if config.get(key)), 0)
    return 0
