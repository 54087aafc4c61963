"""`appliance.kernels.prepare`: the folder it writes equals the checkpoint, whole or not at all, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from appliance.errors import ModelError, UsageError  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels import blocked, prepare, reference  # noqa: E402
from appliance.prepared import PAGE, Index, Run, index_refusal, read_index  # noqa: E402
from appliance.quantize.layers import Recipe  # noqa: E402
from tests.kernels.checkpoints import DIGEST, stored_object  # noqa: E402
from tests.quantize.models import read_out  # noqa: E402

pytestmark = pytest.mark.worker


def made(source: Path, target: Path) -> Index:
    prepare.prepare(source, target, lambda event: None)
    index, broken = read_index((target / "index.json").read_text())
    assert index is not None, broken
    return index


def stored(source: Path, run: Run) -> reference.Portable:
    """The checkpoint's own tensors of a run, stacked."""
    tensors = read_out(source)[1]
    columns = [torch.cat([tensors[name] for name in run.replaces[i::3]]) for i in range(3)]
    return reference.Portable(packed=columns[0], scale=columns[1], zero=columns[2], bits=run.bits)


@pytest.mark.parametrize("table_bits", [4, 8, 16])
@pytest.mark.parametrize("tied", [True, False])
def test_every_run_is_the_checkpoints_weight(tmp_path: Path, table_bits: int, tied: bool) -> None:
    source = stored_object(tmp_path, recipe=Recipe(table_bits=table_bits), tie_word_embeddings=tied, vocab_size=100)
    index = made(source, tmp_path / "p")
    layer = "model.layers.{}.{}"
    tables = [] if table_bits == 16 else ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    linears = [layer.format(i, name) for i in (0, 1) for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]
    assert {run.name for run in index.runs} == {*tables, *linears}
    assert (index.source, index.left_out) == (DIGEST, ())
    data = (tmp_path / "p" / "weights.bin").read_bytes()
    assert index_refusal(index, source=DIGEST, weights_bytes=len(data)) is None
    assert hashlib.sha256(data).hexdigest() == index.sha256
    used = 0
    for run in index.runs:
        assert run.offset % PAGE == 0
        portable = stored(source, run)
        back = blocked.unpack(torch.frombuffer(bytearray(data[run.offset : run.offset + run.bytes]), dtype=torch.uint8),
                              run.n, run.k, run.group, run.bits)
        assert torch.equal(reference.dequantize(back)[: portable.n], reference.dequantize(portable)), run.name
        assert not back.packed[portable.n :].any()
        assert run.n == (128 if run.kind == "table" else portable.n)
        used += run.bytes
    assert [run.bits for run in index.runs if run.kind == "table"] == [table_bits] * len(tables)
    assert len(data) < used + PAGE * len(index.runs)


def test_what_the_layout_cannot_take_is_left_out_with_the_reason(tmp_path: Path) -> None:
    source = stored_object(tmp_path, num_key_value_heads=1, head_dim=8)
    index = made(source, tmp_path / "p")
    assert {entry.name: entry.reason for entry in index.left_out} == {
        f"model.layers.{i}.self_attn.qkv_proj": f"model.layers.{i}.self_attn.k_proj has 8 channels, not a multiple of 16" for i in (0, 1)}
    assert not any("qkv" in run.name for run in index.runs)


def test_a_folder_without_a_digest_or_with_a_target_in_use_is_refused(tmp_path: Path) -> None:
    source = stored_object(tmp_path)
    made(source, tmp_path / "p")
    with pytest.raises(UsageError, match="not empty"):
        prepare.prepare(source, tmp_path / "p", lambda event: None)
    (source / "manifest.json").unlink()
    with pytest.raises(ModelError, match="gives no digest"):
        prepare.prepare(source, tmp_path / "q", lambda event: None)
    assert not (tmp_path / "q").exists()


def child(source: Path, target: Path, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def small_files() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run([sys.executable, "-m", "appliance.kernels.prepare", str(source), str(target)], capture_output=True,
                          text=True, timeout=120, check=False, preexec_fn=small_files)


def test_as_a_child_it_reports_in_json_lines(tmp_path: Path) -> None:
    source = stored_object(tmp_path)
    done = child(source, tmp_path / "p")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [event["event"] for event in events if event["event"] != "progress"] == ["phase", "result"]
    assert events[-1]["report"]["layers"] == 9
    assert any(event["event"] == "progress" for event in events)


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    source = stored_object(tmp_path)
    done = child(source, tmp_path / "p", limit=8192)
    assert done.returncode == 73
    assert json.loads(done.stdout.splitlines()[-1])["what"] == "the prepared layout cannot be written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["object", "source"]
