"""The store's rules, on a real file system; interruptions are in tests/process/test_store_kill.py."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance import disk, manifest, prepared
from appliance.errors import ModelError, StoreError, TransientError, UsageError
from appliance.store import Store, name_refusal

RECIPE = {"group_size": "auto", "table_bits": 4, "ignore": []}


def put(store: Store, source: str, name: str | None, content: bytes = b"weights") -> str:
    digest = manifest.key(source, RECIPE)
    with store.begin(digest) as draft:
        (draft.folder / "config.json").write_text("{}")
        (draft.folder / "model.safetensors").write_bytes(content)
        (draft.scratch / "temp").write_text("x")
        store.commit(draft, source=source, source_digest=source, recipe=RECIPE, report={"n": 1},
                     created="2026-01-01T00:00:00+00:00", name=name)
    return digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def tree(store: Store) -> set[str]:
    return {str(p.relative_to(store.root)) for p in store.root.rglob("*") if not p.is_dir()} - {"schema"}


def test_put_and_get(store: Store) -> None:
    digest = put(store, "a", "one")
    stored = store.get("one")
    assert stored.digest == digest
    assert stored.path == store.root / "objects" / digest
    assert stored.names == ("one",)
    assert stored.bytes == len(b"weights") + 2
    assert stored.manifest["report"] == {"n": 1}
    assert stored.manifest["files"].keys() == {"config.json", "model.safetensors"}
    assert store.names() == {"one": digest}
    assert tree(store) == {"names/one", *(f"objects/{digest}/{f}" for f in ("config.json", "manifest.json",
                                                                            "model.safetensors"))}
    assert (stored.path / "model.safetensors").stat().st_mode & 0o777 == 0o444


def test_an_absent_store_is_empty_and_stays_absent(store: Store) -> None:
    assert store.names() == {}
    assert store.digests() == []
    assert store.sweep() == []
    with pytest.raises(ModelError, match=r"no model is called 'one'.*holds no model"):
        store.get("one")
    assert not store.root.exists()


def test_the_key_is_made_of_source_and_recipe_alone() -> None:
    keys = {manifest.key("a", RECIPE), manifest.key("b", RECIPE), manifest.key("a", {**RECIPE, "table_bits": 16}),
            manifest.key("a", {**RECIPE, "group_size": 32})}
    assert len(keys) == 4
    assert manifest.key("a", dict(reversed(RECIPE.items()))) == manifest.key("a", RECIPE)


@pytest.mark.parametrize(("name", "good"), [
    ("a", True), ("smollm2", True), ("qwen2.5-0.5b_x", True), ("0", True), ("a" * 64, True),
    ("", False), ("a" * 65, False), ("default", False), ("A", False), (".a", False), ("-a", False), ("a/b", False),
    ("..", False), ("a b", False), ("a\n", False), ("é", False),
])
def test_names(store: Store, name: str, good: bool) -> None:
    assert (name_refusal(name) is None) is good
    if not good:
        with pytest.raises(UsageError):
            put(store, "a", name)


def test_a_second_put_of_the_same_key_keeps_the_first(store: Store) -> None:
    put(store, "a", "one", b"first")
    digest = put(store, "a", "two", b"other")
    assert (store.read(digest).path / "model.safetensors").read_bytes() == b"first"
    assert store.read(digest).names == ("one", "two")
    assert list((store.root / "tmp").iterdir()) == []


def test_a_damaged_object_is_replaced_by_a_second_put(store: Store) -> None:
    digest = put(store, "a", "one")
    file = store.get("one").path / "model.safetensors"
    file.unlink()
    file.write_bytes(b"short")
    assert not store.has(digest)
    with pytest.raises(ModelError, match=r"'one' is damaged: model.safetensors: 5 bytes, recorded 7; .* repair one`"):
        store.get("one")
    put(store, "a", "one")
    assert store.has(digest)
    assert store.verify(digest) == []


def test_an_exception_discards_the_draft(store: Store) -> None:
    def interrupted() -> None:
        with store.begin("d") as draft:
            (draft.folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert tree(store) == set()
    assert store.digests() == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "finding"), [
    (lambda o: flip(o / "model.safetensors"), "model.safetensors: contents changed"),
    (lambda o: (o / "model.safetensors").unlink(), "model.safetensors: No such file or directory"),
    (lambda o: os.truncate(o / "config.json", 0), "config.json: 0 bytes, recorded 2"),
    (lambda o: (o / "manifest.json").unlink(), "manifest.json: No such file or directory"),
    (lambda o: os.truncate(o / "manifest.json", 20), "manifest.json: not readable as JSON"),
    (lambda o: edit(o, source_digest="b"), "manifest.json: its source and recipe do not belong to this digest"),
    (lambda o: edit(o, files={"../../x": {"bytes": 1, "sha256": ""}}), "manifest.json: the entry of ../../x is wrong"),
    (lambda o: edit(o, files={"x": {"bytes": True, "sha256": ""}}), "manifest.json: the entry of x is wrong"),
    (lambda o: edit(o, files={"x": {"bytes": 17 << 20, "sha256": "", "pieces": [""]}}), "manifest.json: the entry of x"),
    (lambda o: edit(o, schema=2), "manifest.json: schema 2 is not 1"),
    (lambda o: swap(o / "manifest.json", b"2026-01-01", b"2026-01-02"), "manifest.json: its checksum is wrong"),
    (lambda o: swap(o / "manifest.json", b'"checksum"', b'"checksun"'), "manifest.json: its checksum is missing"),
    (lambda o: edit(o, files=None), "manifest.json: `files` is missing or wrong"),
], ids=["flipped bit", "gone", "empty", "no manifest", "cut manifest", "foreign", "escape", "bool", "pieces", "schema", "one byte", "no checksum", "no files"])
def test_verify_names_the_damaged_file(store: Store, damage: Callable[[Path], None], finding: str) -> None:
    digest = put(store, "a", "one")
    put(store, "b", "two")
    assert store.verify(digest) == []
    damage(store.get("one").path)
    findings = store.verify(digest)
    assert len(findings) == 1
    assert findings[0].startswith(finding)
    assert store.verify(store.names()["two"]) == []


def edit(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    said = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_text(manifest.text({**said, **changes}))


def swap(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.chmod(0o644)
    path.write_bytes(data.replace(old, new))


def test_remove_keeps_what_another_name_needs(store: Store) -> None:
    digest = put(store, "a", "one")
    store.point("two", digest)
    assert store.remove("one") == 0
    assert store.get("two").digest == digest
    assert store.remove("two") > 0
    assert tree(store) == set()
    with pytest.raises(ModelError):
        store.remove("two")


def test_remove_refuses_the_model_in_use(store: Store) -> None:
    put(store, "a", "one")
    with pytest.raises(UsageError, match="is the one in use"):
        store.remove("one", in_use="one")
    assert store.get("one")
    assert store.remove("one", in_use="one", force=True) > 0


def test_a_name_moves_and_the_old_object_stays_until_a_removal(store: Store) -> None:
    old = put(store, "a", "one")
    new = put(store, "b", "one")
    assert store.names() == {"one": new}
    assert store.digests() == sorted([old, new])
    put(store, "c", "two")
    assert store.remove("two") > 0
    assert store.digests() == [new]


def test_a_name_never_points_to_nothing(store: Store) -> None:
    put(store, "a", "one")
    with pytest.raises(StoreError, match="no object 0000"):
        store.point("two", "0" * 64)
    assert list(store.names()) == ["one"]


def test_case_032_an_incomplete_model_is_not_stored(store: Store, tmp_path: Path) -> None:
    def commit(make: Callable[[Path], object]) -> None:
        with store.begin("d") as draft:
            make(draft.folder)
            store.commit(draft, source="a", source_digest="a", recipe={}, report={}, created="", name="one")

    with pytest.raises(StoreError, match=r"config.json is missing"):
        commit(lambda f: (f / "model.safetensors").write_bytes(b"x"))
    with pytest.raises(StoreError, match=r"config.json is empty"):
        commit(lambda f: (f / "config.json").touch())
    with pytest.raises(StoreError, match=r"config.json is not a plain file"):
        commit(lambda f: (f / "config.json").symlink_to("/etc/hostname"))
    assert tree(store) == set()


def test_sweep_takes_leftovers_and_leaves_what_is_locked(store: Store) -> None:
    put(store, "a", "one")
    tmp = store.root / "tmp"
    (tmp / "dead" / "object").mkdir(parents=True)
    (tmp / "dead" / "object" / "model.safetensors").write_bytes(b"half")
    (tmp / "name-1").write_text("x")
    with store.begin("living"):
        assert store.sweep() == ["dead", "name-1"]
        assert (tmp / "living" / "object").is_dir()
    assert list(tmp.iterdir()) == []


def test_a_second_writer_of_a_key_is_refused_or_waits(store: Store) -> None:
    order: list[str] = []

    def second() -> None:
        with store.begin("k", on_wait=lambda: order.append("waits")) as draft:
            order.append(f"begins with {len(list(draft.folder.iterdir()))} files")

    with store.begin("k") as draft:
        (draft.folder / "config.json").write_text("{}")
        with pytest.raises(TransientError, match="another process is adding this model now"):
            store.begin("k")
        thread = threading.Thread(target=second)
        thread.start()
        while "waits" not in order:
            thread.join(0.01)
        order.append("first ends")
    thread.join(10)
    assert order == ["waits", "first ends", "begins with 0 files"]


def test_case_032_need_against_free(store: Store) -> None:
    with pytest.raises(StoreError, match=r"about 931322.57 GiB and 64 MiB of headroom are needed, [\d.]+ .iB are free"):
        store.begin("d", need_bytes=10**15)
    assert list((store.root / "tmp").iterdir()) == []


def test_a_file_in_the_place_of_the_store_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot write to the store") as caught:
        Store(tmp_path / "store").begin("d")
    assert "\n" not in caught.value.line


def lay_out(store: Store, digest: str, *, source: str | None = None, name: str | None = None) -> Path:
    """A prepared layout of one small run, committed."""
    size = prepared.run_bytes(16, 32, 32, 4)
    run = prepared.Run(name="a", kind="linear", offset=0, bytes=size, n=16, k=32, group=32, bits=4, replaces=())
    index = prepared.Index(source=source or digest, bytes=size, sha256=hashlib.sha256(bytes(size)).hexdigest(), runs=(run,), left_out=())
    with store.begin(name or prepared.folder_name(digest)) as draft:
        (draft.folder / prepared.WEIGHTS).write_bytes(bytes(size))
        (draft.folder / prepared.INDEX).write_text(prepared.write_index(index))
        return store.commit_prepared(draft, digest)


def test_a_prepared_layout_belongs_to_its_object(store: Store) -> None:
    one, two = put(store, "a", "one"), put(store, "b", "two")
    assert store.prepared(one) is None
    assert store.prepared_finding(one) == "it is not there"
    folder = lay_out(store, one)
    lay_out(store, two)
    assert store.prepared(one) == folder
    assert store.prepared_finding(one, contents=True) is None
    store.remove("one")
    assert [p.name for p in (store.root / "prepared").iterdir()] == [prepared.folder_name(two)]
    assert store.prepared(two) is not None


def test_a_new_layout_takes_the_place_of_older_ones(store: Store) -> None:
    one = put(store, "a", "one")
    for old in (prepared.folder_name(one, "int4-b16-0"), prepared.folder_name(one), "0" * 64 + "-int4-b16-1"):
        (store.root / "prepared" / old).mkdir(parents=True)
        (store.root / "prepared" / old / "index.json").write_text("{}")
    folder = lay_out(store, one)
    assert {p.name for p in (store.root / "prepared").iterdir()} == {folder.name, "0" * 64 + "-int4-b16-1"}
    store.prune()
    assert {p.name for p in (store.root / "prepared").iterdir()} == {folder.name}
    assert store.sweep() == []


def test_a_layout_is_stored_for_a_model_that_is_there_and_its_own(store: Store) -> None:
    one = put(store, "a", "one")
    with pytest.raises(StoreError, match="made from another model"):
        lay_out(store, one, source="f" * 64)
    with pytest.raises(StoreError, match="has been removed"):
        lay_out(store, "e" * 64)
    assert not list((store.root / "prepared").iterdir())
    assert not list((store.root / "tmp").iterdir())


@pytest.mark.parametrize(("file", "content", "quick", "full"), [
    ("weights.bin", b"x" * 320, None, "weights.bin: contents changed"),
    ("weights.bin", b"x", "weights.bin has 1 bytes, recorded 320", "weights.bin has 1 bytes"),
    ("index.json", b"\xff", "not readable", "not readable"),
    ("index.json", b"{}", "index.json: it is not readable", "index.json: it is not readable"),
])
def test_a_damaged_layout_is_found(store: Store, file: str, content: bytes, quick: str | None, full: str) -> None:
    one = put(store, "a", "one")
    path = lay_out(store, one) / file
    path.chmod(0o644)
    path.write_bytes(content)
    found = store.prepared_finding(one)
    assert (found is None) is (quick is None)
    assert quick is None or quick in str(found)
    assert full in str(store.prepared_finding(one, contents=True))


def test_a_replacement_takes_the_place_of_what_looks_whole(store: Store) -> None:
    digest = put(store, "a", "one")
    flip(store.get("one").path / "model.safetensors")
    assert store.has(digest), "sizes do not tell"
    put(store, "a", "one")
    assert store.verify(digest), "and so a second put keeps it"
    with store.begin(digest) as draft:
        (draft.folder / "config.json").write_text("{}")
        (draft.folder / "model.safetensors").write_bytes(b"weights")
        store.commit(draft, source="a", source_digest="a", recipe=RECIPE, report={}, created="", replace=True)
    assert store.verify(digest) == []
    assert list((store.root / "tmp").iterdir()) == []


def test_an_adopted_draft_brings_its_own_manifest(store: Store, tmp_path: Path) -> None:
    digest = put(store, "a", "one")
    other = Store(tmp_path / "other")

    def adopt(key: str, leave_out: str = "") -> None:
        with other.begin(key) as draft:
            for file in store.get("one").path.iterdir():
                if file.name != leave_out:
                    (draft.folder / file.name).write_bytes(file.read_bytes())
            other.adopt(draft, name="x")

    for leave_out in ("manifest.json", "config.json"):
        with pytest.raises(ModelError, match=f"is not stored: {leave_out}: No such file"):
            adopt(digest, leave_out)
    with pytest.raises(ModelError, match="it belongs to another model"):
        adopt("0" * 64)
    assert tree(other) == set()
    adopt(digest)
    assert tree(other) - {"names/x"} == tree(store) - {"names/one"}


@pytest.mark.parametrize(("number", "store", "line"), [
    (errno.EROFS, False, "cannot: /s/f: Read-only file system; check owner and mount of /s"),
    (errno.EACCES, False, "cannot: /s/f: Permission denied; check owner and mount of /s"),
    (errno.ENOSPC, False, "cannot: the disk is full; free some space on the disk of /s"),
    (errno.EISDIR, False, "cannot: Is a directory; look at /s/f"),
    (errno.EROFS, True, "cannot: /s/f: Read-only file system; check its owner and mount, or set `store` to another disk"),
    (errno.ENOSPC, True, "cannot: the disk is full; free some space, or set `store` to another disk"),
    (errno.EIO, True, "cannot: Input/output error; look at /s/f"),
])
def test_a_disk_that_refuses_names_the_folder_and_the_setting_only_where_there_is_one(number: int, store: bool, line: str) -> None:
    with pytest.raises(StoreError) as caught, disk.mapped("cannot", Path("/s"), store=store):
        raise OSError(number, os.strerror(number), "/s/f")
    assert caught.value.line == line
