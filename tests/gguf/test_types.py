"""Type by type: what llama.cpp makes of a file against what we read from it, and against what is stored of it.

llama.cpp expands the file to F32 itself: these weights must be ours. Served as it is, it rounds activations to 8 bits, so
its logits differ from those of the expanded file.

One random Llama of 512 columns, its head its own, made by llama.cpp's converter and quantizer; `--pure` files have
every matrix in one type, Q4_K_M and the like are the mixtures that users get by that name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from appliance.importing.gguf_header import read_header  # noqa: E402
from tests.gguf import imported, llama_cpp, models, results  # noqa: E402

pytestmark = [pytest.mark.worker, pytest.mark.heavy]
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 4}
IDS = [1] + [(53 * i + 7) % 460 + 10 for i in range(40)]
ROWS = (3, 12, 21, 30, 40)
PURE = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_K_S", "Q5_0", "Q4_1", "Q4_K_S", "Q4_0", "IQ4_NL", "IQ4_XS",
        "Q3_K_S", "IQ3_S", "Q2_K")
MIXED = ("Q5_K_M", "Q4_K_M", "Q3_K_M")
"""Q5_K_S, Q4_K_S and Q3_K_S are the pure forms of Q5_K, Q4_K and Q3_K."""
EXACT, ROUNDED = 1e-3, 0.2
"""Mean differences of log-probabilities: of the expanded file, and of the file as llama.cpp serves it."""
KEPT = {"Q4_0": "all", "Q4_1": "all", "Q4_K_S": "all", "Q8_0": "tables", "Q5_0": "tables", "Q5_1": "tables",
        "Q5_K_S": "tables", "IQ4_NL": "tables", "IQ4_XS": "tables"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("types")
    models.make(folder / "hf", "llama", shape=SHAPE, gain=0.8)
    llama_cpp.convert(folder / "hf", folder / "f32.gguf")
    return folder / "f32.gguf"


def real_bits(file: Path) -> tuple[float, set[str]]:
    """Bits per weight over all matrices of the file, and their types."""
    matrices = [t for t in read_header(file).tensors.values() if len(t.shape) > 1]
    count = sum(t.shape[0] * t.shape[1] for t in matrices)
    return 8 * sum(t.bytes for t in matrices) / count, {t.kind for t in matrices}


@pytest.mark.parametrize("kind", [*PURE, *MIXED])
def test_logits_of_a_type(tmp_path: Path, source: Path, kind: str) -> None:
    file = tmp_path / f"{kind}.gguf"
    llama_cpp.quantize(source, file, kind, *(("--pure",) if kind in PURE else ()))
    bits, kinds = real_bits(file)
    if kind in PURE:
        assert kinds == {kind.removesuffix("_S") if kind in ("Q5_K_S", "Q4_K_S", "Q3_K_S") else kind}
    config, state = imported.weights(file)
    decoded = imported.logprobs(imported.model(config, state, tmp_path / "config"), IDS)[list(ROWS)]
    llama_cpp.quantize(file, tmp_path / "expanded.gguf", "F32", "--allow-requantize")
    expanded = imported.weights(tmp_path / "expanded.gguf")[1]
    assert state.keys() == expanded.keys()
    for name, value in expanded.items():
        assert float((state[name] - value).abs().max()) <= 1e-6 * float(value.abs().max()), name
    theirs, served = asked(tmp_path / "expanded.gguf"), asked(file)
    assert float(theirs.std()) >= 1.5
    report, stored_model = imported.requantized(file, tmp_path / "out", grid="search")
    stored = imported.logprobs(stored_model, IDS)[list(ROWS)]
    difference = (decoded - theirs).abs()
    tables = [one for one in report["layers"] if one["name"].endswith(("embed_tokens", "lm_head"))]
    linears = [one for one in report["layers"] if one not in tables]
    results.keep("types", kind, {
        "bits": bits, "decoded": float(difference.mean()), "decoded_largest": float(difference.max()),
        "served": float((decoded - served).abs().mean()),
        "stored": float((stored - decoded).abs().mean()), "stored_bits": report["bits_per_weight"],
        "kl": float((decoded.exp() * (decoded - stored)).sum(-1).mean()),
        "linears": route(linears), "table": f"{tables[0]['bits']} bits, {route(tables)}"})
    assert (route(linears), route(tables)) == {
        "all": ("kept", "kept"), "tables": ("requantized", "kept")}.get(KEPT.get(kind, ""), (route(linears), route(tables)))
    assert float(difference.mean()) < EXACT
    assert float((decoded - served).abs().mean()) < ROUNDED


def asked(file: Path) -> Any:
    with llama_cpp.serving(file) as server:
        return torch.tensor([server.logprobs(IDS[: row + 1], models.VOCAB) for row in ROWS]).double()


def route(layers: list[dict[str, Any]]) -> str:
    kept = sum(one["route"] == "codes kept" for one in layers)
    return "kept" if kept == len(layers) else f"{kept} of {len(layers)} kept" if kept else "requantized"


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q4_0", "Q3_K_M", "Q6_K"])
def test_what_smollm2_really_becomes(tmp_path: Path, kind: str) -> None:
    """576 columns are no multiple of 256: llama-quantize takes other types there, and the file is larger than its name."""
    source = os.environ.get("APPLIANCE_SMOLLM2_GGUF")
    if not source:
        pytest.skip("APPLIANCE_SMOLLM2_GGUF does not name the model's file")
    file = tmp_path / f"{kind}.gguf"
    llama_cpp.quantize(Path(source), file, kind, "--allow-requantize")
    bits, _ = real_bits(file)
    matrices = [t for t in read_header(file).tensors.values() if len(t.shape) > 1]
    weights = sum(t.shape[0] * t.shape[1] for t in matrices)
    shares = {found: sum(t.shape[0] * t.shape[1] for t in matrices if t.kind == found) / weights
              for found in {t.kind for t in matrices}}
    report = imported.quantize(file, tmp_path / "out", imported.Recipe(), lambda event: None)
    results.keep("smollm2", kind, {"bits": bits, "shares": shares, "stored_bits": report["bits_per_weight"],
                                   "kept": sum(one["route"] == "codes kept" for one in report["layers"]),
                                   "layers": len(report["layers"])})
    assert sum(shares.values()) == pytest.approx(1)


def test_a_split_file_is_the_whole_one(tmp_path: Path, source: Path) -> None:
    root = llama_cpp.build_llama.fetch(None)
    folder = source.parent / "hf"
    code = llama_cpp.CONVERT.format(gguf=str(root / "gguf-py"), root=str(root), pre="smollm", folder=str(folder),
                                    file=str(tmp_path / "s.gguf"), kind="f16", name="tiny",
                                    script=str(root / "convert_hf_to_gguf.py"))
    code = code.replace('"--outtype"', '"--split-max-tensors", "10", "--outtype"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert len(parts) >= 3
    llama_cpp.convert(folder, tmp_path / "whole.gguf", kind="f16")
    (config, state), (whole_config, whole) = imported.weights(parts[0]), imported.weights(tmp_path / "whole.gguf")
    assert config == whole_config
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in whole)
