"""Calibrated codes: better answers than min/max on a model whose inputs are alike, and what falls back to the search."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from appliance.errors import ModelError  # noqa: E402  (after the skips)
from appliance.evaluate import streaming  # noqa: E402
from appliance.evaluate.comparison import Score, score  # noqa: E402
from appliance.evaluate.text import read_text, windows  # noqa: E402
from appliance.evaluate.weights import of_source, of_stored  # noqa: E402
from appliance.quantize import calibrate  # noqa: E402
from appliance.quantize.checkpoint import quantize  # noqa: E402
from appliance.quantize.layers import Recipe  # noqa: E402
from tests.models.maker import make  # noqa: E402
from tests.models.zoo import ROWS, Row  # noqa: E402

pytestmark = pytest.mark.worker


def judged(source: Path, out: Path, **recipe: Any) -> tuple[dict[str, Any], Score]:
    report = quantize(source, out, Recipe(**recipe), lambda event: None)
    ids = windows(read_text(None), out, 512)
    return report, score(out, of_stored(out), of_source(source), ids, lambda event: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate") / "llama"
    make(folder, Row(name="Llama", model_type="llama"))
    return folder


def test_it_is_much_nearer_to_the_source_than_minmax(llama: Path, tmp_path: Path) -> None:
    divergence = {}
    for grid in ("minmax", "search", "calibrated"):
        report, found = judged(llama, tmp_path / grid, grid=grid, group_size=64)
        assert report["grid"] == grid
        divergence[grid] = found.divergence
    assert divergence["calibrated"] < 0.5 * divergence["minmax"], divergence
    assert divergence["search"] < divergence["minmax"], divergence


def test_the_open_grid_is_calibrated_in_a_small_model(llama: Path, tmp_path: Path) -> None:
    report = quantize(llama, tmp_path / "out", Recipe(grid="auto"), lambda event: None)
    routes = {layer["name"].rpartition(".")[2]: layer["route"] for layer in report["layers"]}
    assert report["grid"] == "calibrated"
    assert "grid_note" not in report
    assert routes.pop("embed_tokens") == "min/max"
    assert set(routes.values()) >= {"calibrated"}
    assert all(layer["snr_db"] > 10 for layer in report["layers"])


def test_it_is_the_same_twice(llama: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize(llama, tmp_path / name, Recipe(grid="calibrated"), lambda event: None)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_a_wide_layer_is_taken_in_parts(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = judged(llama, tmp_path / "plain", grid="minmax", group_size=32)[1]
    monkeypatch.setattr(calibrate, "WIDEST", 128)  # the widest layer has 224 columns
    report, found = judged(llama, tmp_path / "parts", grid="calibrated", group_size=32)
    assert {layer["route"] for layer in report["layers"]} == {"calibrated", "min/max"}
    assert found.divergence < plain.divergence


def test_a_model_of_fused_experts_is_searched_and_says_so(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "OLMoE")
    make(tmp_path / "source", row)
    report, found = judged(tmp_path / "source", tmp_path / "out", grid="calibrated")
    assert "other names" in report["grid_note"]
    assert "calibrated" not in {layer["route"] for layer in report["layers"]}
    assert not found.streamed


def test_a_tokenizer_that_does_not_fit_is_no_reason_to_fail(llama: Path, tmp_path: Path) -> None:
    """More tokens than rows: the model is searched."""
    small = tmp_path / "small"
    make(small, Row(name="Small table", model_type="llama", fields={"vocab_size": 100}))
    report = quantize(small, tmp_path / "out", Recipe(grid="auto"), lambda event: None)
    assert "more tokens than its table" in report["grid_note"]
    assert {layer["route"] for layer in report["layers"]} == {"searched", "min/max"}


def test_a_tokenizer_that_makes_one_token_of_the_text_is_no_reason_to_fail(llama: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    folder = tmp_path / "source"
    shutil.copytree(llama, folder)
    Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?", fuse_unk=True)).save(str(folder / "tokenizer.json"))
    report = quantize(folder, tmp_path / "out", Recipe(grid="auto"), lambda event: None)
    assert "one window needs" in report["grid_note"]


def test_code_of_the_class_that_fails_is_no_reason_to_fail(llama: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the pass: what was calibrated stays, the rest is searched."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(LlamaMLP, "forward", fail)
    report = quantize(llama, tmp_path / "out", Recipe(grid="auto"), lambda event: None)
    assert report["grid_note"] == "not calibrated: RuntimeError: no such kernel"
    routes = {layer["name"].rpartition(".")[2]: layer["route"] for layer in report["layers"] if ".0." in layer["name"]}
    assert (routes["q_proj"], routes["down_proj"]) == ("calibrated", "searched")


def test_windows_are_run_in_groups(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(llama, tmp_path / "out", Recipe(), lambda event: None)
    ids = windows(read_text(None), tmp_path / "out", 1280)
    stored = of_stored(tmp_path / "out")
    whole = score(tmp_path / "out", stored, None, ids, lambda event: None)
    monkeypatch.setattr(streaming, "WINDOWS_AT_ONCE", 2)
    assert len(ids) == 5
    assert score(tmp_path / "out", stored, None, ids, lambda event: None).perplexity == pytest.approx(whole.perplexity)


def test_an_unknown_grid_is_refused(llama: Path, tmp_path: Path) -> None:
    from appliance.errors import UsageError
    from appliance.quantize.layers import parse_recipe

    with pytest.raises(UsageError, match="grid 'best' is not auto, minmax, search, calibrated"):
        parse_recipe({"grid": "best"})
    assert parse_recipe({}).grid == "minmax"  # recipes of earlier releases had no such field


def test_moments_that_cannot_be_used() -> None:
    assert calibrate._factor(torch.zeros(8, 32)) is None
    assert calibrate._factor(torch.full((8, 32), float("nan"))) is None
    dead = torch.randn(64, 32)
    dead[:, 3] = 0
    assert calibrate._factor(dead) is not None


@pytest.mark.parametrize("name", ["Gemma 2 (soft caps, windows)", "GPT-NeoX", "OPT", "OLMoE"])
def test_streamed_scores_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from tests.models import reference

    row = next(row for row in ROWS if row.name == name)
    make(tmp_path / "source", row)
    quantize(tmp_path / "source", tmp_path / "out", Recipe(), lambda event: None)
    ids = windows(read_text(None), tmp_path / "out", 256)
    found = score(tmp_path / "out", of_stored(tmp_path / "out"), None, ids, lambda event: None)
    model = reference.load(tmp_path / "out")
    expected = -sum(sum(values[256:]) for values in reference.logprobs(model, ids.tolist())) / found.tokens
    assert found.tokens == 255 * len(ids)
    assert float(torch.tensor(found.perplexity).log()) == pytest.approx(expected, abs=1e-4)
    assert found.source_perplexity is None
    assert found.same_first_choice is None


def test_a_model_against_itself(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", Recipe(), lambda event: None)
    ids = windows(read_text(None), tmp_path / "out", 256)
    stored = of_stored(tmp_path / "out")
    found = score(tmp_path / "out", stored, stored, ids, lambda event: None)
    assert (found.same_first_choice, found.largest_difference) == (1.0, 0.0)
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.streamed


def test_a_changed_scale_shows(llama: Path, tmp_path: Path) -> None:
    """Negative control: one layer whose scales are a tenth too large."""
    quantize(llama, tmp_path / "out", Recipe(), lambda event: None)
    ids = windows(read_text(None), tmp_path / "out", 256)
    stored = dict(of_stored(tmp_path / "out"))
    name = "model.layers.1.mlp.down_proj.weight"
    weight = stored[name]
    changed = {**stored, name: type(weight)(shape=weight.shape, rows=weight.rows, read=lambda a, b: weight.read(a, b) * 1.1)}
    found = score(tmp_path / "out", changed, stored, ids, lambda event: None)
    assert found.divergence > 1e-4


@pytest.mark.parametrize(("content", "why"), [(b"", "too short"), (b"\xff\xfe", "cannot be read"), (b"few words", "too short")])
def test_a_text_that_cannot_be_used(llama: Path, tmp_path: Path, content: bytes, why: str) -> None:
    from appliance.errors import UsageError

    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        windows(read_text(file), llama, 256)


def test_an_architecture_that_transformers_does_not_know(llama: Path, tmp_path: Path) -> None:
    from appliance.evaluate.streaming import Model

    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nobody", "architectures": ["Nobody"]}))
    with pytest.raises(ModelError, match="transformers cannot build it"):
        Model(tmp_path, {})
