"""`applianctl eval` as an operator sees it: with its source, without, and with one that has changed. The child is a fake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance import manifest
from appliance.cli.application import Application
from appliance.cli.eval import evaluate
from appliance.cli.model import model
from appliance.errors import ModelError
from appliance.sources import Sources
from appliance.store import Store
from tests.process.fake_models import fake_python, source_folder
from tests.unit.invoke import invoke


class Operator:
    def __init__(self, folder: Path) -> None:
        self.env = {"PATH": "/bin", "APPLIANCE_HOME": str(folder / "home"), "APPLIANCE_WORKER_PYTHON": fake_python(folder)}
        self.source = source_folder(folder / "source")
        added = invoke(model, ["add", str(self.source), "--name", "m"], Application(env=self.env))
        assert added.exit_code == 0, added.output

    def run(self, *args: str) -> Result:
        return invoke(evaluate, ["m", *args], Application(env=self.env))


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


def test_against_its_source(operator: Operator) -> None:
    assert operator.run("--tokens", "512").stdout.splitlines() == [
        "model              m, 5.0 bits per weight",
        "text               the language reference of Python (0123456789ab), 512 tokens scored",
        "perplexity         12.500",
        "  of its source    12.000 (+4.17%)",
        "same first choice  95.00%",
        "divergence         0.0123 nats (KL, mean)",
        "difference         0.0500 nats a token (mean), at most 1.25",
        "evaluated          layer by layer, peak 1.00 GiB",
    ]


def test_json_names_model_grid_and_source(operator: Operator, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    said = json.loads(operator.run("--json", "--text", str(text)).stdout)
    assert (said["model"], said["grid"], said["source"], said["source_missing"]) == ("m", "auto", str(operator.source), None)
    assert (said["perplexity"], said["text"]) == (12.5, str(text))


def test_a_source_that_is_gone_is_said_plainly(operator: Operator) -> None:
    shutil.rmtree(operator.source)
    lines = operator.run().stdout.splitlines()
    assert lines[3].startswith(f"source             not compared: {operator.source} does not exist")
    assert "same first choice" not in lines[4]


def test_a_source_from_the_hub_that_was_kept(operator: Operator) -> None:
    store, origin = Store(Application(env=operator.env).directories.store), "hf:org/name@" + "c" * 40
    file = store.get("m").path / "manifest.json"
    file.chmod(0o644)
    file.write_text(manifest.text({**json.loads(file.read_text()), "source": origin}))
    assert f"not compared: {origin} is not kept here" in operator.run().stdout
    with Sources(store.root).hold("x") as held:
        files = {one.name: {"bytes": one.stat().st_size, "sha256": None, "git_sha1": None} for one in operator.source.iterdir()}
        Sources(store.root).describe(held, source=origin, commit="c" * 40, files=files, kept=True)
        for one in operator.source.iterdir():
            shutil.copyfile(one, held.path / one.name)
    assert "of its source" in operator.run().stdout


def test_a_source_that_has_changed_is_not_compared_with(operator: Operator) -> None:
    config = operator.source / "config.json"
    config.write_text(config.read_text() + " ")
    assert "has changed since the model was made from it" in operator.run().stdout
    with pytest.raises(ModelError, match="is not what the model was made from"):
        operator.run("--source", str(operator.source))


def test_a_source_that_has_moved(operator: Operator, tmp_path: Path) -> None:
    moved = operator.source.rename(tmp_path / "moved")
    assert "of its source" in operator.run("--source", str(moved)).stdout


def test_unknown_model(operator: Operator) -> None:
    with pytest.raises(ModelError, match="no model is called 'x'"):
        CliRunner().invoke(evaluate, ["x"], obj=Application(env=operator.env), catch_exceptions=False)
