"""PURE: which tensors of a model become 4-bit (tables perhaps 8-bit), at which group size, which stay bf16 and why.

Decides from names, shapes and the recipe alone; no torch, no I/O. Rules: a 2-D `.weight` inside a numbered layer is a
linear unless its name says norm, router, gate or expert; the embedding table and the head are decided together; the
modules that vLLM fuses share one fate and one group size; a code lattice of the source (a 4-bit GGUF type, in an
8-bit table one of 8) keeps its group. What vLLM itself builds without a quantization stays bf16; that is known from
`served`, which is made from the installed vLLM, and from nothing else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ModelError, UsageError
from appliance.importing.tensors import LATTICE, LATTICE_GROUP, TABLE_LATTICE, StoredTensor
from appliance.quantize import served
from appliance.quantize.format import FUSED, GRIDS, HEADS, TABLES, Int4Config, choose_group, group_refusal

SMALL_MODEL_PARAMETERS = 1_000_000_000
"""Below this the group size is 32 and tables have 8 bits: a small model has little to spare (docs/fidelity.md)."""
TRANSPOSED = ("gpt2",)
"""Model types whose linears are stored [K, N] (Conv1D); groups would run along the wrong axis."""
ALIKE_WINDOWS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM")
"""vLLM's files of these stop where some layers have a sliding window and others none."""
IN_LAYER = r"(^|\.)(layers|h|blocks|block)\.\d+\."
"""What the name of a tensor in a numbered layer contains."""
STACKED_EXPERTS = r"expert|_moe\."
"""What the names of tensors contain that hold experts, each in its own tensor or all in one of three dimensions."""
EXPERT = "expert weights are not quantized"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the operator asked for; None, and the grid `auto` = by the model.

    `table_bits`: 4, 8, or 16 to keep table and head bf16.
    """

    grid: str = "minmax"
    group_size: int | None = None
    table_bits: int | None = None
    ignore: tuple[str, ...] = ()
    chat_template: str = ""
    """The text of a chat template that takes the place of the model's own; empty: its own."""


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


def architecture_refusal(config: Mapping[str, Any]) -> str | None:
    """Why the worker's vLLM cannot serve a model of this config.json as a generator of text, or None."""
    name = str((config.get("architectures") or ["?"])[0])
    kind = str(config.get("model_type") or "")
    if name in served.FORMER:
        return f"vLLM served {name} until version {served.FORMER[name]} and does not any more"
    if name in served.OTHERS:
        return f"{name} is not a model of text alone: it classifies, embeds, drafts, or sees images or sound"
    if name not in served.NATIVE and name not in served.BY_TRANSFORMERS:
        return f"vLLM {served.VLLM_VERSION} knows no architecture {name}"
    if kind and kind not in served.CONFIGURATIONS:
        return f"its configuration ({kind}) is code in its own folder, and such code is never run"
    if name in ALIKE_WINDOWS and _windows_differ(config):
        return f"vLLM {served.VLLM_VERSION} serves no {name} with sliding windows in some of its layers only"
    return None


def _windows_differ(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return len({str(kind) for kind in kinds}) > 1
    first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
    return (bool(config.get("use_sliding_window") and config.get("sliding_window"))
            and isinstance(first, int) and isinstance(layers, int) and 0 < first < layers)


def refuse_architecture(config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError where `architecture_refusal` has a reason; `path`: the source, for the sentence."""
    if reason := architecture_refusal(config):
        raise ModelError(f"{path} cannot be served", why=reason,
                         do="use a model of an architecture in docs/models.md")


def parse_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Read the recipe's JSON value. Raises UsageError on an unknown key or a value that is not offered."""
    unknown = sorted(set(raw) - {"grid", "group_size", "table_bits", "ignore", "chat_template"})
    group = raw.get("group_size", "auto")
    ignore = raw.get("ignore", [])
    why = None
    if unknown:
        why = f"unknown field {unknown[0]!r}"
    elif raw.get("grid", "minmax") not in ("auto", *GRIDS):
        why = f"grid {raw['grid']!r} is not auto, {', '.join(GRIDS)}"
    elif group != "auto" and group_refusal(group):
        why = group_refusal(group)
    elif raw.get("table_bits", "auto") not in ("auto", 4, 8, 16):
        why = f"table_bits {raw['table_bits']!r} is not auto, 4, 8 or 16"
    elif not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        why = "ignore is not a list of module names"
    elif not isinstance(raw.get("chat_template", ""), str):
        why = "chat_template is not a text"
    if why:
        raise UsageError("the recipe cannot be used", why=why)
    bits = raw.get("table_bits", "auto")
    return Recipe(grid=raw.get("grid", "minmax"),
                  group_size=None if group == "auto" else group, table_bits=None if bits == "auto" else bits,
                  ignore=tuple(ignore), chat_template=raw.get("chat_template", ""))


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
    architecture = str((config.get("architectures") or [""])[0])
    readable = architecture not in served.KEPT_TABLES
    bits = (recipe.table_bits or _table_bits([t for t in tensors if is_table(t.name)], small)) if readable else 16
    rules = _Rules(
        recipe=recipe, preferred=preferred, table_bits=bits, transposed=str(config.get("model_type")) in TRANSPOSED,
        kept_table="the recipe keeps the table" if readable else "vLLM reads this model's table as it is",
        kept_linears=served.KEPT_LINEARS.get(architecture, ()))
    choices = {t.name: _choose(t, rules) for t in tensors}
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
    return _is_one_of(name, TABLES + HEADS)


def is_head(name: str) -> bool:
    return _is_one_of(name, HEADS)


def _is_one_of(name: str, modules: tuple[str, ...]) -> bool:
    parts = name.split(".")
    return len(parts) >= 2 and parts[-1] == "weight" and parts[-2] in modules and not re.search(IN_LAYER, name)


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """What holds for every tensor of one model. `kept_linears`: last parts of the names that vLLM computes in bf16."""

    recipe: Recipe
    preferred: int
    table_bits: int
    transposed: bool
    kept_table: str
    kept_linears: tuple[str, ...]


def _choose(t: StoredTensor, rules: _Rules) -> Choice:
    def kept(reason: str) -> Choice:
        return Choice(tensor=t, group=None, reason=reason, reported=len(t.shape) >= 2)

    if is_table(t.name) and t.is_float:
        named = _named(t.name.removesuffix(".weight"), rules.recipe.ignore)
        reason = rules.kept_table if rules.table_bits == 16 else None
        reason = reason or ("named in the recipe's ignore list" if named else None)
    else:
        reason = _not_linear(t, rules.recipe)
    if reason:
        return kept(reason)
    if rules.transposed and not is_table(t.name):
        return kept("stored transposed (Conv1D)")
    if t.name.split(".")[-2] in rules.kept_linears:
        return kept("vLLM computes it in bf16")
    bits = rules.table_bits if is_table(t.name) else 4
    lattice = t.kind in (TABLE_LATTICE if bits == 8 else LATTICE)
    group = LATTICE_GROUP if lattice else choose_group(t.columns, rules.preferred)
    if group is None:
        return kept(f"no allowed group size divides {t.columns} columns")
    return Choice(tensor=t, group=group, bits=bits, lattice=lattice, reported=True)


def _not_linear(t: StoredTensor, recipe: Recipe) -> str | None:
    if len(t.shape) == 1 or not t.is_float:
        return "not a matrix"
    if re.search(r"\.experts?\.|experts$|\.experts\.", t.name) or len(t.shape) > 2:
        return EXPERT if re.search(STACKED_EXPERTS, t.name) else "not a matrix"
    if not t.name.endswith(".weight") or not re.search(IN_LAYER, t.name):
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
    if any(len(t.shape) > 2 and re.search(STACKED_EXPERTS, t.name) for t in tensors):
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((config[key] for key in keys if isinstance(config.get(key), int) and config[key] > 0), 0)
    return 0
