"""What a model folder from strangers may not do: leave its folder, bring code, contradict itself, or be endless."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ApplianceError, ModelError
from appliance.importing.folder import open_folder
from appliance.importing.safetensors import MAX_HEADER_BYTES, read_header
from appliance.importing.shapes import shape_refusal
from appliance.importing.source import inspect, read_config
from tests.fuzz.cases import CONFIG, shapes
from tests.quantize.models import LLAMA, write_folder

SHAPES = {name: tuple(shape) for name, shape in shapes().items()}


def test_a_link_out_of_the_folder_is_not_copied(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (tmp_path / "keys.json").write_text('{"secret": 1}')
    (folder / "vocab.json").symlink_to(tmp_path / "keys.json")
    with pytest.raises(ModelError, match=r"vocab.json is a link out of the folder"):
        inspect(folder)
    (folder / "vocab.json").unlink()
    (folder / "real.json").write_text("{}")
    (folder / "vocab.json").symlink_to("real.json")
    inspect(folder)
    weights = tmp_path / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(weights)
    (folder / "model.safetensors").symlink_to(weights)
    inspect(folder)  # weights are read, never copied as they are


def test_hugging_faces_own_cache_is_a_folder(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    folder = write_folder(cache / "snapshots" / "c0ffee")
    (cache / "blobs").mkdir()
    for file in list(folder.iterdir()):
        file.rename(cache / "blobs" / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    assert len(inspect(folder).files) == 4
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../../../../etc/passwd")
    with pytest.raises(ModelError):
        inspect(folder)


@pytest.mark.parametrize(("name", "size", "says"), [
    ("config.json", (16 << 20) + 1, "config.json has 16777217 bytes"), ("tokenizer.json", (256 << 20) + 1, "tokenizer.json has"),
    ("merges.txt", 1 << 40, "merges.txt has 1099511627776 bytes"), ("model.safetensors.index.json", (64 << 20) + 1, "index.json has"),
])
def test_a_file_without_end_is_not_read(tmp_path: Path, name: str, size: int, says: str) -> None:
    folder = write_folder(tmp_path / "model")
    with open(folder / name, "ab") as file:
        file.truncate(size)
    with pytest.raises(ModelError, match=says):
        inspect(folder)


def with_header(path: Path, text: bytes, data: int = 0) -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(("text", "says"), [
    (f'{{"a":{ENTRY},"a":{ENTRY}}}', "its header names 'a' twice"),
    ('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "names 'dtype' twice"),
    ('{"__metadata__":{"x":"\\ud800"},"a":' + ENTRY + "}", "is not valid JSON"),
    ('{"__metadata__":[],"a":' + ENTRY + "}", "its metadata are no texts"),
    ('{"__metadata__":{"a":1},"a":' + ENTRY + "}", "its metadata are no texts"),
])
def test_a_header_says_each_thing_once(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_header(with_header(tmp_path / "x.safetensors", text.encode(), 1))


def test_doubles_in_a_large_header_cost_no_time(tmp_path: Path) -> None:
    names = ",".join(f'"n{i}":0' for i in range(200_000))
    with pytest.raises(ModelError, match="names 'n7' twice"):
        read_header(with_header(tmp_path / "x.safetensors", f'{{{names},"n7":0}}'.encode()))


def test_a_header_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{")
    with pytest.raises(ModelError, match="at most 25000000 are allowed"):
        read_header(file)


@pytest.mark.parametrize(("mapped", "says"), [
    ({"model.norm.weight": "../model.safetensors"}, "files outside its folder"), ({"model.norm.weight": "x.bin"}, "of another kind"),
    ({"model.norm.weight": 7}, "no weight_map"), ({}, "no weight_map"), ([], "no weight_map"),
])
def test_an_index_names_weight_files_of_its_folder(tmp_path: Path, mapped: Any, says: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    with pytest.raises(ModelError, match=says):
        inspect(folder)


def test_code_of_a_model_is_never_taken_over(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", null]}, "model_max_length": 7}')
    (folder / "evil.py").write_text("raise SystemExit")
    assert "auto_map" not in read_config(folder)
    found = inspect(folder)
    assert not [file for file in found.files if file.suffix == ".py"]
    out = tmp_path / "out"
    out.mkdir()
    open_folder(found).write_extras(out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"model_max_length": 7}
    assert sorted(file.suffix for file in out.iterdir()) == [".json"] * len(list(out.iterdir()))


def config(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}


def test_a_whole_model_contradicts_nothing() -> None:
    assert shape_refusal(CONFIG, SHAPES) is None
    assert shape_refusal(config(head_dim=..., tie_word_embeddings=True), {n: s for n, s in SHAPES.items() if n != "lm_head.weight"}) is None
    assert shape_refusal(config(architectures=["SomethingElse"], hidden_size=7), SHAPES) is None, "others are not judged here"
    biased = {**SHAPES, **{f"model.layers.{i}.self_attn.{m}.bias": (s,) for i in (0, 1) for m, s in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))}}
    assert shape_refusal(config(architectures=["Qwen2ForCausalLM"]), biased) is None


@pytest.mark.parametrize(("changes", "says"), [
    ({"hidden_size": 128}, "embed_tokens.weight has the shape"), ({"vocab_size": 81}, "configuration says [81, 64]"), ({"num_hidden_layers": 3}, "model.layers.2"),
    ({"num_hidden_layers": 1}, "beyond the 1 of"), ({"num_hidden_layers": 1 << 31}, "speaks of 2147483648 layers"), ({"num_hidden_layers": 1 << 80}, "not a whole number"),
    ({"num_hidden_layers": True}, "not a whole number"), ({"intermediate_size": 97}, "gate_proj"), ({"head_dim": 17}, "q_proj"), ({"num_key_value_heads": 4}, "k_proj"),
    ({"num_key_value_heads": 3}, "cannot share"), ({"num_attention_heads": 0}, "not a whole number above 0"), ({"hidden_size": "64"}, "not a whole number"),
    ({"hidden_size": ...}, "hidden_size"), ({"architectures": ["Qwen2ForCausalLM"]}, "q_proj.bias is missing"), ({"architectures": ["Qwen3ForCausalLM"]}, "q_norm.weight is missing"),
    ({"num_hidden_layers": float("nan")}, "not a whole number"), ({"head_dim": None, "num_attention_heads": 65}, "not a whole number above 0"),
])
def test_a_configuration_that_the_tensors_deny(changes: dict[str, Any], says: str) -> None:
    reason = shape_refusal(config(**changes), SHAPES)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize("lost", sorted(name for name in SHAPES if name != "lm_head.weight"))
def test_case_029_every_tensor_is_accounted_for(lost: str) -> None:
    reason = shape_refusal(CONFIG, {name: shape for name, shape in SHAPES.items() if name != lost})
    assert reason is not None
    assert lost.rpartition(".")[0].rpartition(".")[2] in reason


@pytest.mark.parametrize("rows", [50257, 32001, 151646, 152064])
def test_case_041_tables_of_any_number_of_rows(rows: int) -> None:
    tall = {**SHAPES, "model.embed_tokens.weight": (rows, 64), "lm_head.weight": (rows, 64)}
    assert shape_refusal(config(vocab_size=rows), tall) is None
    assert "its configuration says" in str(shape_refusal(config(vocab_size=rows - 1), tall))


def test_an_error_is_a_line_that_can_be_read() -> None:
    line = ApplianceError("x" * 100_000, why="\x1b[2J\n\nwhy", do="do this").line
    assert len(line) < 1500
    assert line.endswith("do this")
    assert line.isprintable()
