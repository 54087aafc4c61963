"""The drills of a rollout on three booted nodes that serve with real vLLM and the default model. The order does not count.

Each test has a fleet of its own, made of one layer. They take minutes, and 2 GB of memory a node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.importing.gguf_header import read_header
from appliance.library import resolve
from tests.ansible.conftest import DEBS, ONE, TWO
from tests.ansible.fleet import NAMES, Fleet, batches, fleet, installed, note, told
from tests.packages.releases import release, repository
from tests.system.testhost.host import Host

pytestmark = pytest.mark.heavy
DIES = "0.3.0~deb12"
SETTINGS = {"trial_s": 20, "drain_s": 10, "context": 1024, "max_running": 2, "memory": {"reserve": "64M"}}
# Three nodes share this machine's CPUs: one is measured at a time, and a loss is believed only where it is large.
WISHES = {"rollout_bench_at_once": 1, "rollout_bench_tokens": 48, "rollout_loss_pct": 60, "rollout_kept": "canary",
          "appliance_verify_expect": "Paris", "appliance_wait_s": 400}


@pytest.fixture(scope="session")
def published(needed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONE is the built release, TWO the same with another number, the worker of DIES does not start."""
    if not list(DEBS.glob("appliance-worker_*.deb")):
        pytest.skip(f"there are no packages in {DEBS}: make deb")
    if kept := os.environ.get("APPLIANCE_FLEET_APT"):  # of a run before, to save minutes
        return Path(kept)
    folder = tmp_path_factory.mktemp("fleet")
    debs = folder / ONE
    debs.mkdir()
    for deb in (*DEBS.glob("appliance*.deb"), *needed.glob("python3-sdnotify_*.deb")):
        shutil.copy(deb, debs)  # no link: a build at the same time writes into the file
    release(DEBS, folder / TWO, version=TWO)
    release(DEBS, folder / DIES, version=DIES, fault="worker-dies")
    for version in (TWO, DIES):
        next((folder / version).glob("appliance-model-smollm2_*.deb")).unlink()
    return repository([folder / version for version in (ONE, TWO, DIES)], folder / "apt", keys=folder / "keys")


@pytest.fixture(scope="session")
def variables(published: Path) -> dict[str, Any]:
    return {"appliance_repository_uri": "file:/srv/repository", "appliance_repository_key": (published / "appliance.asc").read_text(),
            "appliance_config": SETTINGS, **WISHES}


@pytest.fixture(scope="session")
def serving(published: Path, variables: dict[str, Any], make_host: Callable[..., Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with installed(tmp_path_factory.mktemp("first"), make_host, published, variables, appliance_version=ONE) as layer:
        yield layer


@pytest.fixture
def nodes(serving: str, published: Path, variables: dict[str, Any], make_host: Callable[..., Host], tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path, serving, make_host, published, variables) as found:
        yield found


def all_on(nodes: Fleet, versions: dict[str, str]) -> None:
    """What runs where, that it answers, and that the table says the same."""
    seen = nodes.all_seen()
    assert {name: one.version for name, one in seen.items()} == versions
    assert all(one.answers for one in seen.values()), seen
    rows = nodes.rows()
    assert {name: (row["state"], row["version"]) for name, row in rows.items()} == {name: ("ready", version) for name, version in versions.items()}


def test_a_rollout_again_and_back(nodes: Fleet) -> None:
    ran = nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=2).ok()
    note("vLLM: a version, canary and a batch of two", ran)
    assert batches(ran) == ["web1", "web2", "web3"]
    all_on(nodes, dict.fromkeys(NAMES, TWO))
    before = nodes.all_seen()
    again = nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=2).ok()
    note("vLLM: the same again", again)
    assert again.changed == 0, again.changes()
    assert nodes.all_seen() == before
    back = nodes.play("rollback.yml", rollback_batch=3).ok()
    note("vLLM: rollback of three at once", back)
    all_on(nodes, dict.fromkeys(NAMES, ONE))


def test_the_worker_of_the_canary_dies(nodes: Fleet) -> None:
    ran = nodes.play("rollout.yml", appliance_version=DIES)
    sentence = told(ran)
    note("vLLM: canary whose worker dies", ran)
    assert sentence.startswith("rollout stopped at the canary: web1: ")
    assert "broken on purpose" in sentence or "died" in sentence
    assert sentence.endswith("as before and well: web1. untouched: web2, web3")
    all_on(nodes, dict.fromkeys(NAMES, ONE))


def test_the_model_of_the_canary_talks_nonsense(nodes: Fleet) -> None:
    model = scrambled(nodes.folder / "nonsense.gguf")
    before = nodes.all_seen()
    ran = nodes.play("rollout.yml", appliance_version=ONE, appliance_model=str(model))
    sentence = told(ran)
    note("vLLM: canary whose model talks nonsense", ran)
    assert sentence.startswith("rollout stopped at the canary: web1: ")
    assert "Paris" in sentence
    assert sentence.endswith("as before and well: web1. untouched: web2, web3")
    all_on(nodes, dict.fromkeys(NAMES, ONE))
    assert {name: seen.model for name, seen in nodes.all_seen().items()} == {name: seen.model for name, seen in before.items()}


def test_the_second_batch_fails_and_goes_back(nodes: Fleet) -> None:
    """web3 has a noisy neighbour: a third of a CPU is left to it."""
    nodes.hosts["web3"].run(["systemctl", "set-property", "--runtime", "appliance.service", "CPUQuota=30%"], check=True)
    ran = nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=2, rollout_bench_tries=2)
    sentence = told(ran)
    note("vLLM: second batch with a slow node", ran)
    assert sentence.startswith("rollout stopped at a batch: web3: too slow: ")
    assert sentence.endswith("as before and well: web2, web3. untouched: none")
    all_on(nodes, {"web1": TWO, "web2": ONE, "web3": ONE})


def test_a_node_is_unreachable(nodes: Fleet) -> None:
    nodes.hosts["web3"].poweroff()
    ran = nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=1)
    sentence = told(ran)
    note("vLLM: unreachable node in the third batch", ran)
    assert "web3: unreachable" in sentence
    rows = nodes.rows()
    assert {name: (row["state"], row["version"]) for name, row in rows.items()} == {
        "web1": ("ready", TWO), "web2": ("ready", TWO), "web3": ("unreachable", None)}
    nodes.hosts["web3"].boot()
    nodes.node("web3").wait_ready(200)
    nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=1).ok()
    all_on(nodes, dict.fromkeys(NAMES, TWO))


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
