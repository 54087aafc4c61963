"""Which layers become 4-bit, at which group size. Pure: no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ModelError, UsageError
from appliance.importing.tensors import StoredTensor
from appliance.quantize.format import parse_config
from appliance.quantize.layers import (
    LayerPlan,
    Recipe,
    architecture_refusal,
    is_head,
    is_table,
    parse_recipe,
    plan_layers,
)
from tests.quantize.models import LLAMA, shapes

LAYER = "model.layers.0"
WINDOWS = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True,
           "sliding_window": 40}


def stored(name: str, shape: list[int], kind: str = "BF16") -> StoredTensor:
    return StoredTensor(name=name, file=Path("m"), offset=0, bytes=0, shape=tuple(shape), kind=kind)


def plan(tensors: dict[str, list[int]], recipe: Recipe | None = None, kinds: dict[str, str] | None = None,
         **config: Any) -> LayerPlan:
    kinds = kinds or {}
    listed = [stored(name, shape, kinds.get(name, "BF16")) for name, shape in tensors.items()]
    return plan_layers(listed, recipe or Recipe(), LLAMA | config)


def groups(p: LayerPlan) -> dict[str, int | None]:
    return {c.module: c.group for c in p.choices}


def reason(p: LayerPlan, module: str) -> str:
    return next(c.reason for c in p.choices if c.module == module)


@pytest.mark.parametrize(("k", "group"), [(288, 32), (576, 64), (896, 64), (8640, 64), (13696, 64), (4304, None)])
def test_case_033_group_by_layer(k: int, group: int | None) -> None:
    tensors = {"model.embed_tokens.weight": [64, 64], f"{LAYER}.mlp.down_proj.weight": [64, k]}
    p = plan(tensors, Recipe(group_size=64, table_bits=4))
    assert groups(p)[f"{LAYER}.mlp.down_proj"] == group
    if group is None:
        assert reason(p, f"{LAYER}.mlp.down_proj") == "no allowed group size divides 4304 columns"
        assert p.config.ignore == (f"{LAYER}.mlp.down_proj",)
    elif group != 64:
        assert p.config.group_size_overrides == {f"{LAYER}.mlp.down_proj": group}
        assert p.config.format_version == 1


@pytest.mark.parametrize(("k", "group"), [(896, 128), (13696, 128), (8640, 64), (288, 32), (576, 64)])
def test_case_033_group_128_preferred(k: int, group: int) -> None:
    p = plan({"model.embed_tokens.weight": [64, 128], f"{LAYER}.mlp.down_proj.weight": [64, k]}, Recipe(group_size=128))
    assert groups(p)[f"{LAYER}.mlp.down_proj"] == group


def test_preferred_group_by_size_and_source() -> None:
    small = shapes()
    big = small | {f"model.layers.1.mlp.{m}_proj.weight": [250_000, 2048] for m in ("gate", "up")}
    assert plan(small).config.group_size == 32
    assert plan(big).config.group_size == 64
    lattice = plan(big, kinds={f"{LAYER}.mlp.down_proj.weight": "Q4_1"})
    assert lattice.config.group_size == 32
    forced = plan(big, Recipe(group_size=64), kinds={f"{LAYER}.self_attn.q_proj.weight": "Q4_0"})
    # The lattice keeps its 32; k and v are computed together with it and follow.
    assert [groups(forced)[f"{LAYER}.self_attn.{m}_proj"] for m in "qkvo"] == [32, 32, 32, 64]
    assert forced.config.group_of(f"{LAYER}.self_attn.v_proj") == 32


def test_a_plain_llama_needs_no_extension() -> None:
    p = plan(shapes(), Recipe(table_bits=4))
    assert set(p.config.to_dict()) == {"quant_method", "group_size", "ignore", "quantize_embedding", "prefill_dequant",
                                       "dequant_threshold", "use_custom_op", "direct_dequant"}
    assert p.config.prefill_dequant
    assert p.config.dequant_threshold == 2
    assert parse_config(p.config.to_dict()) == p.config
    assert [c.tensor.name for c in p.choices if c.group is None] == [n for n, s in shapes().items() if len(s) == 1]


def test_fused_parts_share_their_fate() -> None:
    p = plan(shapes(), Recipe(ignore=(f"{LAYER}.self_attn.k_proj", "gate_up_proj")))
    for module in ("q_proj", "k_proj", "v_proj"):
        assert groups(p)[f"{LAYER}.self_attn.{module}"] is None
        assert groups(p)[f"model.layers.1.self_attn.{module}"] == 32
    assert reason(p, f"{LAYER}.self_attn.q_proj") == "fused with k_proj, which is kept"
    assert {m for m in p.config.ignore if "mlp" in m} == {
        f"model.layers.{i}.mlp.{m}" for i in (0, 1) for m in ("gate_proj", "up_proj")}


def test_table_and_head_are_decided_together() -> None:
    untied = shapes(LLAMA | {"tie_word_embeddings": False})
    assert groups(plan(untied, Recipe(table_bits=4)))["lm_head"] == 32
    p = plan(untied, Recipe(table_bits=16))
    assert groups(p)["lm_head"] is None
    assert groups(p)["model.embed_tokens"] is None
    assert not p.config.quantize_embedding
    assert "lm_head" not in p.config.ignore
    kept = plan(untied | {"lm_head.weight": [80, 48]}, Recipe(table_bits=4))
    assert reason(kept, "model.embed_tokens") == "the other table is kept"


def bits(p: LayerPlan, module: str = "model.embed_tokens") -> int:
    return next(c.bits for c in p.choices if c.module == module)


def test_table_of_a_small_model_has_eight_bits_unless_it_is_four_bit_already() -> None:
    p = plan(shapes())
    assert (groups(p)["model.embed_tokens"], bits(p), bits(p, f"{LAYER}.mlp.up_proj")) == (32, 8, 4)
    assert (p.config.quantize_embedding, p.config.table_bits, p.config.format_version) == (True, 8, 1)
    assert p.config.ignore == ()
    assert parse_config(p.config.to_dict()) == p.config
    big = shapes() | {"model.layers.1.mlp.gate_proj.weight": [500_000, 2048]}
    assert (groups(plan(big))["model.embed_tokens"], bits(plan(big))) == (64, 4)
    assert bits(plan(big, Recipe(table_bits=8))) == 8
    lattice = plan(shapes(), kinds={"model.embed_tokens.weight": "Q4_0"})
    assert (groups(lattice)["model.embed_tokens"], bits(lattice)) == (32, 4)
    assert lattice.config.table_bits is None


@pytest.mark.parametrize(("kind", "table_bits", "kept"), [
    ("Q8_0", 8, True), ("Q8_0", 4, False), ("Q4_1", 4, True), ("Q4_1", 8, False), ("BF16", 8, False),
])
def test_a_lattice_of_the_table_is_kept_when_its_bits_are_wanted(kind: str, table_bits: int, kept: bool) -> None:
    p = plan(shapes(), Recipe(table_bits=table_bits), kinds={"model.embed_tokens.weight": kind,
                                                            f"{LAYER}.mlp.up_proj.weight": "Q8_0"})
    choice = {c.module: c for c in p.choices}
    assert (choice["model.embed_tokens"].lattice, choice["model.embed_tokens"].bits) == (kept, table_bits)
    assert not choice[f"{LAYER}.mlp.up_proj"].lattice


def test_experts_and_routers_are_kept_and_counted() -> None:
    tensors = shapes() | {f"{LAYER}.mlp.experts.{i}.up_proj.weight": [64, 64] for i in range(4)}
    tensors |= {f"{LAYER}.mlp.gate.weight": [4, 64], f"{LAYER}.mlp.shared_expert.up_proj.weight": [64, 64]}
    p = plan(tensors)
    assert p.experts == 4
    assert reason(p, f"{LAYER}.mlp.experts.3.up_proj") == "expert weights are not quantized"
    assert reason(p, f"{LAYER}.mlp.gate").startswith("a router")
    assert f"{LAYER}.mlp.gate" in p.config.ignore
    assert groups(p)[f"{LAYER}.mlp.shared_expert.up_proj"] == 32
    fused = plan(shapes() | {f"{LAYER}.mlp.experts.gate_up_proj": [8, 64, 64]}, num_experts=8)
    assert fused.experts == 8
    assert groups(fused)[f"{LAYER}.mlp.experts.gate_up_proj"] is None


def test_what_is_not_a_linear_of_the_transformer() -> None:
    tensors = shapes() | {"vision_tower.layers.0.fc1.weight": [64, 64], "model.projector.weight": [64, 64],
                          f"{LAYER}.self_attn.q_norm.weight": [64], f"{LAYER}.conv.weight": [64, 1, 32]}
    g = groups(plan(tensors))
    assert all(g[name.removesuffix(".weight")] is None for name in list(tensors)[-4:])
    conv1d = {"transformer.wte.weight": [64, 64], "transformer.h.0.attn.c_attn.weight": [64, 192]}
    gpt2 = plan(conv1d, Recipe(table_bits=4), model_type="gpt2")
    assert reason(gpt2, "transformer.h.0.attn.c_attn").startswith("stored transposed")


@pytest.mark.parametrize(("config", "words"), [
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
    ({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}, None),
    ({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}, None),
    ({"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"}, "until version 0.23.0"),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "not a model of text alone"),
    ({"architectures": ["BertForSequenceClassification"]}, "not a model of text alone"),
    ({"architectures": ["SomethingForCausalLM"]}, "knows no architecture SomethingForCausalLM"),
    ({"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}, "code in its own folder"),
    ({}, "knows no architecture ?"),
    ({"architectures": ["PhimoeForCausalLM"], "model_type": "phimoe"}, "knows no architecture PhimoeForCausalLM"),
    ({"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe"}, None),
    (WINDOWS | {"max_window_layers": 1}, "windows in some of its layers only"),
    (WINDOWS | {"max_window_layers": 1, "use_sliding_window": False}, None),
    (WINDOWS | {"max_window_layers": 3}, None),
    (WINDOWS | {"max_window_layers": 0}, None),
    (WINDOWS | {"layer_types": ["full_attention", "sliding_attention"]}, "windows in some of its layers only"),
    (WINDOWS | {"layer_types": ["full_attention", "full_attention"], "max_window_layers": 1}, None),
])
def test_architectures_that_vllm_does_not_serve_are_refused(config: dict[str, Any], words: str | None) -> None:
    found = architecture_refusal(config)
    assert (found is None) == (words is None)
    if words:
        assert words in (found or "")


def test_a_table_that_vllm_reads_itself_stays() -> None:
    p = plan(shapes(), Recipe(table_bits=8), architectures=["K2HorizonForCausalLM"])
    assert reason(p, "model.embed_tokens") == "vLLM reads this model's table as it is"
    assert (p.config.quantize_embedding, p.config.stored_table_bits) == (False, 16)
    kept = plan(shapes(), architectures=["MuseGlimmerForCausalLM"])
    assert reason(kept, f"{LAYER}.self_attn.o_proj") == "vLLM computes it in bf16"


@pytest.mark.parametrize(("name", "table", "head"), [
    ("model.embed_tokens.weight", True, False), ("lm_head.weight", True, True), ("gpt_neox.embed_in.weight", True, False),
    ("embed_out.weight", True, True), ("transformer.wte.weight", True, False), ("model.layers.0.embeddings.weight", False, False),
    ("model.embed_tokens.bias", False, False), ("embed_tokens", False, False),
])
def test_what_is_a_table(name: str, table: bool, head: bool) -> None:
    assert (is_table(name), is_head(name)) == (table, head)


def test_experts_in_one_tensor_are_told_as_experts() -> None:
    p = plan(shapes() | {f"{LAYER}.block_sparse_moe.input_linear.weight": [8, 64, 64]}, num_local_experts=8)
    assert p.experts == 8
    assert reason(p, f"{LAYER}.block_sparse_moe.input_linear") == "expert weights are not quantized"


def test_nothing_to_quantize_is_refused() -> None:
    with pytest.raises(ModelError, match="no layer of this model"):
        plan({"model.embed_tokens.weight": [64, 30], f"{LAYER}.mlp.up_proj.weight": [64, 30]})


def test_recipe() -> None:
    assert parse_recipe({}) == Recipe()
    full = parse_recipe({"grid": "minmax", "group_size": 64, "table_bits": 16, "ignore": ["a"]})
    assert full == dataclasses.replace(Recipe(), group_size=64, table_bits=16, ignore=("a",))
    assert parse_recipe({"table_bits": 8}).table_bits == 8
    for bad in ({"grid": "x"}, {"group_size": 48}, {"group_size": -1}, {"table_bits": 5}, {"table_bits": "8"},
                {"ignore": "a"}, {"colour": 1}):
        with pytest.raises(UsageError):
            parse_recipe(bad)
