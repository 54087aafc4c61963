"""What a source is, and the one line that each unusable one gets. No torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from appliance.errors import ModelError
from appliance.importing.source import inspect
from tests.quantize.models import LLAMA, shapes, write_folder, write_safetensors


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        inspect(path)
    line = caught.value.line
    assert "\n" not in line
    assert str(path) in line
    return line


def test_kinds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    source = inspect(folder)
    assert (source.kind, [f.name for f in source.weights]) == ("safetensors", ["model.safetensors"])
    assert {f.name for f in source.extras} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert source.bytes == sum(f.stat().st_size for f in folder.iterdir())

    write_folder(tmp_path / "ours", LLAMA | {"quantization_config": {"quant_method": "cpu_int4"}})
    assert inspect(tmp_path / "ours").kind == "cpu_int4"

    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert inspect(gguf).kind == "gguf"


@pytest.mark.parametrize(("config", "word"), [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
    ({"quantization_config": {"quant_method": "awq"}}, "AWQ"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
    ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"text_config": {"quantization_config": {"quant_method": "newthing"}}}, "newthing"),
])
def test_quantized_folders_are_refused_by_name(tmp_path: Path, config: dict[str, object], word: str) -> None:
    assert word in refusal(write_folder(tmp_path / "m", LLAMA | config))


def test_quantized_tensors_without_a_config_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    write_safetensors(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.qweight": [4, 4]})
    assert "GPTQ or AWQ" in refusal(folder)


def test_missing_pieces(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "empty folder" in refusal(tmp_path / "empty")
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pickled weights" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no .safetensors file" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)
    (folder / "x.gguf").write_bytes(b"GGUF")
    assert "GGUF files but no config.json" in refusal(folder)


def test_case_015_tokenizer_missing_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refusal(folder)


@pytest.mark.parametrize(("name", "content", "why"), [
    ("tokenizer_config.json", b"{nope", "is not valid JSON"), ("tokenizer_config.json", b"[1]", "is not a JSON object"),
    ("special_tokens_map.json", b"", "is not valid JSON"), ("generation_config.json", b"[" * 100_000, "is not valid JSON"),
    ("chat_template.jinja", b"\xff\xfe{{ messages }}", "is not UTF-8 text"),
    ("chat_template.jinja", b"x" * (2 << 20), "has 2097152 bytes; at most 1048576 are allowed"),
])
def test_a_small_file_that_no_worker_could_read(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).write_bytes(content)
    assert f"{name} {why}" in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "version https://git-lfs.github.com/spec/v1\n"])
def test_broken_config(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(text)
    assert "is not a model configuration" in refusal(folder)


def test_case_029_missing_shards_are_all_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    write_safetensors(folder / names[0], shapes())
    line = refusal(folder)  # no index: the names tell
    assert names[1] in line
    assert names[2] in line
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[2]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    line = refusal(folder)
    assert names[1] in line
    assert names[2] in line
    assert f"missing: {names[0]}" not in line


def test_case_029_index_names_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    index = {"weight_map": {**dict.fromkeys(shapes(), "model.safetensors"), "lm_head.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lm_head.weight" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "outside its folder" in refusal(folder)


BROKEN = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 1", "Git LFS pointer"),
    "empty": (b"", "empty (0 bytes)"),
    "short": (b"abc", "ends after 3 bytes"),
    "huge header": (struct.pack("<Q", 2**40) + b"{}", "claims a header of 1099511627776 bytes"),
    "cut header": (struct.pack("<Q", 5000) + b"{", "cut short inside its header"),
    "html": (b"<!DOCTYPE html><html>not found</html>", "web page"),
    "gguf": (b"GGUF" + bytes(60), "GGUF file with the wrong name"),
    "zip": (b"PK\x03\x04" + bytes(60), "pickled"),
    "pickle": (b"\x80\x02" + bytes(60), "pickled"),
    "no json": (struct.pack("<Q", 4) + b"abcd", "not valid JSON"),
    "no dict": (struct.pack("<Q", 2) + b"[]", "not valid JSON"),
    "deep json": (struct.pack("<Q", 100_000) + b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_case_030_each_broken_file_gets_its_own_line(tmp_path: Path, name: str) -> None:
    content, word = BROKEN[name]
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    assert word in refusal(folder)


def test_case_030_one_byte_short_or_long(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert "cut short: 1 of" in refusal(folder)
    (folder / "model.safetensors").write_bytes(whole + b"x")
    assert "1 bytes follow the last tensor" in refusal(folder)


def test_a_header_length_that_looks_like_another_file_type_is_fine(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    padding = (0x80 - length) % 256  # 0x80 begins a pickle, too
    padded = struct.pack("<Q", length + padding) + whole[8 : 8 + length] + b" " * padding + whole[8 + length :]
    assert padded[:1] == b"\x80"
    (folder / "model.safetensors").write_bytes(padded)
    assert inspect(folder).kind == "safetensors"


@pytest.mark.parametrize(("entry", "word"), [
    ({"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 6]}, "needs 8"),
    ({"dtype": "BF16", "shape": [2, -2], "data_offsets": [0, 8]}, "damaged"),
    ({"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}, "does not begin where"),
    ({"dtype": "Q9", "shape": [2, 2], "data_offsets": [0, 8]}, "unknown type"),
    ({"dtype": "BF16", "shape": "22", "data_offsets": [0, 8]}, "damaged"),
    (7, "damaged"),
])
def test_damaged_header_entries(tmp_path: Path, entry: object, word: str) -> None:
    folder = write_folder(tmp_path / "m")
    text = json.dumps({"a.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    assert word in refusal(folder)


@pytest.mark.parametrize(("content", "word"), [
    (bytes(range(7, 200)), "not with the letters GGUF"), (b"", "empty (0 bytes)"), (b"GGUF", "cut short"),
    (b"<html>", "web page"), (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
])
def test_case_030_broken_gguf(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert word in refusal(path)


def test_split_gguf_is_given_by_its_first_part(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
    parts = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts[:2]:
        part.write_bytes(header)
    assert f"give the first part, {parts[0].stem}" in refusal(parts[1])
    assert parts[2].name in refusal(parts[0])
    parts[2].write_bytes(header)
    assert inspect(parts[0]).weights == tuple(parts)


def test_a_single_safetensors_file_points_to_its_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert f"give the folder {folder}" in refusal(folder / "model.safetensors")
