"""Nodes as an administrator hands them over: Debian 12, SSH, an account that may use sudo, and no way out of their network.

The cheap ones serve with the fake worker (`releases.stand_in`): packages, scripts, unit and agent are the real ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.ansible import balanced, fleet
from tests.ansible.controller import ADMIN, TOOLS
from tests.packages.node import SITE
from tests.packages.releases import release, repository, stand_in
from tests.system.installation import FAKE_CONTROL
from tests.system.testhost import base
from tests.system.testhost.host import Host, sweep

ROOT = Path(__file__).parents[2]
DEBS = Path(os.environ.get("APPLIANCE_DEBS", ROOT / "build/deb"))
NEEDED = ("python3-sdnotify", "sudo")
"""What nodes have beyond the test hosts' base; fetched once by this machine's apt."""
ONE, TWO, DIES = fleet.ONE, fleet.TWO, fleet.DIES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the packages that a node needs of Debian."""
    if reason := base.missing():
        pytest.skip(reason)
    if not (TOOLS / "bin/ansible-playbook").exists():
        pytest.skip("there is no Ansible: make build/ansible/.installed")
    folder = tmp_path_factory.mktemp("needed")
    fetched = subprocess.run(["apt-get", "download", "-q", *NEEDED], cwd=folder, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"this machine's apt cannot fetch {' '.join(NEEDED)}: {fetched.stderr.strip()[-200:]}")
    return folder


@pytest.fixture(scope="session")
def layer(needed: Path) -> Iterator[str]:
    """A node before anything of ours: no package source at all, and python3-sdnotify missing."""
    sweep()
    name = f"ansible-{os.getpid()}"
    with Host(f"c-prepare-{uuid4().hex[:6]}") as host:
        host.push(needed, "/root/needed")
        host.run("dpkg -i /root/needed/sudo_*.deb && rm -rf /root/needed /etc/apt/sources.list /etc/apt/sources.list.d/*")
        host.run(f"useradd -m -s /bin/bash {ADMIN} && install -d -o {ADMIN} -g {ADMIN} -m 700 /home/{ADMIN}/.ssh && "
                 f"install -o {ADMIN} -g {ADMIN} -m 600 /root/.ssh/authorized_keys /home/{ADMIN}/.ssh/", check=True)
        host.write(f"/etc/sudoers.d/{ADMIN}", f"{ADMIN} ALL=(ALL) NOPASSWD: ALL\n", 0o440)
        host.write("/etc/systemd/system/appliance.service.d/testhost.conf", SITE + "ReadWritePaths=-/run/fake\n")
        host.write("/usr/lib/tmpfiles.d/fake.conf", FAKE_CONTROL)
        host.poweroff()
        host.commit(name)
    yield name
    shutil.rmtree(base.LAYERS / name, ignore_errors=True)


@pytest.fixture(scope="session")
def releases(needed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each release with the fake worker, the default model and Debian's package that nodes lack."""
    if not list(DEBS.glob("appliance-worker_*.deb")):
        pytest.skip(f"there are no packages in {DEBS}: make deb")
    folder = tmp_path_factory.mktemp("releases")
    for version in (ONE, TWO):
        stand_in(DEBS, folder / version, version=version)
        for deb in (*DEBS.glob("appliance-model-smollm2_*.deb"), *needed.glob("python3-sdnotify_*.deb")):
            shutil.copy(deb, folder / version)  # no link: a build at the same time writes into the file
    return folder


@pytest.fixture(scope="session")
def published(releases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An apt repository of release ONE, as a node sees it below /srv/repository. Release TWO is added by a test."""
    folder = tmp_path_factory.mktemp("apt")
    return repository([releases / ONE], folder, keys=folder / "keys")


@pytest.fixture(scope="session")
def make_host(layer: str) -> Callable[..., Host]:
    def make(*, binds: tuple[tuple[str, str], ...] = (), layers: tuple[str, ...] = (), **options: object) -> Host:
        return Host(f"c-{uuid4().hex[:8]}", layers=[*layers, layer], binds=list(binds), **options)

    return make


# ---- fleets: what a module says of its nodes are its fixtures `published`, `variables` and, where there are not three, `names`


@pytest.fixture(scope="session")
def stand_ins(releases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository: ONE and TWO work, the worker of DIES does not start. All have the fake worker."""
    folder = tmp_path_factory.mktemp("stand-ins")
    stand_in(DEBS, folder / DIES, version=DIES, fake="crash")
    return repository([releases / ONE, releases / TWO, folder / DIES], folder / "apt", keys=folder / "keys")


@pytest.fixture(scope="session")
def served_releases(needed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with real vLLM: ONE is the built release, TWO that with another number."""
    if not list(DEBS.glob("appliance-worker_*.deb")):
        pytest.skip(f"there are no packages in {DEBS}: make deb")
    if kept := os.environ.get("APPLIANCE_FLEET_APT"):  # of a run before, to save minutes
        return Path(kept)
    folder = tmp_path_factory.mktemp("served")
    debs = folder / ONE
    debs.mkdir()
    for deb in (*DEBS.glob("appliance*.deb"), *needed.glob("python3-sdnotify_*.deb")):
        shutil.copy(deb, debs)  # no link: a build at the same time writes into the file
    release(debs, folder / TWO, version=TWO)
    release(debs, folder / DIES, version=DIES, fault="worker-dies")
    for version in (TWO, DIES):
        next((folder / version).glob("appliance-model-smollm2_*.deb")).unlink()
    return repository([debs, folder / TWO, folder / DIES], folder / "apt", keys=folder / "keys")


@pytest.fixture(scope="session")
def served_variables(served_releases: Path) -> dict[str, Any]:
    """Of nodes with real vLLM, which a gateway may reach."""
    return {**fleet.sources(served_releases), **fleet.SERVED}


@pytest.fixture(scope="session")
def served_layer(served_releases: Path, served_variables: dict[str, Any], make_host: Callable[..., Host],
                 tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fleet.installed(tmp_path_factory.mktemp("first"), make_host, served_releases, served_variables, appliance_version=ONE) as made:
        yield made


@pytest.fixture(scope="module")
def names() -> tuple[str, ...]:
    return ("web1", "web2", "web3")


@pytest.fixture(scope="module")
def serving(published: Path, variables: dict[str, Any], make_host: Callable[..., Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The layer of a node with release ONE."""
    with fleet.installed(tmp_path_factory.mktemp("first"), make_host, published, variables, appliance_version=ONE) as made:
        yield made


@pytest.fixture
def nodes(names: tuple[str, ...], serving: str, published: Path, variables: dict[str, Any], make_host: Callable[..., Host],
          tmp_path: Path) -> Iterator[fleet.Fleet]:
    """A fleet of one test's own."""
    with fleet.fleet(tmp_path, names, serving, make_host, published, variables) as found:
        yield found


@pytest.fixture(scope="session")
def haproxy(needed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package source of a gateway host."""
    folder = tmp_path_factory.mktemp("haproxy")
    if reason := balanced.packages(folder):
        pytest.skip(reason)
    return folder


def embedded() -> Path:
    """The default model's file."""
    said = subprocess.run([ROOT / ".venv/bin/python", ROOT / "packaging/embedded_path.py"], capture_output=True, text=True, check=True).stdout
    (gguf,) = Path(said.strip()).parent.glob("*.gguf")
    return gguf
