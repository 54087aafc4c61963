"""Model facts from config.json and headers alone: one row for each habit of a model family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ModelError
from appliance.facts import KeptLayer, ModelFacts
from appliance.probe.model import read_model
from tests.process.fake_models import LLAMA, int4, write_model, write_safetensors

QUANT = {"quant_method": "cpu_int4", "group_size": 32}


def shapes(inner: int = 128, *, down: bool = True) -> dict[str, Any]:
    """A llama-like set of tensors: 4 heads, 2 for keys and values; `down` False keeps down_proj in bf16."""
    hidden, layers, group = 64, 2, 32
    found: dict[str, Any] = {**int4("model.embed_tokens", 256, hidden, group), "model.norm.weight": ("BF16", (hidden,))}
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, rows in (("q_proj", hidden), ("k_proj", hidden // 2), ("v_proj", hidden // 2), ("o_proj", hidden)):
            found |= int4(f"{at}self_attn.{name}", rows, hidden, group)
        for name in ("gate_proj", "up_proj"):
            found |= int4(f"{at}mlp.{name}", inner, hidden, group)
        if down:
            found |= int4(f"{at}mlp.down_proj", hidden, inner, group)
        else:
            found[f"{at}mlp.down_proj.weight"] = ("BF16", (hidden, inner))
        found[f"{at}input_layernorm.weight"] = ("BF16", (hidden,))
    return found


def facts(folder: Path, tensors: dict[str, Any] | None = None, *, template: bool = True, **config: Any) -> ModelFacts:
    merged = {**LLAMA, "quantization_config": QUANT, **config}
    said = {key: value for key, value in merged.items() if value is not ...}
    return read_model(write_model(folder, said, tensors or shapes(), template=template), name="m", digest="d")


def test_a_plain_llama(tmp_path: Path) -> None:
    found = facts(tmp_path)
    linear = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 128 * 64 * 3)
    assert found.parameters == linear + 256 * 64 + 3 * 64
    assert found.linear_bytes == linear * 5 // 8
    assert found.table_bytes == 256 * 64 * 5 // 8
    assert found.kept_bytes == 3 * 64 * 2
    assert found.bits_per_weight == pytest.approx(5.0, abs=0.05)
    assert (found.name, found.digest, found.architecture) == ("m", "d", "LlamaForCausalLM")
    assert (found.layers, found.hidden_size, found.intermediate_size, found.vocab_size) == (2, 64, 128, 256)
    assert (found.heads, found.kv_heads, found.head_dim, found.max_context) == (4, 2, 16, 512)
    assert (found.tied, found.chat, found.kept, found.experts) == (True, True, (), 0)
    assert found.largest_linear == (256, 64)  # gate_up_proj: two times 128 rows
    assert found.quantization == QUANT


@pytest.mark.parametrize(("config", "expected"), [
    ({"num_key_value_heads": ...}, {"kv_heads": 4}),
    ({"num_key_value_heads": ..., "multi_query": True}, {"kv_heads": 1}),
    ({"num_key_value_heads": ..., "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, {"kv_heads": 2}),
    ({"intermediate_size": ..., "model_type": "bloom"}, {"intermediate_size": 256}),
    ({"intermediate_size": ..., "n_inner": None, "model_type": "gpt2"}, {"intermediate_size": 256}),
    ({"intermediate_size": ..., "ffn_hidden_size": 96, "model_type": "falcon"}, {"intermediate_size": 96}),
    ({"head_dim": 32}, {"head_dim": 32}),
    ({"head_dim": None}, {"head_dim": 16}),
    ({"sliding_window": 128, "architectures": ["MistralForCausalLM"]}, {"sliding_window": 128, "sliding_layers": 2}),
    ({"sliding_window": None}, {"sliding_window": None, "sliding_layers": 0}),
    ({"sliding_window": 128, "use_sliding_window": False}, {"sliding_window": None, "sliding_layers": 0}),
    ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, {"sliding_layers": 1}),
    ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 9}, {"sliding_window": None}),
    ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}, {"sliding_layers": 1}),
    ({"sliding_window": 128, "layer_types": ["full_attention"] * 2}, {"sliding_window": None, "sliding_layers": 0}),
    ({"sliding_window": 128, "num_hidden_layers": 26, "sliding_window_pattern": 6}, {"sliding_layers": 22}),
    ({"sliding_window": 128, "model_type": "gemma2", "num_hidden_layers": 13}, {"sliding_layers": 7}),
    ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, {"short_context": 64, "max_context": 512}),
    ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, {"short_context": 64}),
    ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 64}}, {"short_context": None}),
    ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 512}, {"short_context": None}),
    ({"tie_word_embeddings": ...}, {"tied": True}),
    ({"tie_word_embeddings": False}, {"tied": False}),
    ({"torch_dtype": ..., "dtype": "float16"}, {"dtype": "float16"}),
    ({"num_experts": 8}, {"experts": 8}),
    ({"quantization_config": {**QUANT, "group_size_overrides": {"a.b": 64}, "quantize_embedding": False}},
     {"group_size_overrides": {"a.b": 64}, "quantize_embedding": False}),
    ({"hidden_size": ..., "max_position_embeddings": ...,
      "text_config": {"hidden_size": 64, "max_position_embeddings": 99}}, {"hidden_size": 64, "max_context": 99}),
])
def test_habits_of_families(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = facts(tmp_path, **config)
    assert {field: getattr(found, field) for field in expected} == expected


def test_an_untied_head_is_a_table_and_a_stored_tied_one_is_not_counted(tmp_path: Path) -> None:
    with_head = {**shapes(), **int4("lm_head", 256, 64, 32)}
    table = 256 * 64 * 5 // 8
    assert facts(tmp_path / "a", with_head, tie_word_embeddings=False).table_bytes == 2 * table
    assert facts(tmp_path / "b", with_head, tie_word_embeddings=...).tied is False
    tied = facts(tmp_path / "c", with_head)
    assert tied.table_bytes == table
    assert tied.parameters == facts(tmp_path / "d").parameters


def test_a_kept_table(tmp_path: Path) -> None:
    tensors = {name: entry for name, entry in shapes().items() if "embed" not in name}
    tensors["model.embed_tokens.weight"] = ("BF16", (256, 64))
    found = facts(tmp_path, tensors)
    assert found.table_bytes == 256 * 64 * 2
    reason = "table and head are kept by the recipe"
    assert found.kept == (KeptLayer(name="model.embed_tokens", reason=reason, bytes=32768),)


def test_case_033_kept_layers_are_listed_counted_and_explained(tmp_path: Path) -> None:
    found = facts(tmp_path, shapes(inner=4304, down=False), intermediate_size=4304)
    assert found.kept == tuple(
        KeptLayer(name=f"model.layers.{i}.mlp.down_proj", reason="no allowed group size divides 4304 columns",
                  bytes=2 * 64 * 4304) for i in range(2))
    assert found.kept_bytes == 2 * 2 * 64 * 4304 + 3 * 64 * 2
    assert found.largest_linear == (2 * 4304, 64)


def test_case_033_a_reason_that_the_conversion_recorded_wins(tmp_path: Path) -> None:
    entry = {"name": "model.layers.0.mlp.down_proj", "reason": "because", "bytes": 1}
    (tmp_path / "manifest.json").write_text(json.dumps({"report": {"kept": [entry]}}))
    ignore = {**QUANT, "ignore": ["down_proj"]}
    found = facts(tmp_path, shapes(down=False), quantization_config=ignore)
    assert [layer.reason for layer in found.kept] == ["because", "named in the ignore list"]


def test_experts_of_a_layer_are_one_entry(tmp_path: Path) -> None:
    tensors = shapes() | {f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": ("BF16", (128, 64))
                          for i in range(2) for e in range(4)} | {"model.layers.0.mlp.gate.weight": ("BF16", (4, 64))}
    found = facts(tmp_path, tensors, num_local_experts=4)
    assert found.experts == 4
    assert {layer.name: layer.bytes for layer in found.kept} == {
        "model.layers.0.mlp.experts": 4 * 128 * 64 * 2, "model.layers.1.mlp.experts": 4 * 128 * 64 * 2,
        "model.layers.0.mlp.gate": 4 * 64 * 2}


def test_no_template_is_no_chat(tmp_path: Path) -> None:
    assert facts(tmp_path / "a", template=False).chat is False
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    assert read_model(tmp_path / "a", name="m", digest="d").chat is True


@pytest.mark.parametrize(("config", "words"), [
    ({"quantization_config": ...}, "is not a cpu_int4 model"),
    ({"quantization_config": {"quant_method": "gptq"}}, "is not a cpu_int4 model"),
    ({"quantization_config": {**QUANT, "group_size": 48}}, "group size 48 is not one of"),
    ({"max_position_embeddings": ...}, "`max_position_embeddings` is missing"),
    ({"num_hidden_layers": True}, "`num_hidden_layers` is missing or not a whole number"),
    ({"intermediate_size": [1, 2]}, "`intermediate_size` is missing or not a whole number"),
    ({"architectures": []}, "names no `architectures`"),
])
def test_what_cannot_be_known_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        facts(tmp_path, **config)


def test_a_cut_shard_is_refused(tmp_path: Path) -> None:
    facts(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", shapes())
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ModelError, match="cut short"):
        read_model(tmp_path, name="m", digest="d")
