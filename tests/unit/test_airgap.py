"""Model bundles: the same bytes for the same model, everything checked on the way in, nothing believed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from appliance import manifest, prepared
from appliance.airgap import content, signature, tape
from appliance.airgap.content import Content, Member
from appliance.airgap.export import export
from appliance.airgap.intake import Imported, read_front, take
from appliance.cli.airgap import bundle
from appliance.cli.application import Application
from appliance.errors import ApplianceError, ConfigError, ModelError, StoreError, UsageError
from appliance.store import Store
from tests.process.fake_models import LLAMA, llama_int4, write_model
from tests.unit.invoke import invoke
from tests.unit.test_store import flip, lay_out

CONFIG = {**LLAMA, "quantization_config": {"quant_method": "cpu_int4", "group_size": 32}}
RECIPE = {"group_size": "auto"}


def stored(store: Store, *, name: str = "tiny", fill: int = 7, source: str = "a" * 64) -> str:
    digest = manifest.key(source, RECIPE)
    with store.begin(digest) as draft:
        write_model(draft.folder, CONFIG, llama_int4(CONFIG, 32), fill=fill)
        store.commit(draft, source="/src", source_digest=source, recipe=RECIPE, report={"loss": "none"},
                     created="1970-01-01T00:00:00+00:00", name=name)
    lay_out(store, digest)
    return digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "other")


def write(store: Store, file: Path, *, layout: bool = True, key: Path | None = None, name: str = "tiny") -> Content:
    return export(store, name, file, with_layout=layout, sign_key=key, env=dict(os.environ), on_event=lambda event: None)


def read(store: Store, file: Path, *, name: str | None = None, keys: tuple[str, ...] | None = None) -> Imported:
    with open(file, "rb") as reading:
        return take(reading, store=store, name=name, keys=keys, on_event=lambda event: None, on_wait=lambda: None)


def everything(store: Store) -> dict[str, bytes]:
    return {str(p.relative_to(store.root)): p.read_bytes() for p in store.root.rglob("*") if p.is_file() and p.name != "schema"}


def test_there_and_back(store: Store, other: Store, tmp_path: Path) -> None:
    digest = stored(store)
    listed = write(store, tmp_path / "b")
    done = read(other, tmp_path / "b")
    assert (done.name, done.digest, done.cached, done.layout) == ("tiny", digest, False, True)
    assert everything(other) == everything(store)
    assert other.verify(digest) == []
    assert other.prepared_finding(digest, contents=True) is None
    assert (other.get("tiny").path / "model.safetensors").stat().st_mode & 0o777 == 0o444
    assert listed.layout == prepared.LAYOUT_ID
    again = read(other, tmp_path / "b", name="second")
    assert again.cached
    assert other.get("tiny").names == ("second", "tiny")


def test_the_same_model_gives_the_same_bytes_on_every_node(store: Store, other: Store, tmp_path: Path) -> None:
    stored(store)
    write(store, tmp_path / "a")
    write(store, tmp_path / "b")
    read(other, tmp_path / "a")
    write(other, tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()
    write(store, tmp_path / "bare", layout=False)
    assert (tmp_path / "bare").stat().st_size < (tmp_path / "a").stat().st_size
    listed = subprocess.run(["tar", "tf", str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines()[0] == "bundle.json"
    assert listed.stderr == ""


def test_without_its_layout_the_model_alone_is_taken(store: Store, other: Store, tmp_path: Path) -> None:
    digest = stored(store)
    write(store, tmp_path / "b", layout=False)
    assert not read(other, tmp_path / "b").layout
    assert other.prepared(digest) is None


def test_a_layout_of_another_release_is_passed_over(store: Store, other: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = stored(store)
    write(store, tmp_path / "b")
    monkeypatch.setattr(prepared, "LAYOUT_ID", "int4-b16-2")
    assert not read(other, tmp_path / "b").layout
    assert other.has(digest)
    assert not (other.root / "prepared").exists()


@pytest.mark.parametrize(("damage", "why"), [
    (lambda s, d: flip(s.get("tiny").path / "model.safetensors"), "model.safetensors: contents changed"),
    (lambda s, d: flip(s.prepared_folder(d) / "weights.bin"), "weights.bin: contents changed"),
    (lambda s, d: os.truncate(s.get("tiny").path / "tokenizer.json", 1), "tokenizer.json: 1 bytes, recorded 2"),
    (lambda s, d: (s.prepared_folder(d) / "index.json").unlink(), "No such file or directory"),
])
def test_a_damaged_model_is_not_exported(store: Store, tmp_path: Path, damage: Callable[[Store, str], None], why: str) -> None:
    digest = stored(store)
    damage(store, digest)
    with pytest.raises(ModelError, match=why):
        write(store, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_an_existing_file_and_an_unknown_model_are_refused(store: Store, tmp_path: Path) -> None:
    stored(store)
    (tmp_path / "b").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write(store, tmp_path / "b")
    assert (tmp_path / "b").read_text() == "mine"
    with pytest.raises(ModelError, match="no model is called 'x'"):
        write(store, tmp_path / "c", name="x")
    with pytest.raises(StoreError, match=r"cannot write .*No such file"):
        write(store, tmp_path / "no" / "folder")
    with pytest.raises(StoreError, match=r"cannot write /dev/shm/\.\./full/x"):
        write(store, Path("/dev/shm/../full/x"))
    with pytest.raises(StoreError, match="File name too long"):
        write(store, tmp_path / ("z" * 300))


@pytest.mark.parametrize(("report", "field"), [
    ({"template": 5}, "template"), ({"origin": 5}, "origin"), ({"group_size_overrides": 5}, "group_size_overrides"),
    ({"kept": [None]}, "kept"), ({"grid": "minmax", "layers": [None]}, "layers"),
    ({"grid": "minmax", "layers": [{"bits": 4}]}, "layers"), ({"grid": 5}, "grid"),
])
def test_a_report_that_no_command_could_show_is_refused(
        store: Store, other: Store, tmp_path: Path, report: dict[str, Any], field: str) -> None:
    stored(store)
    write(store, tmp_path / "b", layout=False)
    found = manifested({"report": report})(parts(tmp_path / "b"))
    (tmp_path / "c").write_bytes(build(found))
    with pytest.raises(ModelError, match=f"`{field}` in the report of its manifest.json is wrong"):
        read(other, tmp_path / "c")
    assert other.names() == {}


def test_a_damaged_model_is_mended_by_an_import(store: Store, other: Store, tmp_path: Path) -> None:
    digest = stored(store)
    write(store, tmp_path / "b")
    read(other, tmp_path / "b")
    flip(other.get("tiny").path / "model.safetensors")
    assert other.verify(digest)
    assert not read(other, tmp_path / "b").cached
    assert other.verify(digest) == []
    assert list((other.root / "tmp").iterdir()) == []


def test_a_name_that_is_taken_is_not_moved_unless_asked(store: Store, other: Store, tmp_path: Path) -> None:
    stored(store)
    held = stored(other, source="b" * 64)
    write(store, tmp_path / "b")
    with pytest.raises(UsageError, match="the name tiny belongs to another model; give --name"):
        read(other, tmp_path / "b")
    assert other.names() == {"tiny": held}
    read(other, tmp_path / "b", name="tiny")
    assert other.names()["tiny"] != held


# ---- what strangers make ----


def parts(file: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(file) as tar:
        return [(one, tar.extractfile(one).read()) for one in tar.getmembers()]  # type: ignore[union-attr]


def build(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    for one, data in members:
        out.write(one.tobuf(tarfile.GNU_FORMAT, "ascii", "surrogateescape"))
        out.write(data + bytes(-len(data) % 512))
    return out.getvalue() + bytes(1024)


Parts = list[tuple[tarfile.TarInfo, bytes]]


def listing(change: Callable[[dict[str, Any]], object]) -> Callable[[Parts], Parts]:
    """Change bundle.json."""

    def mutate(found: Parts) -> Parts:
        said = json.loads(found[0][1])
        changed = change(said)
        return put(found, 0, json.dumps(said if changed is None else changed).encode())

    return mutate


def put(found: Parts, at: int, data: bytes) -> Parts:
    found[at][0].size = len(data)
    return [*found[:at], (found[at][0], data), *found[at + 1 :]]


def replaced(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Parts], Parts]:
    """Change a file and everything in bundle.json that speaks of it: a forger can do that."""

    def mutate(found: Parts) -> Parts:
        at = next(i for i, (one, _) in enumerate(found) if one.name == name)
        data = edit(found[at][1])
        found = put(found, at, data)
        said = json.loads(found[0][1])
        entry = next(one for one in said["members"] if one["name"] == name)
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return put(found, 0, json.dumps(said).encode())

    return mutate


def manifested(change: Mapping[str, Any]) -> Callable[[Parts], Parts]:
    return replaced("model/manifest.json", lambda data: manifest.text({**json.loads(data), **change}).encode())


def renamed(name: str) -> Callable[[Parts], Parts]:
    """Another name for config.json in list and tar."""

    def mutate(found: Parts) -> Parts:
        at = next(i for i, (one, _) in enumerate(found) if one.name == "model/tokenizer.json")
        found[at][0].name = name
        said = json.loads(found[0][1])
        next(one for one in said["members"] if one["name"] == "model/tokenizer.json")["name"] = name
        return put(found, 0, json.dumps(said).encode())

    return mutate


def kind(number: bytes) -> Callable[[Parts], Parts]:
    def mutate(found: Parts) -> Parts:
        found[3][0].type = number
        found[3][0].linkname = "/etc/shadow"
        return found

    return mutate


def sized(said: dict[str, Any], size: object) -> None:
    said["members"][1]["bytes"] = size


HOSTILE: dict[str, tuple[Callable[[Parts], Parts] | Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "it is cut short"),
    "text": (lambda data: b"hello\n" * 999, "it is no tar file, or damaged"),
    "zeros": (lambda data: bytes(4096), "it does not begin with bundle.json"),
    "a zip": (lambda data: b"PK\x03\x04" + bytes(2000), "it is no tar file"),
    "cut in the list": (lambda data: data[:700], "it is cut short"),
    "cut in the weights": (lambda data: data[:-9000], "bytes and should have"),
    "one byte less": (lambda data: data[:-1], "bytes and should have"),
    "a tail": (lambda data: data + bytes(512), "bytes and should have"),
    "another first": (lambda found: [found[1], found[0], *found[2:]], "it does not begin with bundle.json"),
    "a long first": (lambda found: put(found, 0, b" " * (5 << 20)), "it does not begin with bundle.json"),
    "no list": (lambda found: put(found, 0, b"[]"), "not readable"),
    "deep": (lambda found: put(found, 0, b"[" * 100_000), "not readable"),
    "latin": (lambda found: put(found, 0, b"\xff\xfe"), "not readable"),
    "huge number": (lambda found: put(found, 0, b'{"kind": ' + b"9" * 5000 + b"}"), "not readable"),
    "other kind": (listing(lambda said: said.update(kind="x")), "of another kind"),
    "newer": (listing(lambda said: said.update(schema=2)), "a newer release made it"),
    "no members": (listing(lambda said: said.pop("members") and None), "missing or wrong"),
    "members a number": (listing(lambda said: said.update(members=5)), "missing or wrong"),
    "size a text": (listing(lambda said: sized(said, "9")), "missing or wrong"),
    "size true": (listing(lambda said: sized(said, True)), "missing or wrong"),
    "size negative": (listing(lambda said: sized(said, -1)), "is impossible"),
    "size 2**80": (listing(lambda said: sized(said, 1 << 80)), "is impossible"),
    "size of a bomb": (listing(lambda said: sized(said, 1 << 40)), "larger than such a file can be"),
    "digest a path": (listing(lambda said: said.update(digest="../../x")), "its digest is none"),
    "layout a path": (listing(lambda said: said.update(layout="../x")), "layout is not plain"),
    "layout without files": (listing(lambda said: said.update(members=said["members"][:-1])), "layout is not whole"),
    "twice in the list": (listing(lambda said: said["members"].append(said["members"][0])), "or one twice"),
    "many": (listing(lambda said: said.update(members=[{"name": f"model/{i}.json", "bytes": 1, "sha256": ""} for i in range(10_001)])), "too many files"),
    "no config": (renamed("model/other.json"), "lists other files"),
    "traversal": (renamed("model/../../../x.json"), "its name is not plain"),
    "absolute": (renamed("/etc/cron.d/x.json"), "its name is not plain"),
    "hidden": (renamed("model/.x.json"), "its name is not plain"),
    "code": (renamed("model/modeling.py"), "no kind of file that a model needs"),
    "pickle": (renamed("model/pytorch_model.bin"), "no kind of file that a model needs"),
    "folder": (renamed("elsewhere/x.json"), "its folder is unknown"),
    "third of the layout": (renamed("prepared/x.json"), "no part of a layout"),
    "symlink": (kind(tarfile.SYMTYPE), "is not a plain file"),
    "hard link": (kind(tarfile.LNKTYPE), "is not a plain file"),
    "device": (kind(tarfile.CHRTYPE), "is not a plain file"),
    "fifo": (kind(tarfile.FIFOTYPE), "is not a plain file"),
    "long name": (kind(tarfile.GNUTYPE_LONGNAME), "is not a plain file"),
    "pax header": (kind(tarfile.XHDTYPE), "is not a plain file"),
    "sparse": (kind(tarfile.GNUTYPE_SPARSE), "is not a plain file"),
    "swapped": (lambda found: [*found[:2], found[3], found[2], *found[4:]], "there is something else"),
    "twice in the tar": (lambda found: [*found[:3], found[2], *found[3:]], "bytes and should have"),
    "flipped": (lambda found: [*found[:-1], (found[-1][0], b"\x01" + found[-1][1][1:])], "the contents of prepared/weights.bin are not what"),
    "other weights": (replaced("model/model.safetensors", lambda data: data[:-1] + b"\x01"), "says something else of model/model.safetensors"),
    "other layout": (replaced("prepared/weights.bin", lambda data: b"\x01" + data[1:]), "says something else of weights.bin"),
    "no index": (replaced("prepared/index.json", lambda data: b"{}"), "its layout cannot be used"),
    "foreign source": (manifested({"source_digest": "f" * 64}), "do not belong to its digest"),
    "foreign digest": (manifested({"digest": "f" * 64}), "belongs to another model"),
    "unsealed manifest": (replaced("model/manifest.json", lambda data: data.replace(b"/src", b"/SRC")), "checksum is wrong"),
    "newer manifest": (manifested({"schema": 9}), "schema 9 is not 1"),
    "escape sequences": (manifested({"report": {"loss": "\x1b[2J"}}), "characters that are no text"),
    "pieces": (manifested({"recipe_version": 1, "files": {}}), "lists other files"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_bundle_is_one_line_and_changes_nothing(store: Store, other: Store, tmp_path: Path, case: str) -> None:
    change, why = HOSTILE[case]
    stored(store)
    held = stored(other, name="held", source="b" * 64)
    write(store, tmp_path / "b")
    raw = (tmp_path / "b").read_bytes()
    try:
        mutated = change(raw) if change.__code__.co_varnames[:1] == ("data",) else build(change(parts(tmp_path / "b")))  # type: ignore[arg-type]
    except UnicodeEncodeError:
        pytest.fail("the case cannot be built")
    assert mutated != raw
    (tmp_path / "x").write_bytes(mutated)  # type: ignore[arg-type]
    before = everything(other)
    with pytest.raises(ApplianceError) as caught:
        read(other, tmp_path / "x")
    assert caught.value.exit_code == 65
    assert why in caught.value.line
    assert "\n" not in caught.value.line
    assert everything(other) == before
    assert list((other.root / "tmp").iterdir()) == []
    assert not list(tmp_path.glob("**/x.json"))
    assert list(other.names().values()) == [held]


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a size that is a text": ({"hidden_size": "wide"}, "hidden_size"),
    "more layers than there are": ({"num_hidden_layers": 5}, "model.layers.2.self_attn.q_proj.weight is missing"),
    "other heads": ({"num_key_value_heads": 4}, r"k_proj.weight has the shape \[32, 64\]"),
    "fewer words": ({"vocab_size": 100}, "embed_tokens"),
    "not a language model": ({"architectures": ["Zzz"]}, "Zzz"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_cannot_be_served_is_not_taken(store: Store, other: Store, tmp_path: Path, case: str) -> None:
    change, why = UNFIT[case]
    digest = manifest.key("c" * 64, RECIPE)
    with store.begin(digest) as draft:
        write_model(draft.folder, {**CONFIG, **change}, llama_int4(CONFIG, 32))
        store.commit(draft, source="x", source_digest="c" * 64, recipe=RECIPE, report={}, created="", name="tiny")
    write(store, tmp_path / "b", layout=False)
    with pytest.raises(ModelError, match=why):
        read(other, tmp_path / "b")
    assert everything(other) == {}


def test_every_byte_counts(store: Store, tmp_path: Path) -> None:
    """Wherever one byte of a bundle flips, the import refuses it or stores exactly what was exported."""
    stored(store)
    write(store, tmp_path / "b")
    raw = (tmp_path / "b").read_bytes()
    whole = everything(store)
    places = [*range(0, 1024, 37), *range(1024, len(raw), max(1, len(raw) // 150))]
    refused, codes = 0, set()
    for number, place in enumerate(places):
        target = Store(tmp_path / f"s{number}")
        (tmp_path / "x").write_bytes(raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :])
        try:
            read(target, tmp_path / "x")
        except ApplianceError as error:
            refused += 1
            codes.add(error.exit_code)
            assert everything(target) == {}
        else:
            assert everything(target) == whole, f"byte {place}"
    assert refused > len(places) * 0.8
    assert codes <= {2, 65}  # 2: the name is none any more


def test_a_bomb_needs_its_room_first(store: Store, other: Store, tmp_path: Path) -> None:
    stored(store)
    listed = write(store, tmp_path / "b", layout=False)
    weights = next(one for one in listed.members if one.name.endswith(".safetensors"))
    bomb = Member(name=weights.name, bytes=8 << 40, sha256=weights.sha256)
    text = content.text(Content(digest=listed.digest, name="tiny", layout=None, members=tuple(
        bomb if one is weights else one for one in listed.members)))
    size = tape.length(iter([len(text), *(bomb.bytes if one is weights else one.bytes for one in listed.members)]))
    with open(tmp_path / "x", "wb") as file:  # a sparse file of 8 TiB, where the file system lets it be one
        file.write(tape.header("bundle.json", len(text)) + text + tape.padding(len(text)))
        file.write(tape.header(listed.members[0].name, listed.members[0].bytes))
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("this file system has no files of that size")
    with pytest.raises(StoreError, match="headroom are needed"):
        read(other, tmp_path / "x")


# ---- signatures ----


def make_key(path: Path, *, passphrase: str = "") -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "somebody", "-f", str(path)], check=True)
    return path.with_suffix(".pub").read_text()


def test_only_a_trusted_signature_is_taken(store: Store, other: Store, tmp_path: Path) -> None:
    stored(store)
    trusted, stranger = make_key(tmp_path / "trusted"), make_key(tmp_path / "stranger")
    (tmp_path / "keys").write_text(f"# ours\n\n{trusted}")
    keys = signature.read_keys(str(tmp_path / "keys"))
    write(store, tmp_path / "plain")
    write(store, tmp_path / "foreign", key=tmp_path / "stranger")
    write(store, tmp_path / "good", key=tmp_path / "trusted")
    write(store, tmp_path / "again", key=tmp_path / "trusted")
    assert (tmp_path / "good").read_bytes() == (tmp_path / "again").read_bytes()
    with pytest.raises(ModelError, match="the bundle is refused: it has no signature"):
        read(other, tmp_path / "plain", keys=keys)
    with pytest.raises(ModelError, match="no key of bundle_keys has made its signature"):
        read(other, tmp_path / "foreign", keys=keys)
    assert not other.root.exists(), "nothing is unpacked before the signature is good"
    assert read(other, tmp_path / "good", keys=keys).signer.startswith("ED25519 key SHA256:")  # type: ignore[union-attr]
    both = signature.read_keys(str(write_keys(tmp_path / "folder", trusted, stranger)))
    assert read(Store(tmp_path / "third"), tmp_path / "foreign", keys=both).signer


def write_keys(folder: Path, *keys: str) -> Path:
    folder.mkdir()
    for number, key in enumerate(keys):
        (folder / f"{number}.pub").write_text(key)
    (folder / "notes.txt").write_text("no key")
    return folder


def test_a_signed_list_cannot_be_changed_or_borrowed(store: Store, other: Store, tmp_path: Path) -> None:
    stored(store)
    keys = (" ".join(make_key(tmp_path / "key").split()[:2]),)
    write(store, tmp_path / "good", key=tmp_path / "key")
    found = parts(tmp_path / "good")
    changed = put(list(found), 0, found[0][1].replace(b'"tiny"', b'"tinx"'))
    (tmp_path / "x").write_bytes(build(changed))
    with pytest.raises(ModelError, match="the bundle is refused"):
        read(other, tmp_path / "x", keys=keys)
    other_use = subprocess.run(["ssh-keygen", "-Y", "sign", "-n", "git", "-f", str(tmp_path / "key")], input=found[0][1], capture_output=True, check=True)
    (tmp_path / "x").write_bytes(build(put(list(found), 1, other_use.stdout)))
    with pytest.raises(ModelError, match="the bundle is refused"):
        read(other, tmp_path / "x", keys=keys)
    (tmp_path / "x").write_bytes(build(put(list(found), 1, b"x" * 20_000)))
    with pytest.raises(ModelError, match="signature is too long"):
        read(other, tmp_path / "x", keys=keys)
    (tmp_path / "x").write_bytes(build(put(list(found), 1, b"nonsense")))
    with pytest.raises(ModelError, match="the bundle is refused"):
        read(other, tmp_path / "x", keys=keys)
    # A signature is for the list; files behind it that were exchanged are found by the list.
    found = parts(tmp_path / "good")
    (tmp_path / "x").write_bytes(build([*found[:-1], (found[-1][0], b"\x01" + found[-1][1][1:])]))
    with pytest.raises(ModelError, match=r"the contents of prepared/weights.bin"):
        read(other, tmp_path / "x", keys=keys)
    assert everything(other) == {}


@pytest.mark.parametrize(("text", "why"), [
    (None, "No such file"), ("", "holds no public key"), ("# nothing\n", "holds no public key"),
    ("hello\n", "line 1 is no key of OpenSSH"), ('command="x" ssh-ed25519 AAAA', "line 1 is no key"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\n", "line 1 is no key"), ("\xff", "it is not text"),
])
def test_keys_that_cannot_be_used_are_a_configuration_error(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "keys").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=why):
        signature.read_keys(str(tmp_path / "keys"))


def test_a_key_that_cannot_sign_is_one_line(store: Store, tmp_path: Path) -> None:
    stored(store)
    (tmp_path / "bad").write_text("no key")
    for key, why in ((tmp_path / "none", "no such file"), (tmp_path / "bad", "cannot sign")):
        with pytest.raises(UsageError, match=why):
            write(store, tmp_path / "b", key=key)
    assert not (tmp_path / "b").exists()


# ---- the command line ----


def run(home: Path, *args: str, **env: str) -> Result:
    return invoke(bundle, args, Application(env={"PATH": os.environ["PATH"], "APPLIANCE_HOME": str(home), **env}))


def test_the_command_line(tmp_path: Path) -> None:
    store = Store(tmp_path / "home" / "store")
    digest = stored(store)
    key = make_key(tmp_path / "key")
    (tmp_path / "keys").write_text(key)
    file = str(tmp_path / "tiny.bundle")
    said = run(tmp_path / "home", "export", "tiny", file, "--sign", str(tmp_path / "key"), "--with-kernel-cache").stdout
    assert said.startswith(f"{file}: tiny, ")
    assert said.rstrip().endswith("in 7 files, signed")
    shown = run(tmp_path / "home", "show", file).stdout
    assert digest in shown
    assert "signed, not checked: bundle_keys is not set" in shown
    assert "signed by ED25519 key" in run(tmp_path / "home", "show", file, APPLIANCE_BUNDLE_KEYS=str(tmp_path / "keys")).stdout
    no_worker = {"APPLIANCE_WORKER_PYTHON": "/nowhere", "APPLIANCE_KERNEL": "aten"}
    imported = run(tmp_path / "b", "import", file, "--name", "x", APPLIANCE_BUNDLE_KEYS=str(tmp_path / "keys"), **no_worker)
    assert imported.stdout.startswith("x: stored, ")
    assert ", with the kernels' layout, signed by ED25519 key SHA256:" in imported.stdout
    assert run(tmp_path / "b", "import", file, **no_worker).stdout == "tiny: in the store already, nothing to do\n"
    with pytest.raises(ConfigError, match="bundle_keys cannot be read"):
        run(tmp_path / "b", "import", file, APPLIANCE_BUNDLE_KEYS="/nowhere")
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        run(tmp_path / "b", "import", "/nowhere")


def test_config_check_reads_the_keys(tmp_path: Path) -> None:
    from appliance.cli.config import config

    def check(keys: str) -> Result:
        return CliRunner().invoke(config, ["check"], obj=Application(env={"APPLIANCE_HOME": str(tmp_path), "APPLIANCE_BUNDLE_KEYS": keys}))

    key = make_key(tmp_path / "key")
    assert key
    assert check(str(tmp_path / "key.pub")).exit_code == 0
    assert isinstance(check(str(tmp_path / "key")).exception, ConfigError), "the private key"


def test_a_front_is_read_without_the_rest(store: Store, tmp_path: Path) -> None:
    stored(store)
    listed = write(store, tmp_path / "b")
    with open(tmp_path / "b", "rb") as file:
        front = read_front(file, keys=None)
        assert front.content == listed
        assert file.tell() < 8192


def test_where_no_temporary_file_can_be_written_nothing_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StoreError, match="the signature cannot be checked: No such file or directory"):
        signature.check(b"text", b"signature", ["ssh-ed25519 AAAA"])
