"""The written checkpoint and the command that writes it, on tiny generated models."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from appliance.errors import ModelError  # noqa: E402  (after the skip)
from appliance.quantize.checkpoint import quantize  # noqa: E402
from appliance.quantize.format import parse_config  # noqa: E402
from appliance.quantize.layers import Recipe  # noqa: E402
from tests.quantize.models import LLAMA, dequantized, random_tensors, read_out, write_random  # noqa: E402

pytestmark = pytest.mark.worker


ALL_FOUR = Recipe(table_bits=4)
"""Tiny models have an 8-bit table by default; most tests here want it in 4 bits."""


Events = list[dict[str, Any]]


def run(source: Path, out: Path, recipe: Recipe | None = None, **options: Any) -> tuple[dict[str, Any], Events]:
    events: Events = []
    return quantize(source, out, recipe or ALL_FOUR, events.append, **options), events


def command(*args: str) -> tuple[int, Events, str]:
    argv = [sys.executable, "-m", "appliance.quantize", *args]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_those_of_the_source(tmp_path: Path, dtype: torch.dtype) -> None:
    """case_005: a float16 model is declared bfloat16 in what is served."""
    source = {name: t.to(dtype) for name, t in random_tensors().items()}
    write_random(tmp_path / "m", tensors=source)
    report, events = run(tmp_path / "m", tmp_path / "out")
    config, tensors = read_out(tmp_path / "out")
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert parse_config(config["quantization_config"]).group_size == 32
    assert all(t.dtype in (torch.uint8, torch.bfloat16) for t in tensors.values())
    back = dequantized(tensors)
    assert set(back) == set(source)
    for name, w in source.items():
        if w.ndim == 1:
            assert torch.equal(back[name], w.to(torch.bfloat16).float())
        else:
            error = (back[name] - w.float()).square().sum() / w.float().square().sum()
            assert float(error) < 0.01, name
    assert events[-1] == {"event": "phase", "phase": "writing", "note": ""}
    progress = [e for e in events if e["event"] == "progress"]
    assert progress[-1]["done_bytes"] == progress[-1]["total_bytes"] == sum(t.nbytes for t in source.values())
    assert report["source_kind"] == "safetensors"
    assert report["chat"] is True
    assert report["parameters"] == sum(t.numel() for t in source.values())
    assert report["out_bytes"] == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    assert len(report["layers"]) == 15
    assert all(layer["route"] == "min/max" and layer["snr_db"] > 20 for layer in report["layers"])


def test_blocks_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random(tmp_path / "one")
    write_random(tmp_path / "three", shards=3)
    run(tmp_path / "one", tmp_path / "a")
    monkeypatch.setattr("appliance.quantize.checkpoint.BLOCK_ELEMENTS", 640)  # 10 rows of 64, an uneven last block
    run(tmp_path / "three", tmp_path / "b", shard_bytes=8000)
    _, a = read_out(tmp_path / "a")
    _, b = read_out(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    shards = sorted(f.name for f in (tmp_path / "b").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(b)
    assert set(index["weight_map"].values()) == set(shards)
    assert (tmp_path / "a/model.safetensors").exists()


def test_case_033_kept_layer_is_stored_exactly_and_listed(tmp_path: Path) -> None:
    config = LLAMA | {"intermediate_size": 80}
    source = write_random(tmp_path / "m", config, tensors=random_tensors(config))
    report, _ = run(tmp_path / "m", tmp_path / "out")
    written, tensors = read_out(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(tensors[f"{name}.weight"], source[f"{name}.weight"])
    assert {"name": name, "reason": "no allowed group size divides 80 columns", "bytes": 2 * 64 * 80} in report["kept"]
    assert name in written["quantization_config"]["ignore"]


TIED, OWN, CONTRADICTS, INCOMPLETE = "one table", "table and head", r"lm_head\.weight and model\.embed_tokens\.weight differ", r"lm_head\.weight is missing"


@pytest.mark.parametrize("table_bits", [4, 16])
@pytest.mark.parametrize(("flag", "head", "becomes"), [
    (True, "absent", TIED), (True, "equal", TIED), (True, "different", CONTRADICTS),
    (False, "absent", INCOMPLETE), (False, "equal", OWN), (False, "different", OWN),
    (None, "absent", TIED), (None, "equal", TIED), (None, "different", OWN),
])
def test_case_038_tie_flag_and_tensors(tmp_path: Path, flag: bool | None, head: str, becomes: str, table_bits: int) -> None:
    """Every flag (None: missing) with every head: what is stored, in how many bits, and what the written flag says."""
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"} | ({} if flag is None else {"tie_word_embeddings": flag})
    tensors = random_tensors()
    count = sum(t.numel() for t in tensors.values())
    if head != "absent":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][3, 3] += head == "different"
    write_random(tmp_path / "m", config | {"tie_word_embeddings": True}, tensors=tensors)
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    if becomes in (CONTRADICTS, INCOMPLETE):
        with pytest.raises(ModelError, match=becomes):
            run(tmp_path / "m", tmp_path / "out", Recipe(table_bits=table_bits))
        return
    report, _ = run(tmp_path / "m", tmp_path / "out", Recipe(table_bits=table_bits))
    written, stored = read_out(tmp_path / "out")
    modules = ["model.embed_tokens", *(["lm_head"] if becomes == OWN else [])]
    part = "weight" if table_bits == 16 else "weight_packed"
    assert written["tie_word_embeddings"] is (becomes == TIED)
    assert sorted(name for name in stored if name.endswith(part) and name.startswith(("model.embed", "lm_head"))) == sorted(f"{m}.{part}" for m in modules)
    assert not any(name.startswith("lm_head") for name in stored) or becomes == OWN
    assert {layer["name"]: layer["bits"] for layer in report["layers"] if layer["name"] in modules} == (
        {} if table_bits == 16 else dict.fromkeys(modules, table_bits))
    assert report["parameters"] == count + (tensors["lm_head.weight"].numel() if becomes == OWN else 0)


def test_an_outline_without_a_flag_counts_a_stored_head(tmp_path: Path) -> None:
    """An outline holds no weights to compare, so what it says of the memory is the larger answer."""
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    tensors = random_tensors()
    write_random(tmp_path / "m", tensors=tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    outlined, _ = run(tmp_path / "m", tmp_path / "out", outline=True)
    assert outlined["parameters"] == sum(t.numel() for t in tensors.values()) + tensors["model.embed_tokens.weight"].numel()


def test_table_kept_at_16_bits(tmp_path: Path) -> None:
    source = write_random(tmp_path / "m")
    run(tmp_path / "m", tmp_path / "out", Recipe(table_bits=16))
    config, tensors = read_out(tmp_path / "out")
    assert torch.equal(tensors["model.embed_tokens.weight"], source["model.embed_tokens.weight"])
    assert config["quantization_config"]["quantize_embedding"] is False


@pytest.mark.parametrize("tied", [True, False])
def test_table_of_eight_bits(tmp_path: Path, tied: bool) -> None:
    config = LLAMA | {"tie_word_embeddings": tied}
    source = write_random(tmp_path / "m", config, tensors=random_tensors(config))
    report, _ = run(tmp_path / "m", tmp_path / "out", Recipe(table_bits=8))
    written, tensors = read_out(tmp_path / "out")
    assert (written["quantization_config"]["table_bits"], written["quantization_config"]["quantize_embedding"]) == (8, True)
    back = dequantized(tensors, table_bits=8)
    for module in ("model.embed_tokens", *(() if tied else ("lm_head",))):
        assert tensors[f"{module}.weight_packed"].shape == source[f"{module}.weight"].shape
        exact = source[f"{module}.weight"].float()
        assert float((exact - back[f"{module}.weight"]).norm() / exact.norm()) < 10 ** (-45 / 20)
    assert {layer["name"] for layer in report["layers"] if layer["bits"] == 8} == {
        "model.embed_tokens", *(() if tied else ("lm_head",))}
    # A folder of this kind is taken over as it is.
    again, _ = run(tmp_path / "out", tmp_path / "again")
    assert again["parameters"] == report["parameters"]
    assert read_out(tmp_path / "again")[1].keys() == tensors.keys()


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (3.4e38, "too large")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_nan_and_infinity_are_refused_by_tensor_name(tmp_path: Path, value: float, word: str, name: str) -> None:
    source = {n: t.float() for n, t in random_tensors().items()}
    source[name].view(-1)[-1] = value
    write_random(tmp_path / "m", tensors=source)
    with pytest.raises(ModelError, match=f"tensor {name} cannot be quantized: .*{word}"):
        run(tmp_path / "m", tmp_path / "out")


def test_cpu_int4_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write_random(tmp_path / "m", shards=2)
    run(tmp_path / "m", tmp_path / "first", shard_bytes=8000)
    report, _ = run(tmp_path / "first", tmp_path / "second")
    first, second = ({f.name: f.read_bytes() for f in (tmp_path / d).iterdir()} for d in ("first", "second"))
    assert first == second
    assert report["source_kind"] == "cpu_int4"
    assert report["parameters"] == sum(t.numel() for t in random_tensors().values())


@pytest.mark.parametrize(("group", "why"), [
    (-1, "not one of"), (16, "not one of"), (48, "not one of"), (512, "not one of"), (64, "group size 64 needs BF16"),
    (128, "does not divide"),
])
def test_case_026_group_size_that_contradicts_the_tensors(tmp_path: Path, group: int, why: str) -> None:
    write_random(tmp_path / "m")
    run(tmp_path / "m", tmp_path / "first")
    config = json.loads((tmp_path / "first/config.json").read_text())
    config["quantization_config"]["group_size"] = group
    (tmp_path / "first/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=why):
        run(tmp_path / "first", tmp_path / "second")


def test_command_line(tmp_path: Path) -> None:
    write_random(tmp_path / "m")
    recipe = json.dumps({"grid": "minmax", "group_size": "auto", "table_bits": 4, "ignore": ["o_proj"]})
    code, lines, _ = command(str(tmp_path / "m"), str(tmp_path / "out"), "--recipe", recipe)
    assert code == 0
    assert [line["phase"] for line in lines if line["event"] == "phase"] == ["reading", "quantizing", "writing"]
    assert lines[-1]["event"] == "result"
    assert {k["reason"] for k in lines[-1]["report"]["kept"]} == {"named in the recipe's ignore list"}

    code, lines, _ = command(str(tmp_path / "absent"), str(tmp_path / "out2"))
    assert code == 65
    assert lines[-1]["event"] == "error"
    assert lines[-1]["exit_code"] == 65
    assert "does not exist" in lines[-1]["what"]

    code, lines, _ = command(str(tmp_path / "m"), str(tmp_path / "out3"), "--recipe", "[]")
    assert (code, lines[-1]["exit_code"]) == (2, 2)

    code, lines, _ = command(str(tmp_path / "m"), str(tmp_path / "out"))
    assert code == 65
    assert "is not empty" in lines[-1]["what"]


def test_a_full_disk_is_a_store_error(tmp_path: Path) -> None:
    """case_032, the conversion's part: no space ends with one line and exit code 73."""
    write_random(tmp_path / "m")
    child = f"{sys.executable} -m appliance.quantize {tmp_path / 'm'} {tmp_path / 'out'}"
    limited = ["sh", "-c", f"ulimit -f 32; trap '' XFSZ; exec {child}"]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 73, done.stderr
    assert last["event"] == "error"
    assert last["what"] == "the checkpoint cannot be written"


def test_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    write_random(tmp_path / "m", LLAMA | {"vocab_size": 200_000},
                 tensors=random_tensors(LLAMA | {"vocab_size": 200_000}))
    with subprocess.Popen([sys.executable, "-m", "appliance.quantize", str(tmp_path / "m"), str(tmp_path / "out")],
                          stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if json.loads(line)["event"] == "progress":
                break
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=5) == -signal.SIGTERM
