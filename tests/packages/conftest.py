"""Debian 12 hosts that see the built apt repository and nothing else of the world."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.packages.layers import NEEDED, make_layer, packages_of_debian
from tests.packages.node import SITE, Node
from tests.packages.releases import DEBS, ONE, TWO, stand_in
from tests.packages.upgrading import Upgraded
from tests.system.installation import FAKE_SETTINGS
from tests.system.testhost import base
from tests.system.testhost.host import Host, sweep

ROOT = Path(__file__).parents[2]
REPOSITORY = Path(os.environ.get("APPLIANCE_APT", ROOT / "build/apt")) / "aptly/public"
SOURCE = """Types: deb
URIs: file:/srv/repository
Suites: bookworm
Components: main
Signed-By: /etc/apt/keyrings/appliance.asc
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def repository() -> Path:
    if not (REPOSITORY / "dists").is_dir():
        pytest.skip(f"there is no repository in {REPOSITORY}: make apt-repo")
    return REPOSITORY


@pytest.fixture(scope="session")
def layer(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node before the installation: dependencies that any mirror has, our source and key, no other source."""
    if reason := base.missing():
        pytest.skip(reason)
    sweep()
    debs = tmp_path_factory.mktemp("needed")
    fetched = subprocess.run(["apt-get", "download", "-q", *NEEDED], cwd=debs, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"this machine's apt cannot fetch {' '.join(NEEDED)}: {fetched.stderr.strip()[-200:]}")
    name = f"packages-{os.getpid()}"
    with Host(f"prepare-{uuid4().hex[:6]}") as host:
        host.push(debs, "/root/needed")
        host.run("dpkg -i /root/needed/*.deb && rm -r /root/needed /etc/apt/sources.list* /etc/apt/sources.list.d/* 2>/dev/null; true")
        host.run(["dpkg", "--verify", *NEEDED], check=True)
        host.write("/etc/apt/keyrings/appliance.asc", (repository / "appliance.asc").read_text())
        host.write("/etc/apt/sources.list.d/appliance.sources", SOURCE)
        host.write("/etc/systemd/system/appliance.service.d/testhost.conf", SITE)
        host.poweroff()
        host.commit(name)
    yield name
    shutil.rmtree(base.LAYERS / name, ignore_errors=True)


@pytest.fixture(scope="session")
def make_node(layer: str, repository: Path) -> Callable[..., Any]:
    def make(**options: Any) -> Host:
        return Host(f"t-{uuid4().hex[:8]}", layers=[layer], binds=[(str(repository), "/srv/repository")], **options)

    return make


@pytest.fixture
def node(make_node: Callable[..., Host]) -> Iterator[Node]:
    with make_node() as host:
        yield Node(host)


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each release: ONE and TWO work."""
    if not list(DEBS.glob("appliance-worker_*.deb")):
        pytest.skip(f"there are no packages in {DEBS}: make deb")
    folder = tmp_path_factory.mktemp("releases")
    for version in (ONE, TWO):
        stand_in(DEBS, folder / version, version=version)
    return folder


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if reason := base.missing():
        pytest.skip(reason)
    sweep()
    for layer in (*base.LAYERS.glob("upgrade-*"), *base.LAYERS.glob("unattended-*")):  # of a test run that was killed
        if not Path(f"/proc/{layer.name.rpartition('-')[2]}").exists():
            shutil.rmtree(layer)
    folder = tmp_path_factory.mktemp("needed")
    packages_of_debian(list(NEEDED), folder)
    yield make_layer(name := f"upgrade-{os.getpid()}", folder)
    shutil.rmtree(base.LAYERS / name, ignore_errors=True)


@pytest.fixture(scope="session")
def installed(bare: str, releases: Path) -> Iterator[str]:
    """Release ONE serves and has been kept."""
    with Host(f"b-install-{uuid4().hex[:6]}", layers=[bare], binds=[(str(releases), "/srv/releases")]) as host:
        node = Upgraded(host)
        node.first(ONE, FAKE_SETTINGS)
        node.wait_kept(ONE)
        host.poweroff()
        host.commit(name := f"upgrade-one-{os.getpid()}")
    yield name
    shutil.rmtree(base.LAYERS / name, ignore_errors=True)


@pytest.fixture
def make(bare: str, installed: str, releases: Path) -> Iterator[Callable[..., Upgraded]]:
    """A host on which release ONE serves, or one before any installation."""
    with contextlib.ExitStack() as hosts:
        def make(*, fresh: bool = False, more_binds: Sequence[tuple[str, str]] = (), **options: object) -> Upgraded:
            layers = [bare] if fresh else [installed, bare]
            host = Host(f"b-{uuid4().hex[:8]}", layers=layers, binds=[(str(releases), "/srv/releases"), *more_binds], **options)
            node = Upgraded(hosts.enter_context(host))
            if not fresh:
                node.wait_ready()
            return node

        yield make
