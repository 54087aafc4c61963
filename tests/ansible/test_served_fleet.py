"""The drills of a rollout on two booted nodes that serve with real vLLM and the default model. The order does not count.

Each test has a fleet of its own, made of one layer. They take minutes, and 2 GB of memory a node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from appliance.importing.gguf_header import read_header
from appliance.library import resolve
from tests.ansible.conftest import DIES, ONE, TWO
from tests.ansible.fleet import Fleet, batches, note, told

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def names() -> tuple[str, ...]:
    return ("web1", "web2")


@pytest.fixture(scope="module")
def published(served_releases: Path) -> Path:
    return served_releases


@pytest.fixture(scope="module")
def variables(served_variables: dict[str, Any]) -> dict[str, Any]:
    return served_variables


@pytest.fixture(scope="module")
def serving(served_layer: str) -> str:
    return served_layer


def all_on(nodes: Fleet, versions: dict[str, str]) -> None:
    """What runs where, that it answers, and that the table says the same."""
    seen = nodes.all_seen()
    assert {name: one.version for name, one in seen.items()} == versions
    assert all(one.answers for one in seen.values()), seen
    rows = nodes.rows()
    assert {name: (row["state"], row["version"]) for name, row in rows.items()} == {name: ("ready", version) for name, version in versions.items()}


def test_a_rollout_again_and_back(nodes: Fleet) -> None:
    ran = nodes.play("rollout.yml", appliance_version=TWO).ok()
    note("vLLM: a version, node by node", ran)
    assert batches(ran) == ["web1", "web2"]
    all_on(nodes, {"web1": TWO, "web2": TWO})
    before = nodes.all_seen()
    again = nodes.play("rollout.yml", appliance_version=TWO).ok()
    note("vLLM: the same again", again)
    assert again.changed == 0, again.changes()
    assert nodes.all_seen() == before
    back = nodes.play("rollback.yml", rollback_batch=2).ok()
    note("vLLM: rollback of two at once", back)
    all_on(nodes, {"web1": ONE, "web2": ONE})


def test_the_worker_of_the_canary_dies(nodes: Fleet) -> None:
    ran = nodes.play("rollout.yml", appliance_version=DIES)
    sentence = told(ran)
    note("vLLM: canary whose worker dies", ran)
    assert sentence.startswith("rollout stopped at the canary: web1: ")
    assert "broken on purpose" in sentence or "died" in sentence
    assert sentence.endswith("as before and well: web1. untouched: web2")
    all_on(nodes, {"web1": ONE, "web2": ONE})


def test_the_model_of_the_canary_talks_nonsense(nodes: Fleet) -> None:
    model = scrambled(nodes.folder / "nonsense.gguf")
    before = nodes.all_seen()
    ran = nodes.play("rollout.yml", appliance_version=ONE, appliance_model=str(model))
    sentence = told(ran)
    note("vLLM: canary whose model talks nonsense", ran)
    assert sentence.startswith("rollout stopped at the canary: web1: ")
    assert "Paris" in sentence
    assert sentence.endswith("as before and well: web1. untouched: web2")
    all_on(nodes, {"web1": ONE, "web2": ONE})
    assert {name: seen.model for name, seen in nodes.all_seen().items()} == {name: seen.model for name, seen in before.items()}


def test_the_second_batch_fails_and_goes_back(nodes: Fleet) -> None:
    """web2 is given a model of its own that talks nonsense. The batch before it stays, until it is taken back."""
    nodes.own = {"web2": {"appliance_model": str(scrambled(nodes.folder / "nonsense.gguf"))}}
    ran = nodes.play("rollout.yml", appliance_version=TWO)
    note("vLLM: second batch with a model that talks nonsense", ran)
    sentence = told(ran)
    assert sentence.startswith("rollout stopped at a batch: web2: ")
    assert "Paris" in sentence
    assert sentence.endswith("as before and well: web2. passed and stay: web1. untouched: none")
    all_on(nodes, {"web1": TWO, "web2": ONE})
    back = nodes.play("rollback.yml", "--limit", "web1").ok()
    note("vLLM: rollback of the canary after it", back)
    all_on(nodes, {"web1": ONE, "web2": ONE})


def test_a_node_is_unreachable(nodes: Fleet) -> None:
    nodes.hosts["web2"].poweroff()
    ran = nodes.play("rollout.yml", appliance_version=TWO)
    sentence = told(ran)
    note("vLLM: unreachable node in the second batch", ran)
    assert "web2: unreachable: " in sentence
    assert sentence.endswith("passed and stay: web1. untouched: web2")
    rows = nodes.rows()
    assert {name: (row["state"], row["version"]) for name, row in rows.items()} == {"web1": ("ready", TWO), "web2": ("unreachable", None)}
    nodes.play("rollback.yml", "--limit", "web1").ok()
    nodes.hosts["web2"].boot()
    nodes.wait_ready()
    all_on(nodes, {"web1": ONE, "web2": ONE})


def scrambled(target: Path) -> Path:
    """The default model with its layers in the reverse order: a sound file that talks nonsense."""
    source = Path(resolve("smollm2", env=os.environ))
    data, header = bytearray(source.read_bytes()), read_header(source)
    last = max(int(name.split(".")[1]) for name in header.tensors if name.startswith("blk."))
    for name, tensor in header.tensors.items():
        if name.startswith("blk.") and "norm" not in name:
            number, rest = name.split(".", 2)[1:]
            other = header.tensors[f"blk.{last - int(number)}.{rest}"]
            if int(number) < last - int(number) and (tensor.kind, tensor.shape) == (other.kind, other.shape):
                one, two = (slice(each.offset, each.offset + each.bytes) for each in (tensor, other))
                data[one], data[two] = data[two], data[one]
    target.write_bytes(data)
    return target
