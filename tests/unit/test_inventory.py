"""`applianctl store`: what is there, what keeps it, what goes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance import disk, record, status
from appliance.cli.application import Application
from appliance.cli.model import model
from appliance.cli.store import store as command
from appliance.errors import ConfigError, StoreError
from appliance.identity import identity
from appliance.inventory import clean, keepers, look, plan_cleaning
from appliance.sources import Sources
from appliance.store import Store
from appliance.trial import Candidate
from tests.unit.invoke import invoke
from tests.unit.test_store import flip, lay_out, put


@pytest.fixture
def app(tmp_path: Path) -> Application:
    return Application(env={"PATH": "/bin", "APPLIANCE_HOME": str(tmp_path)})


@pytest.fixture
def store(app: Application) -> Store:
    return Store(app.directories.store)


def run(app: Application, *args: str) -> Result:
    return invoke(command, args, app)


def candidate(digest: str) -> Candidate:
    return Candidate(id=digest[:12], model="m", digest=digest, settings={}, worker_python="/x", versions={})


def remember(app: Application, *, good: str, previous: str, trial: str) -> None:
    app.directories.state.mkdir(parents=True, exist_ok=True)
    known = record.load(app.directories.state)
    known.keep(candidate(previous), "", now=1.0)
    known.keep(candidate(good), "", now=2.0)
    known.begin_trial(candidate(trial), "", now=3.0)


def test_what_the_service_may_need_stays(app: Application, store: Store) -> None:
    one, good, previous, trial, served, nobody = (put(store, source, None) for source in "abcdef")
    store.point("one", one)
    remember(app, good=good, previous=previous, trial=trial)
    app.directories.runtime.mkdir(parents=True)
    status.write(app.directories.runtime, {"agent": identity(), "sentence": "ready", "state": "ready", "digest": served})
    assert keepers(store, app.directories) == {
        one: ("one",), good: ("(good)",), previous: ("(the good one before)",), trial: ("(on trial)",), served: ("(served now)",)}
    flip(store.root / "objects" / one / "model.safetensors")
    (store.root / "objects" / good / "config.json").unlink()  # damaged, and still the way back
    assert [what for what, _ in plan_cleaning(look(store, app.directories)).parts] == [f"model {nobody[:12]} (f)"]
    clean(store, app.directories)
    assert store.digests() == sorted([one, good, previous, trial, served])


def test_a_dry_run_says_what_the_run_does(app: Application, store: Store) -> None:
    kept, gone = put(store, "a", "one"), put(store, "b", None)
    for digest in (kept, gone):
        lay_out(store, digest)
    (store.root / "prepared" / f"{kept}-int4-b16-0").mkdir()
    (store.root / "prepared" / f"{kept}-int4-b16-0" / "weights.bin").write_bytes(bytes(100))
    (store.root / "tmp" / "left").mkdir()
    (store.root / "tmp" / "left" / "half").write_bytes(bytes(1000))
    fetched = Sources(store.root)
    with fetched.hold("x--y--1") as held:
        (held.path / "model.part").write_bytes(bytes(500))
    with store.begin("living"), fetched.hold("busy"):
        before = sorted(p for p in store.root.rglob("*"))
        dry = run(app, "gc", "--dry-run").stdout
        assert sorted(p for p in store.root.rglob("*")) == before
        wet = run(app, "gc").stdout
        assert wet == dry.replace("would be freed", "were freed")
        assert (store.root / "tmp" / "living").is_dir()
        assert (store.root / "sources" / "busy").is_dir()
        assert [line.split(":")[0] for line in dry.splitlines()[:-1]] == [
            "draft left", f"model {gone[:12]} (b)", f"layout {kept[:12]} that nobody maps", "fetched source ?"]
    assert store.digests() == [kept]
    assert store.prepared(kept) is not None
    assert len(list((store.root / "prepared").iterdir())) == 1
    assert run(app, "gc").stdout.endswith("\n0 bytes were freed\n"), "what was busy"


def test_show(app: Application, store: Store) -> None:
    assert run(app, "show").stdout == f"{store.root}: 0 bytes in 0 models\n"
    one, two = put(store, "a", "one"), put(store, "b", None)
    store.point("other", one)
    lay_out(store, one)
    (store.root / "objects" / two / "config.json").unlink()
    said = run(app, "show").stdout
    assert f"{one[:12]}" in said
    assert "one, other" in said
    assert "nothing keeps it\n    damaged: config.json: No such file" in said
    tree = json.loads(run(app, "show", "--json").stdout)
    by_digest = {model["digest"]: model for model in tree["models"]}
    assert by_digest[one]["kept_by"] == ["one", "other"]
    assert by_digest[one]["layout_bytes"] > 320
    assert tree["schema"] == 1


def test_a_store_of_a_newer_release_is_refused(app: Application, store: Store) -> None:
    put(store, "a", "one")
    assert (store.root / "schema").read_text() == "1\n"
    (store.root / "schema").write_text("2\n")
    for call in (store.names, store.digests, store.sweep, lambda: store.get("one"), lambda: store.begin("d"), store.prune,
                 lambda: store.point("two", "x"), lambda: run(app, "show"), lambda: run(app, "gc")):
        with pytest.raises(ConfigError, match="was written by a newer release: its schema is 2, this release knows 1"):
            call()
    (store.root / "schema").write_text("x")
    with pytest.raises(StoreError, match="holds no number; remove"):
        store.names()


def test_a_store_of_the_first_releases_is_read_and_gets_its_number(store: Store) -> None:
    put(store, "a", "one")
    (store.root / "schema").unlink()
    assert store.get("one").names == ("one",)
    assert not (store.root / "schema").exists(), "reading writes nothing"
    put(store, "b", "two")
    assert (store.root / "schema").read_text() == "1\n"


@pytest.mark.parametrize("when", [0, 1, 253_402_300_799])  # 1970, and the last second of 9999
def test_times_of_files_decide_nothing(app: Application, store: Store, when: int) -> None:
    kept = put(store, "a", "one")
    put(store, "b", None)
    lay_out(store, kept)
    for path in store.root.rglob("*"):
        os.utime(path, (when, when))
    assert store.get("one").digest == kept
    assert store.prepared(kept) is not None
    clean(store, app.directories)
    assert store.digests() == [kept]
    assert store.verify(kept) == []


def test_removing_a_name_takes_nothing_that_the_service_needs(app: Application, store: Store) -> None:
    one, two, served = put(store, "a", "one"), put(store, "b", "two"), put(store, "c", None)
    app.directories.runtime.mkdir(parents=True)
    status.write(app.directories.runtime, {"agent": identity(), "sentence": "ready", "state": "ready", "digest": served})
    for name, left in (("one", [two, served]), ("two", [served])):
        assert CliRunner().invoke(model, ["remove", name, "--force"], obj=app).exit_code == 0
        assert store.digests() == sorted(left)
    assert one not in store.digests()


def test_kept_sources_go_with_their_model(app: Application, store: Store) -> None:
    put(store, "hf:org/name@x", "one")
    fetched = Sources(store.root)
    for key, source in (("x", "hf:org/name@x"), ("y", "hf:org/name@y")):
        with fetched.hold(key) as held:
            fetched.describe(held, source=source, commit="c" * 40, files={}, kept=True)
            (held.path / "model.gguf").write_bytes(bytes(500))
    for said in (run(app, "gc", "--dry-run").stdout, run(app, "gc").stdout):
        assert said.splitlines()[0] == "fetched source hf:org/name@y: 500 bytes"
    assert [one.key for one in fetched.list()] == ["x"]


def test_looking_beside_a_writer(app: Application, store: Store) -> None:
    """What vanishes while it is counted is no error."""
    fetched, ended = Sources(store.root), threading.Event()
    put(store, "a", "one")

    def write() -> None:
        while not ended.is_set():
            with store.begin("0" * 64) as draft, fetched.hold("x", on_wait=lambda: None) as held:
                for folder in (draft.folder, held.path):
                    (folder / "a.part").write_bytes(b"x")
                    (folder / "a.part").rename(folder / "a")
                fetched.finish(held)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(1000):
            look(store, app.directories)
    finally:
        ended.set()
        writer.join()


def test_a_file_with_holes_counts_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "outline").write_bytes(bytes(4096))
    os.truncate(tmp_path / "folder" / "outline", 1 << 40)
    assert 0 < disk.bytes_below(tmp_path) < 1 << 20
    assert disk.bytes_below(tmp_path / "none") == 0
