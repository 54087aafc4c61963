"""`applianctl model` as an operator sees it: tables, JSON, refusals, progress. The child is the fake quantizer."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from appliance import library
from appliance.cli.application import Application
from appliance.cli.model import model
from appliance.cli.progress import Progress
from appliance.errors import ConfigError, ModelError, UsageError
from appliance.prepared import folder_name
from appliance.store import Store
from tests.process.fake_models import LLAMA, fake_python, int4, source_folder, write_model
from tests.unit.invoke import invoke


class Operator:
    def __init__(self, folder: Path, **worker: str) -> None:
        home, python = str(folder / "home"), fake_python(folder, **worker)
        self.env = {"PATH": "/bin", "APPLIANCE_HOME": home, "APPLIANCE_WORKER_PYTHON": python}
        self.store = folder / "home" / "store"

    def run(self, *args: str) -> Result:
        return invoke(model, args, Application(env=self.env))


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


def test_add_list_show_use_remove(operator: Operator, tmp_path: Path) -> None:
    assert operator.run("list").stdout.startswith("No model in ")
    added = operator.run("add", str(source_folder(tmp_path / "Tiny Model")))
    assert added.stdout.startswith("tiny-model: stored, ")
    assert ", 5.0 bits per weight, group 32, " in added.stdout
    assert added.stderr.splitlines() == [
        "checking the source", "reading the source", "quantizing", "writing the last files", "checking and storing"]
    assert operator.run("add", str(tmp_path / "Tiny Model"), "--name", "b").stdout.startswith("b: in the store already")
    used = operator.run("use", "tiny-model").stdout.splitlines()
    assert used == ["tiny-model: in use", "the service is not running: this counts at its next start"]
    assert operator.run("use", "tiny-model").stdout == "tiny-model: in use already\n"

    head, one, two = operator.run("list").stdout.splitlines()
    assert head.split() == ["NAME", "SIZE", "WEIGHTS", "BITS", "GROUP", "ADDED", "DIGEST", "SOURCE"]
    assert one.startswith("   b  ")
    assert two.startswith("*  tiny-model  ")
    assert len({line.index(" KiB") for line in (one, two)}) == 1
    rows = json.loads(operator.run("list", "--json").stdout)
    assert [(row["name"], row["in_use"]) for row in rows] == [("b", False), ("tiny-model", True)]
    assert {row["group_size"] for row in rows} == {32}

    shown = operator.run("show").stdout
    assert "names" not in shown
    assert f"{'name':<15}b, tiny-model" in shown
    assert f"{'architecture':<15}LlamaForCausalLM\n" in shown
    assert f"{'heads':<15}4, 2 for keys and values, 16 wide" in shown
    said = json.loads(operator.run("show", "default", "--json").stdout)
    assert (said["name"], said["layers"], said["recipe"]["group_size"]) == ("tiny-model", 2, "auto")

    with pytest.raises(UsageError, match="is the one in use"):
        operator.run("remove", "tiny-model")
    assert operator.run("remove", "b").stdout == "b: removed, 0 bytes freed\n"
    assert operator.run("remove", "tiny-model", "--force").exit_code == 0
    assert list((operator.store / "objects").iterdir()) == []
    with pytest.raises(ModelError, match="no model is called 'tiny-model'"):
        operator.run("show")


def test_weights_are_laid_out_once_and_go_with_their_model(tmp_path: Path) -> None:
    operator = Operator(tmp_path, FAKE_KERNELS="native,aten")
    source = str(source_folder(tmp_path / "source"))
    assert "laying the weights out for the kernels" in operator.run("add", source, "--name", "a").stderr
    digest = json.loads(operator.run("list", "--json").stdout)[0]["digest"]
    folder = operator.store / "prepared" / folder_name(digest)
    assert Store(operator.store).prepared(digest) == folder
    assert (folder / "weights.bin").stat().st_mode & 0o777 == 0o444
    again = operator.run("add", source, "--name", "b")
    assert "laying" not in again.stderr
    assert operator.run("verify").exit_code == 0
    (folder / "weights.bin").chmod(0o644)
    with open(folder / "weights.bin", "r+b") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="damaged: a, b"):
        operator.run("verify")
    (folder / "index.json").chmod(0o644)
    (folder / "index.json").write_text("{}")
    assert Store(operator.store).prepared(digest) is None
    assert "laying" in operator.run("add", source, "--name", "c").stderr, "a damaged layout is made again"
    assert operator.run("verify").exit_code == 0
    for name in "abc":
        assert folder.exists()
        operator.run("remove", name, "--force")
    assert not list((operator.store / "prepared").iterdir())
    assert not list((operator.store / "tmp").iterdir())


@pytest.mark.parametrize(("mode", "why"), [("full", "the disk is full"), ("short", "weights.bin has 2559 bytes, recorded 2560")])
def test_a_layout_that_cannot_be_made_is_a_warning(tmp_path: Path, mode: str, why: str) -> None:
    operator = Operator(tmp_path, FAKE_KERNELS="native", FAKE_PREPARE=mode)
    added = operator.run("add", str(source_folder(tmp_path / "source")), "--name", "a")
    assert added.exit_code == 0
    assert "warning: the weights are not laid out yet" in added.stderr
    assert why in added.stderr
    assert not list((operator.store / "tmp").iterdir())


@pytest.mark.parametrize(("kernels", "setting"), [("aten", "auto"), ("native,aten", "aten")])
def test_nothing_is_laid_out_for_kernels_that_do_not_serve(tmp_path: Path, kernels: str, setting: str) -> None:
    operator = Operator(tmp_path, FAKE_KERNELS=kernels)
    operator.env["APPLIANCE_KERNEL"] = setting
    operator.run("add", str(source_folder(tmp_path / "source")), "--name", "a")
    assert not (operator.store / "prepared").exists()


def test_another_recipe_is_another_object(operator: Operator, tmp_path: Path) -> None:
    source = str(source_folder(tmp_path / "source"))
    recipes = {"a": [], "b": ["--group-size", "64"], "c": ["--table-bits", "16"], "d": ["--ignore", "x"],
               "f": ["--table-bits", "8"], "e": ["--ignore", "x", "--ignore", "x"]}
    for name, flags in recipes.items():
        operator.run("add", source, "--name", name, *flags)
    digests = {row["name"]: row["digest"] for row in json.loads(operator.run("list", "--json").stdout)}
    assert len(set(digests.values())) == 5
    assert digests["d"] == digests["e"]


def test_verify_names_the_damaged_file_and_goes_on(operator: Operator, tmp_path: Path) -> None:
    for name, fill in (("one", 1), ("two", 2)):
        operator.run("add", str(source_folder(tmp_path / name, fill=fill)))
    file = operator.store / "objects" / (operator.store / "names" / "one").read_text().strip() / "model.safetensors"
    file.chmod(0o644)
    with open(file, "r+b") as weights:
        weights.seek(1000)
        weights.write(b"\xff\x00\xff")
    with pytest.raises(ModelError, match="damaged: one; run `applianctl model repair one`"):
        operator.run("verify")
    result = CliRunner().invoke(model, ["verify"], obj=Application(env=operator.env))
    one, two = result.stdout.splitlines()
    assert one.startswith("one: model.safetensors: contents changed (SHA-256 ")
    assert two.startswith("two: whole (")
    file.unlink()
    listed = operator.run("list")
    assert listed.stdout.splitlines()[1].split()[:4] == ["one", "?", "?", "?"]
    assert listed.stderr == "one: damaged: model.safetensors: No such file or directory\n"
    with pytest.raises(ModelError, match=r"'one' is damaged: model.safetensors: No such file"):
        operator.run("show", "one")


def test_use_does_not_pretend_when_a_variable_wins(operator: Operator, tmp_path: Path) -> None:
    operator.run("add", str(source_folder(tmp_path / "one")))
    operator.env["APPLIANCE_MODEL"] = "other"
    with pytest.raises(ConfigError, match="the variable APPLIANCE_MODEL sets it"):
        operator.run("use", "one")
    assert not (operator.store.parent / "state" / "model").exists()


@pytest.mark.parametrize("args", [
    ("add", "x", "--group-size", "48"), ("add", "x", "--table-bits", "5"), ("add",), ("remove",),
])
def test_wrong_flags_are_usage_errors(operator: Operator, args: tuple[str, ...]) -> None:
    assert operator.run(*args).exit_code == 2


def test_plain_progress_is_rare_and_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(terminal=False) as progress:
        progress({"event": "phase", "phase": "quantizing", "note": "3 tensors"})
        for done in range(1000):
            progress({"event": "progress", "done_bytes": done, "total_bytes": 1000, "item": "x"})
        progress._said = (progress._said[0], progress._said[1] - 60)  # a minute later
        progress({"event": "progress", "done_bytes": 500_000, "total_bytes": 1_000_000, "item": "x"})
        progress({"event": "progress", "done_bytes": 0, "total_bytes": 0, "item": "x"})
        progress({"event": "phase", "phase": "unheard-of"})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["quantizing (3 tensors)", "quantizing: 50% of 977 KiB", "unheard-of"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress() as progress:
            progress({"event": "phase", "phase": "quantizing"})
            for done in (10, 60, 100):
                progress({"event": "progress", "done_bytes": done, "total_bytes": 100, "item": "x"})
                progress._bar.render_progress()
        terminal.flush()
        seen = ""
        while "100%" not in seen and select.select([leader], [], [], 5)[0]:  # a read may bring a part only
            seen += os.read(leader, 65536).decode()
    os.close(leader)
    assert "10%" in seen
    assert "100%" in seen
    assert "#" in seen


def test_a_name_is_given_to_a_stored_model_by_digest(operator: Operator, tmp_path: Path) -> None:
    for name, fill in (("one", 1), ("two", 2)):
        operator.run("add", str(source_folder(tmp_path / name, fill=fill)))
    digests = Store(operator.store).names()
    assert operator.run("name", "one", digests["two"]).stdout == f"one: {digests['two'][:12]}\n"
    assert operator.run("name", "three", digests["one"]).exit_code == 0
    assert Store(operator.store).names() == {"one": digests["two"], "two": digests["two"], "three": digests["one"]}
    for digest in ("", digests["one"][:12], "0" * 64):  # a part could become another model's with the next one
        with pytest.raises(ModelError, match="no stored model has the digest"):
            operator.run("name", "one", digest)


def test_the_group_has_a_help_line_for_each_command() -> None:
    context = click.Context(model)
    assert model.list_commands(context) == ["add", "list", "name", "remove", "repair", "show", "use", "verify"]
    assert all(command.get_short_help_str() for command in model.commands.values())


def test_a_name_made_from_the_source_never_takes_another_models_name(operator: Operator, tmp_path: Path) -> None:
    first = source_folder(tmp_path / "a" / "same", fill=1)
    second = source_folder(tmp_path / "b" / "same", fill=2)
    operator.run("add", str(first))
    with pytest.raises(UsageError, match="the name same belongs to another model; give --name"):
        operator.run("add", str(second))
    operator.run("add", str(first), "--group-size", "64")
    operator.run("add", str(second), "--name", "same")


@pytest.mark.parametrize("source", ["x" * 5000, "y" * 300])
def test_a_source_that_no_file_system_takes_is_one_refusal(operator: Operator, source: str) -> None:
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        operator.run("add", source)


def test_no_source_is_said_so(operator: Operator) -> None:
    with pytest.raises(ModelError, match="no source was given"):
        operator.run("add", "")


def test_what_no_command_could_show_is_not_stored(tmp_path: Path) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "cpu_int4", "group_size": 32}}
    tensors = int4("model.embed_tokens", 256, 64, 32)
    for name, said in (("good", config), ("odd", {**config, "max_position_embeddings": 0})):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, said, tensors)
    library.check_servable(tmp_path / "good", source="/my/model")
    with pytest.raises(ModelError, match="/my/model cannot be served: `max_position_embeddings` is missing"):
        library.check_servable(tmp_path / "odd", source="/my/model")
