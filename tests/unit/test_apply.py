"""`apply`, `rollback`, `history`, `reset` without a running agent, and the account they write as."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from appliance.cli.application import Application
from appliance.cli.main import cli
from appliance.errors import ConfigError, DoesNotFit, ModelError, UsageError
from appliance.record import load
from appliance.store import Store
from tests.process.conftest import CONFIG
from tests.process.fake_models import fake_python, int4, source_folder, write_model
from tests.unit.invoke import invoke
from tests.unit.test_trial import make

NOW = 1_700_000_000.0
SHAPES = {
    **int4("model.embed_tokens", 256, 64, 32), **int4("model.layers.0.self_attn.q_proj", 64, 64, 32),
    **int4("model.layers.0.mlp.down_proj", 64, 64, 32), "model.norm.weight": ("BF16", (64,)),
}
FILE = "# ours\nmodel: tiny\n# wanted\ncontext: 512\n"


class Operator:
    """A home with the stored models `tiny` and `other`, and a configuration file."""

    def __init__(self, folder: Path) -> None:
        self.file, self.home = folder / "appliance.yaml", folder / "home"
        self.env = {"PATH": os.environ["PATH"], "APPLIANCE_HOME": str(self.home), "APPLIANCE_CONFIG": str(self.file),
                    "APPLIANCE_WORKER_PYTHON": fake_python(folder)}
        self.file.write_text(FILE)
        store = Store(self.home / "store")
        for name, mark in (("tiny", "0"), ("other", "1")):
            with store.begin(mark * 64) as draft:
                write_model(draft.folder, CONFIG, SHAPES)
                store.commit(draft, source=name, source_digest=mark * 64, recipe={}, report={}, created="2026-01-01T00:00:00", name=name)

    def run(self, *args: str) -> Result:
        return invoke(cli, args, Application(env=self.env), env=self.env)

    @property
    def state(self) -> Path:
        return self.home / "state"

    def kept(self) -> list[str]:
        return [path.read_text() for path in sorted((self.state / "history").glob("*.yaml"))]


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    for name in [name for name in os.environ if name.startswith("APPLIANCE_")]:
        monkeypatch.delenv(name)
    return Operator(tmp_path)


def test_single_keys_with_comments_kept(operator: Operator) -> None:
    done = operator.run("apply", "--set", "context=256", "--set", "listen.port=8080")
    assert done.stdout.splitlines()[:2] == ["listen.port: 8000 -> 8080", "context: 512 -> 256"]
    assert done.stdout.splitlines()[-1] == "the service is not running: this counts at its next start"
    assert operator.file.read_text() == "# ours\nmodel: tiny\n# wanted\ncontext: 256\nlisten:\n  port: 8080\n"
    assert operator.kept() == [FILE]
    assert operator.run("apply", "--set", "context=256").stdout.startswith("nothing to change")
    assert len(operator.kept()) == 1


def test_a_key_is_taken_out(operator: Operator) -> None:
    assert "context: 512 -> default" in operator.run("apply", "--set", "context=").stdout
    assert operator.file.read_text() == "# ours\nmodel: tiny\n# wanted\n"


def test_a_dry_run_changes_nothing(operator: Operator) -> None:
    said = operator.run("apply", "--set", "context=256", "--model", "other", "--dry-run").stdout
    assert said.splitlines() == ["model: tiny -> other", "context: 512 -> 256", "checked; nothing was changed (--dry-run)"]
    assert operator.file.read_text() == FILE
    assert not (operator.state / "history").exists()


def test_a_whole_file(operator: Operator, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text("# theirs\nmodel: other\n")
    said = operator.run("apply", str(new)).stdout.splitlines()
    assert said[:2] == ["model: tiny -> other", "context: 512 -> default"]
    assert operator.file.read_text() == "# theirs\nmodel: other\n"
    assert new.exists()
    assert operator.kept() == [FILE]


def test_the_model_is_set_where_it_is_decided(operator: Operator) -> None:
    operator.run("apply", "--model", "other")
    assert operator.file.read_text() == FILE.replace("tiny", "other"), "the file fixes the model: there"
    operator.file.write_text("context: 512\n")
    operator.run("apply", "--model", "tiny")
    assert operator.file.read_text() == "context: 512\n"
    assert (operator.state / "model").read_text() == "tiny\n", "else beside it"


def test_the_default_model_is_used_before_it_is_stored_where_a_start_can_make_it(operator: Operator, tmp_path: Path) -> None:
    operator.file.write_text("context: 512\n")
    operator.run("model", "use", "tiny")
    operator.env["APPLIANCE_SMOLLM2_GGUF"] = str(tmp_path / "smollm2.gguf")
    with pytest.raises(ModelError, match=r"smollm2\.gguf"):
        operator.run("model", "use", "smollm2")
    assert (operator.state / "model").read_text() == "tiny\n"
    (tmp_path / "smollm2.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(60))
    assert operator.run("model", "use", "smollm2").stdout.splitlines()[0] == "smollm2: in use"
    assert (operator.state / "model").read_text() == "smollm2\n"
    assert operator.run("apply", "--model", "smollm2").stdout.startswith("nothing to change")


def test_settings_without_a_model_do_not_choose_a_default_that_cannot_be(operator: Operator, tmp_path: Path) -> None:
    operator.env["APPLIANCE_SMOLLM2_GGUF"] = str(tmp_path / "smollm2.gguf")
    new = tmp_path / "new.yaml"
    new.write_text("context: 512\n")
    for args in (("apply", str(new)), ("apply", "--set", "model="), ("apply", "--set", "model=smollm2")):
        with pytest.raises(ModelError, match=r"smollm2\.gguf"):
            operator.run(*args)
    assert operator.file.read_text() == FILE
    said = operator.run("apply", str(new), "--model", "tiny").stdout.splitlines()
    assert said[0].endswith("other words, the same settings"), "what is in use stays"
    assert (operator.file.read_text(), (operator.state / "model").read_text()) == ("context: 512\n", "tiny\n")


@pytest.mark.parametrize(("args", "error"), [
    (("--set", "cpu.engines=64", "--dry-run"), ConfigError), (("--set", "kernel=native"), ConfigError), (("--set", "memory.ceiling=1M"), DoesNotFit),
    (("--model", "nobody", "--set", "context=256"), ModelError), (("--set", "worker.env={OMP_NUM_THREADS: 3}", "--dry-run"), ConfigError),
], ids=lambda one: " ".join(one) if isinstance(one, tuple) else "")
def test_what_is_refused_is_not_shown_as_a_change_first(operator: Operator, args: tuple[str, ...], error: type[Exception]) -> None:
    done = CliRunner().invoke(cli, ["apply", *args], obj=Application(env=operator.env), env=operator.env)
    assert (type(done.exception), done.stdout) == (error, "")
    assert operator.file.read_text() == FILE


@pytest.mark.parametrize(("args", "error", "words"), [
    (("--set", "context=many"), ConfigError, "context has a wrong value"),
    (("--set", "kontext=1"), UsageError, "no setting `kontext`"),
    (("--set", "context"), UsageError, "not KEY=VALUE"),
    (("--model", "nobody"), ModelError, "no model is called 'nobody'"),
    (("--set", "model=nobody"), ModelError, "no model is called 'nobody'"),
    (("--set", "dtype=float16"), ConfigError, "float16"),
    (("--set", "worker.extra_args=[--port, '1']"), ConfigError, "decided by the plan"),
    (("--set", "worker.python=/no/such/python"), ConfigError, "APPLIANCE_WORKER_PYTHON"),
    (("no-such-file.yaml",), ConfigError, "no-such-file.yaml does not exist"),
    (("--model", ""), UsageError, "--model names no model"),
    (("--model", " ", "--set", "context=4096"), UsageError, "--model names no model"),
    ((), UsageError, "nothing to apply"),
])
def test_what_is_wrong_changes_nothing(operator: Operator, args: tuple[str, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        operator.run("apply", *args)
    assert operator.file.read_text() == FILE
    assert not (operator.state / "history").exists()


def test_a_variable_that_wins_is_named(operator: Operator) -> None:
    operator.env["APPLIANCE_CONTEXT"] = "128"
    with pytest.raises(ConfigError, match="the variable APPLIANCE_CONTEXT sets it"):
        operator.run("apply", "--set", "context=256")


def test_what_does_not_fit_this_node_is_refused(operator: Operator) -> None:
    from appliance.errors import DoesNotFit

    with pytest.raises(DoesNotFit, match="does not fit"):
        operator.run("apply", "--set", "memory.ceiling=64M")
    assert operator.file.read_text() == FILE


def test_without_a_worker_it_is_checked_as_far_as_possible(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance import jobs

    def none(_: object) -> str:
        raise ConfigError("the worker is not installed")

    del operator.env["APPLIANCE_WORKER_PYTHON"]
    monkeypatch.setattr(jobs, "find_worker_python", none)
    done = operator.run("apply", "--set", "context=256")
    assert "not checked against this node: the worker is not installed" in done.stderr
    assert "context: 256" in operator.file.read_text()


def test_a_configuration_that_was_given_up_is_not_applied_again(operator: Operator) -> None:
    from appliance.cli import apply

    app = Application(env=operator.env)
    wanted = apply._wanted_id(app, apply.prepare(app, assignments={"context": 256}), app.worker_python(), {})
    record = load(operator.state)
    record.failed[wanted] = "it hung"
    record.save()
    with pytest.raises(ConfigError, match="given up before: it hung; run `applianctl reset`"):
        operator.run("apply", "--set", "context=256")
    operator.run("reset")
    operator.run("apply", "--set", "context=256")


def test_the_kept_files_are_bounded(operator: Operator) -> None:
    for context in range(100, 125):
        operator.run("apply", "--set", f"context={context}")
    assert len(operator.kept()) == 20
    assert yaml.safe_load(operator.kept()[-1])["context"] == 123


def test_rollback_reset_and_history_without_an_agent(operator: Operator) -> None:
    with pytest.raises(UsageError, match="no earlier configuration"):
        operator.run("rollback")
    assert operator.run("history").stdout == "nothing has happened here yet\n"
    record = load(operator.state)
    record.keep(make("A"), "model-A is kept", now=NOW)
    record.keep(make("B"), "model-B is kept", now=NOW + 60)
    assert "model-A" in operator.run("rollback").stdout
    after = load(operator.state)
    assert after.good == make("A")
    assert after.failed == {make("B").id: "rolled back by the operator"}
    with pytest.raises(UsageError, match="is served already"):
        operator.run("rollback")
    lines = operator.run("history").stdout.splitlines()
    assert [line[27:].split()[0] for line in lines] == ["kept", "kept", "rolled-back"]
    assert len(json.loads(operator.run("history", "--json").stdout)["history"]) == 3
    assert "begins with the whole plan" in operator.run("reset").stdout
    assert load(operator.state).failed == {}


def test_what_may_be_rolled_back_to_is_not_thrown_away(operator: Operator) -> None:
    store, record = Store(operator.home / "store"), load(operator.state)
    record.keep(dataclasses.replace(make("A"), model="other", digest="1" * 64), "kept", now=NOW)
    said = operator.run("model", "remove", "other")
    assert "its files stay" in said.stderr
    assert store.has("1" * 64)
    record.keep(make("B"), "kept", now=NOW)
    record.keep(make("C"), "kept", now=NOW)
    assert store.prune(keep=[one.digest for one in (record.good, record.previous) if one]) > 0
    assert not store.has("1" * 64)


# ---- as root: the service's files stay the service's -------------------------------------------------------------------

OWNER = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")


def give_away(operator: Operator, folder: Path) -> None:
    """The home belongs to the service's account, which may walk to it."""
    for path in (operator.home, *operator.home.rglob("*")):
        os.chown(path, OWNER, OWNER, follow_symlinks=False)
    for parent in (folder, *list(folder.parents)[:-2]):
        parent.chmod(parent.stat().st_mode | 0o011)


def in_a_child(operator: Operator, *args: str) -> str:
    """What the command says, run in a forked child: it gives up root for good, and this interpreter may lie where only
    root can read, so that it could import nothing more in a process of its own."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        with open(read) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return said
    try:
        os.write(write, operator.run(*args).output.encode())
    except BaseException as error:
        os.write(write, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


@root_only
@pytest.mark.parametrize(("args", "words"), [
    (("apply", "--set", "context=256", "--model", "other"), "counts at its next start"), (("model", "use", "other"), "other: in use"),
    (("reset",), "whole plan"), (("rollback",), "rolled back: model-A"), (("model", "remove", "other"), "other: removed"), (("key", "new"), "sk-"),
], ids=lambda args: " ".join(args[:2]) if isinstance(args, tuple) else "")
def test_files_written_by_root_belong_to_the_service(operator: Operator, tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    record = load(operator.state)
    record.keep(make("A"), "a", now=NOW)
    record.keep(make("B"), "b", now=NOW)
    give_away(operator, tmp_path)
    assert words in in_a_child(operator, *args)
    assert [str(path) for path in operator.home.rglob("*") if path.lstat().st_uid != OWNER] == []
    assert operator.file.stat().st_uid == 0, "the configuration file stays root's"
    if args[0] == "apply":
        assert operator.file.read_text() == FILE.replace("tiny", "other").replace("512", "256")
        assert operator.kept() == [FILE]


@root_only
def test_a_command_before_the_first_start_is_the_services_too(operator: Operator, tmp_path: Path) -> None:
    """A fresh installation has the folder above state and store, and nothing in it."""
    shutil.rmtree(operator.state, ignore_errors=True)
    shutil.rmtree(operator.home / "store", ignore_errors=True)
    give_away(operator, tmp_path)
    assert "sk-" in in_a_child(operator, "key", "new")
    assert [str(path) for path in operator.home.rglob("*") if path.lstat().st_uid != OWNER] == []


@root_only
def test_a_source_that_only_root_can_read_is_said_so(operator: Operator, tmp_path: Path) -> None:
    secret = source_folder(tmp_path / "secret")
    secret.chmod(0o700)
    give_away(operator, tmp_path)
    assert "ModelError: " in (said := in_a_child(operator, "model", "add", str(secret)))
    assert f"models are added as the store's owner, user {OWNER}" in said


def test_nothing_is_dropped_where_root_owns_the_state(tmp_path: Path) -> None:
    app = Application(env={"APPLIANCE_HOME": str(tmp_path)})
    before = os.getresuid()
    app.become_owner()
    (tmp_path / "state").mkdir()
    app.become_owner()
    assert os.getresuid() == before
