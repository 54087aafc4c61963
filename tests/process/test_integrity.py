"""Damage on the way to a served model: found, made again from its source, or refused; never served.

Real command line and real preparation; only the quantizing and preparing child is a fake.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance import manifest
from appliance.prepared import folder_name
from appliance.sources import Sources
from tests.process.conftest import Agent
from tests.process.fake_models import fake_python, source_folder
from tests.process.test_store_kill import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "home", tmp_path)
    node.env["APPLIANCE_WORKER_PYTHON"] = fake_python(tmp_path, FAKE_KERNELS="native,aten")
    assert node.run("add", str(source_folder(tmp_path / "source")), "--name", "tiny")[0] == 0
    return node


def flip(path: Path, where: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def provision(node: Node, **order: Any) -> dict[str, Any]:
    """One preparation for a start; its result, or its error."""
    home = node.store.root.parent
    places = {name: str(home / name) for name in ("store", "state", "cache")} | {"runtime": str(home / "run")}
    for name in ("state", "cache", "run"):
        (home / name).mkdir(exist_ok=True)
    whole = {"model": "tiny", "digest": node.store.names().get("tiny"), "settings": {}, "directories": places,
             "worker_python": node.env["APPLIANCE_WORKER_PYTHON"], **order}
    done = subprocess.run([sys.executable, "-m", "appliance.provision"], input=json.dumps(whole), capture_output=True, text=True,
                          env=node.env, timeout=60, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    last = events[-1]
    return {"code": done.returncode, "phases": [one["phase"] for one in events if one["event"] == "phase"],
            **(last.get("report") or last)}


def layout(node: Node) -> Path:
    return node.store.root / "prepared" / folder_name(node.store.names()["tiny"]) / "weights.bin"


def model_file(node: Node, name: str = "model.safetensors") -> Path:
    return node.store.get("tiny").path / name


def test_a_whole_model_is_looked_at_and_nothing_is_done(node: Node) -> None:
    found = provision(node)
    assert (found["code"], found["mended"], found["note"], found["phases"]) == (0, "", "", [])
    assert json.loads((node.store.root.parent / "state" / "patrol.json").read_text())


def test_a_flipped_byte_of_the_layout_is_laid_out_anew(node: Node) -> None:
    before = layout(node).read_bytes()
    flip(layout(node))
    found = provision(node)
    assert found["code"] == 0
    assert found["mended"] == "its laid out weights could not be used (weights.bin: contents changed) and are made again"
    assert found["phases"] == ["verifying", "preparing"]
    assert layout(node).read_bytes() == before
    assert provision(node)["mended"] == ""


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_model_is_made_again_from_its_source(node: Node, name: str) -> None:
    flip(model_file(node, name), 40)
    found = provision(node)
    if name == "manifest.json":  # nobody knows the source any more
        assert found["code"] == 65
        assert "its manifest is damaged, so its source is not known" in found["why"]
        code, _, err = node.run("repair", "tiny", "--source", str(node.store.root.parent.parent / "source"))
        assert code == 0, err
    else:
        assert found["code"] == 0, found
        assert found["mended"].startswith(f"the stored model was damaged ({name}: ")
        assert "preparing" in found["phases"], "the old layout was made of who knows what"
    node.check()
    assert node.drafts() == []
    assert provision(node)["mended"] == ""


def test_a_damaged_model_without_its_source_is_never_served(node: Node, tmp_path: Path) -> None:
    flip(model_file(node))
    (tmp_path / "source").rename(tmp_path / "away")
    for repair in ("", "weights"):
        found = provision(node, repair=repair)
        assert (found["code"], found["exit_code"]) == (65, 65)
        assert found["what"] == "the stored model 'tiny' is damaged"
        assert found["why"].startswith("model.safetensors: contents changed (SHA-256 ")
        assert "its source cannot be used: " in found["why"]
        assert found["do"].startswith("run `applianctl model repair tiny --source SOURCE`, or import a bundle")
    flip(model_file(node))
    assert provision(node)["mended"] == "", "given back"


def test_a_layout_is_not_made_of_a_damaged_model(node: Node, tmp_path: Path) -> None:
    """A release with another layout, or a lost one: the model is read whole before anything is made of it."""
    node.store.discard_prepared(node.store.names()["tiny"])
    flip(model_file(node))
    (tmp_path / "source").rename(tmp_path / "away")
    assert provision(node)["code"] == 65
    assert not layout(node).exists()
    (tmp_path / "away").rename(tmp_path / "source")
    code, out, err = node.run("add", str(tmp_path / "source"), "--name", "tiny")
    assert "the weights are not laid out yet (the stored model 'tiny' is damaged: model.safetensors" in err, (code, out)
    assert not layout(node).exists()


def test_repair_by_hand(node: Node, tmp_path: Path) -> None:
    assert node.run("repair", "tiny")[:2] == (0, "tiny: whole, nothing to do\n")
    flip(layout(node))
    assert node.run("verify")[0] == 65
    code, out, _ = node.run("repair", "tiny")
    assert (code, out) == (0, "tiny: damaged: weights.bin: contents changed\n")
    assert node.run("verify")[0] == 0
    flip(model_file(node))
    elsewhere = source_folder(tmp_path / "elsewhere", fill=9)
    code, out, err = node.run("repair", "tiny", "--source", str(elsewhere))
    assert (code, out) == (65, "")
    assert err.splitlines()[-1].endswith(f"{elsewhere} is not what it was made from; give its source with --source, or import a bundle of it")
    (tmp_path / "source" / "tokenizer.json").write_text("[]")
    assert "is not what it was made from" in node.run("repair", "tiny")[2], "the source has changed since"
    (tmp_path / "source").rename(tmp_path / "moved")
    assert "its source cannot be used" in node.run("repair", "tiny")[2]
    assert node.run("verify")[0] == 65, "nothing has changed"
    (tmp_path / "moved" / "tokenizer.json").write_text("{}")
    code, out, err = node.run("repair", "tiny", "--source", str(tmp_path / "moved"))
    assert (code, node.run("verify")[0]) == (0, 0), err
    assert "was made again from" in out
    assert node.drafts() == []


def test_a_repair_keeps_everything_that_is_recorded(node: Node) -> None:
    before = node.store.get("tiny").manifest
    flip(model_file(node))
    assert node.run("repair", "tiny")[0] == 0
    after = node.store.get("tiny").manifest
    for field in ("digest", "source", "source_digest", "recipe", "created"):
        assert after[field] == before[field]


def test_what_came_from_the_hub_is_made_again_from_the_kept_files(node: Node, tmp_path: Path) -> None:
    """At a start nothing is fetched: the kept files serve, and without them the service says what to run."""
    origin = "hf:org/name@" + "c" * 40
    file = model_file(node, "manifest.json")
    file.chmod(0o644)
    file.write_text(manifest.text({**json.loads(file.read_text()), "source": origin}))
    flip(model_file(node))
    (tmp_path / "source" / "behaviour.json").unlink()
    assert f"its source cannot be used: {origin} is not kept here" in provision(node)["why"]
    sources = Sources(node.store.root)
    with sources.hold("org--name--cccccccccccc") as held:
        for one in (tmp_path / "source").iterdir():
            one.rename(held.path / one.name)
        files = {one.name: {"bytes": one.stat().st_size, "sha256": None, "git_sha1": None} for one in held.path.iterdir()}
        sources.describe(held, source=origin, commit="c" * 40, files=files, kept=True)
    assert provision(node)["mended"].endswith(f"was made again from {origin}")
    assert node.store.get("tiny").manifest["source"] == origin
    node.check()
    flip(model_file(node))
    node.env["HF_HUB_OFFLINE"] = "1"
    code, out, err = node.run("repair", "tiny")
    assert (code, out.count("was made again from hf:org/name")) == (0, 1), err
    node.check()


def test_a_layout_of_no_use_in_a_store_that_cannot_be_written(node: Node) -> None:
    """It is not mapped, so the model is served from weights packed in memory; one that would be mapped is refused."""
    shutil.rmtree(node.store.root / "tmp")
    (node.store.root / "tmp").write_text("")  # no draft and no trash can be made
    flip(layout(node))
    assert provision(node)["code"] == 73
    layout(node).with_name("index.json").unlink()
    found = provision(node)
    assert (found["code"], found["mended"].split(", ")[-1]) == (0, "and the store cannot be written"), found
    assert "the worker packs them in memory" in found["note"]


def test_the_quick_look_is_bounded_and_rotates(node: Node) -> None:
    """A start may read 256 MiB and a second: what one start passes over, the next one reads."""
    places = node.store.root.parent / "state" / "patrol.json"
    provision(node)
    first = json.loads(places.read_text())
    assert list(first) == [node.store.names()["tiny"]]
    places.write_text("{")
    assert provision(node)["code"] == 0


def test_a_damaged_model_stops_the_service_with_one_sentence(agent: Agent) -> None:
    """It used to be tried again for ever: now nothing is served, the exit code says not to start again, and status why."""
    stored = next((agent.home / "store" / "objects").iterdir())
    flip(stored / "model.safetensors")
    process = agent.serve("ok")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 65
    said = agent.run("status")
    assert said.returncode == 69
    words = " ".join(said.stdout.split() + said.stderr.split())
    assert "stopped by an unusable model (exit 65)" in words
    assert "model.safetensors: contents changed" in words
    assert "applianctl model repair tiny" in err


def test_damage_that_comes_while_it_is_stopped_is_found_at_the_next_start(agent: Agent) -> None:
    process = agent.serve("ok")
    agent.ready()
    process.terminate()
    process.communicate(timeout=30)
    stored = next((agent.home / "store" / "objects").iterdir())
    before = (stored / "tokenizer.json").stat()
    flip(stored / "tokenizer.json")
    os.utime(stored / "tokenizer.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    process = agent.serve("ok")
    process.communicate(timeout=30)
    assert process.returncode == 65
