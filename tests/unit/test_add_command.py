"""`model add --dry-run`, and the ways to the Hub that end before a connection; fetching itself is in tests/hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.errors import ConfigError, ModelError, UsageError
from tests.process.fake_models import source_folder
from tests.unit.test_model_command import Operator


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


def test_a_dry_run_says_what_it_would_mean_and_stores_nothing(operator: Operator, tmp_path: Path) -> None:
    folder = source_folder(tmp_path / "tiny")
    said = operator.run("add", str(folder), "--dry-run")
    assert said.exit_code == 0, said.stderr
    for line in ("source ", "to read ", "to store ", "disk ", "architecture   LlamaForCausalLM", "memory         peak ", "verdict        it fits"):
        assert line in said.stdout
    tree = json.loads(operator.run("add", str(folder), "--dry-run", "--json").stdout)
    assert tree["fetch_bytes"] == 0
    assert tree["refusals"] == []
    assert tree["peak_bytes"] < tree["usable_bytes"]
    assert operator.run("list").stdout.startswith("No model in ")
    assert not list((operator.store / "tmp").iterdir())


def test_a_dry_run_ends_with_the_code_of_the_refusal(operator: Operator, tmp_path: Path) -> None:
    folder = source_folder(tmp_path / "tiny")
    operator.env["APPLIANCE_MEMORY_CEILING"] = "64M"
    with pytest.raises(Exception, match="does not fit") as caught:
        operator.run("add", str(folder), "--dry-run")
    assert getattr(caught.value, "exit_code", None) == 76
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        operator.run("add", str(folder), "--dry-run")


@pytest.mark.parametrize("source", ["hf:name", "hf:a/b@../x", "hf:a/b:../x", "hf:"])
def test_a_wrong_name_is_a_wrong_command(operator: Operator, source: str) -> None:
    for more in ((), ("--dry-run",)):
        with pytest.raises(UsageError, match="write hf:org/name"):
            operator.run("add", source, *more)


@pytest.mark.parametrize(("name", "value", "says"), [
    ("APPLIANCE_HUB_OFFLINE", "true", "does not fetch models"), ("HF_HUB_OFFLINE", "1", "does not fetch models"),
    ("HF_ENDPOINT", "ftp://x", "not an http"), ("APPLIANCE_HUB_TOKEN_FILE", "/nowhere", "cannot be read"),
    ("APPLIANCE_HUB_LIMIT_RATE", "fast", "not a size"), ("HF_TOKEN", "two words", "no header can carry it"),
])
def test_a_way_that_is_closed_is_one_line(operator: Operator, name: str, value: str, says: str) -> None:
    operator.env[name] = value
    with pytest.raises(ConfigError, match=says) as caught:
        operator.run("add", "hf:org/name")
    assert "words" not in caught.value.line


def test_options_that_do_not_go_together(operator: Operator, tmp_path: Path) -> None:
    assert operator.run("add", str(tmp_path), "--json").exit_code == 2
    (tmp_path / "template").write_text("\n" * 60_000)  # what enters the child's command line is its JSON
    with pytest.raises(UsageError, match="longer than 98304 bytes as a text in JSON"):
        operator.run("add", str(tmp_path), "--chat-template", str(tmp_path / "template"))
    with pytest.raises(ConfigError, match=r"--limit-rate: hub\.limit_rate has a wrong value"):
        operator.run("add", "hf:a/b", "--limit-rate", "quick")
