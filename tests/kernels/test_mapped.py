"""Prepared weights in the worker: mapped and not copied, refused with a reason, served by real vLLM."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from appliance.kernels import blocked, reference  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels.library import load as load_library  # noqa: E402
from appliance.kernels.prepare import prepare  # noqa: E402
from appliance.kernels.registry import LINEAR, TABLE, LayerShape  # noqa: E402
from appliance.prepared import read_index, write_index  # noqa: E402
from appliance.quantize.layers import Recipe  # noqa: E402
from appliance.vllm_plugin import mapped as mapped_module  # noqa: E402
from appliance.vllm_plugin.mapped import Mapped, open_prepared  # noqa: E402
from tests.kernels.checkpoints import stored_object  # noqa: E402
from tests.kernels.mapped_model import smaps  # noqa: E402
from tests.quantize.models import read_out  # noqa: E402

pytestmark = [pytest.mark.worker, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[2]
SERVED: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention wants heads of at least 32."""


def opened(folder: Path, model: Path) -> tuple[Mapped | None, list[str]]:
    said: list[str] = []
    return open_prepared({"APPLIANCE_PREPARED": str(folder)}, model, said.append), said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = stored_object(tmp_path, vocab_size=100)
    prepare(source, tmp_path / "p", lambda event: None)
    return source


@pytest.mark.parametrize(("prefix", "kind", "n", "k", "group", "bits", "there"), [
    ("model.layers.1.self_attn.qkv_proj", LINEAR, 128, 64, 32, 4, True),
    ("model.layers.1.self_attn.qkv_proj", LINEAR, 64, 64, 32, 4, False),  # one of two tensor-parallel parts
    ("model.layers.1.self_attn.qkv_proj", LINEAR, 128, 64, 64, 4, False),
    ("model.layers.1.self_attn.q_proj", LINEAR, 64, 64, 32, 4, False),
    ("model.layers.1.self_attn.qkv_proj", TABLE, 128, 64, 32, 4, False),
    ("embed_tokens", TABLE, 128, 64, 32, 8, True),  # vLLM pads 100 rows to 128; llama names its table like this
    ("model.embed_tokens", TABLE, 128, 64, 32, 8, True),
    ("embed_tokens", TABLE, 128, 64, 32, 4, False),
    ("lm_head", TABLE, 128, 64, 32, 8, False),  # tied: the head has no weight of its own
])
def test_a_layer_finds_its_weight_by_name_and_shape(tmp_path: Path, model: Path, prefix: str, kind: str, n: int, k: int, group: int,
                                                    bits: int, there: bool) -> None:
    mapped, _ = opened(tmp_path / "p", model)
    assert mapped is not None
    found = mapped.find(prefix, LayerShape(n=n, k=k, group=group, kind=kind, bits=bits))
    assert (found is not None) is there
    assert bool(mapped.replaced) is there
    if found is not None:
        tensors = read_out(model)[1]
        parts = [name.removesuffix("_packed") for name in mapped.replaced if name.endswith("_packed")]
        rows = sum(tensors[f"{part}_packed"].shape[0] for part in parts)
        whole = reference.dequantize(blocked.unpack(found, n, k, group, bits))
        for part in parts:  # in any order: each part's rows are somewhere in the run
            own = reference.Portable(packed=tensors[f"{part}_packed"], scale=tensors[f"{part}_scale"], zero=tensors[f"{part}_zero"], bits=bits)
            want = reference.dequantize(own)
            assert any(torch.equal(whole[i : i + len(want)], want) for i in range(0, rows, 16))


def test_an_untied_head_and_its_table_are_two_runs(tmp_path: Path) -> None:
    source = stored_object(tmp_path, tie_word_embeddings=False)
    prepare(source, tmp_path / "p", lambda event: None)
    mapped, _ = opened(tmp_path / "p", source)
    assert mapped is not None
    shape = LayerShape(n=128, k=64, group=32, kind=TABLE, bits=8)
    head, table = mapped.find("lm_head", shape), mapped.find("embed_tokens", shape)
    assert head is not None
    assert table is not None
    assert head.data_ptr() != table.data_ptr()
    assert head.data_ptr() % 4096 == table.data_ptr() % 4096 == 0


def test_the_weights_are_the_files_pages_and_none_of_ours(tmp_path: Path, model: Path) -> None:
    mapped, said = opened(tmp_path / "p", model)
    assert mapped is not None
    assert said[0].startswith("weights mapped from ")
    weight = mapped.find("model.layers.0.mlp.gate_up_proj", LayerShape(n=192, k=64, group=32))
    assert weight is not None
    assert int(weight.sum()) > 0
    memory = smaps(str(tmp_path / "p" / "weights.bin"))
    assert memory["rights r--s"] == 1
    assert memory["Rss"] == memory["Size"] >= mapped.index.bytes
    assert (memory["Anonymous"], memory["Private_Dirty"], memory["Shared_Dirty"]) == (0, 0, 0)


def test_a_copy_holds_the_same_bytes_in_memory_of_its_own(tmp_path: Path, model: Path) -> None:
    mapped, _ = opened(tmp_path / "p", model)
    said: list[str] = []
    copied = open_prepared({"APPLIANCE_PREPARED": str(tmp_path / "p"), "APPLIANCE_COPIED": "1"}, model, said.append)
    assert mapped is not None
    assert copied is not None
    assert said[0].startswith("weights copied from ")
    shape = LayerShape(n=192, k=64, group=32)
    theirs, own = (one.find("model.layers.0.mlp.gate_up_proj", shape) for one in (mapped, copied))
    assert theirs is not None
    assert own is not None
    assert torch.equal(theirs, own)
    file = tmp_path / "p" / "weights.bin"
    assert bytes(copied._data) == file.read_bytes()
    del theirs, mapped
    gc.collect()
    assert str(file) not in Path("/proc/self/maps").read_text(), "no page of the file is needed any more"
    with open(file, "r+b") as damage:
        damage.write(b"x" * 64)
    assert own.sum() > 0


def test_a_copy_of_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mapped_module._copy
    monkeypatch.setattr(mapped_module, "_copy", lambda file, size, say: real(file, size + 10, say))
    said: list[str] = []
    assert open_prepared({"APPLIANCE_PREPARED": str(tmp_path / "p"), "APPLIANCE_COPIED": "1"}, model, said.append) is None
    assert "shorter" in said[0]


@pytest.mark.parametrize(("damage", "why"), [
    ("absent", "No such file or directory"), ("short", "weights.bin has 100 bytes"), ("index", "it is not readable"),
    ("other model", "it was made from another model"), ("no manifest", "gives no digest"), ("unset", "no prepared weights are given"),
])
def test_what_cannot_be_used_is_said_once_and_is_no_error(tmp_path: Path, model: Path, damage: str, why: str) -> None:
    folder = tmp_path / "p"
    if damage == "short":
        (folder / "weights.bin").write_bytes(bytes(100))
    elif damage == "index":
        (folder / "index.json").write_text("{")
    elif damage == "other model":
        (model / "manifest.json").write_text(json.dumps({"digest": "cd" * 32}))
    elif damage == "no manifest":
        (model / "manifest.json").unlink()
    said: list[str] = []
    env = {} if damage == "unset" else {"APPLIANCE_PREPARED": str(tmp_path / "absent" if damage == "absent" else folder)}
    assert open_prepared(env, model, said.append) is None
    assert len(said) == 1
    assert why in said[0]
    assert said[0].endswith("packing in memory") or "packing in memory" in said[0]


def load(model: Path, *prepared: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(model.parent), "PYTHONPATH": f"{ROOT}", "VLLM_CACHE_ROOT": str(model.parent / "cache")}
    return subprocess.run([sys.executable, str(Path(__file__).with_name("mapped_model.py")), str(model), *map(str, prepared)], env=env,
                          cwd=model.parent, capture_output=True, text=True, timeout=500, check=False)


needs_native = pytest.mark.skipif(load_library().refusal is not None, reason="the native library is not built")


@needs_native
@pytest.mark.parametrize("tied", [True, False])
def test_real_vllm_maps_what_is_prepared_and_reads_the_rest(tmp_path: Path, tied: bool) -> None:
    """The same answers from mapped weights and from packed ones; the checkpoint's own tensors are not even read."""
    source = stored_object(tmp_path, tie_word_embeddings=tied, **SERVED)
    prepare(source, tmp_path / "p", lambda event: None)
    # A layout in which one layer is missing: that one comes from the checkpoint.
    index, _ = read_index((tmp_path / "p" / "index.json").read_text())
    assert index is not None
    kept = tuple(run for run in index.runs if run.name != "model.layers.1.mlp.down_proj")
    fields = {**index.__dict__, "runs": kept}
    (tmp_path / "p" / "index.json").write_text(write_index(type(index)(**fields)))
    packed = json.loads(load(source).stdout.splitlines()[-1])
    replaced = {name for run in kept for name in run.replaces}
    tensors = {name: torch.zeros_like(tensor) if name in replaced else tensor for name, tensor in read_out(source)[1].items()}
    from safetensors.torch import save_file

    save_file(tensors, source / "model.safetensors")
    done = load(source, tmp_path / "p")
    assert done.returncode == 0, done.stderr[-3000:]
    mapped = json.loads(done.stdout.splitlines()[-1])
    assert mapped["logprobs"] == packed["logprobs"]
    assert packed["smaps"] == {}
    assert (mapped["smaps"]["Anonymous"], mapped["smaps"]["Private_Dirty"]) == (0, 0)
    assert mapped["parameters"] == ["int4_blocked", "weight"]
    assert mapped["blocked"] == (9 if tied else 10), "a tied table is one parameter"
    assert "1 layers are not mapped and will be packed in memory: model.layers.1.mlp.down_proj" in done.stdout + done.stderr


@needs_native
def test_a_tensor_that_is_nowhere_is_refused_by_name(tmp_path: Path) -> None:
    source = stored_object(tmp_path, recipe=Recipe(), **SERVED)
    prepare(source, tmp_path / "p", lambda event: None)
    from safetensors.torch import save_file

    tensors = read_out(source)[1]
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, source / "model.safetensors")
    done = load(source, tmp_path / "p")
    assert done.returncode != 0
    assert "model.layers.1.input_layernorm.weight" in done.stdout + done.stderr
