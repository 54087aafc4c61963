"""Debian 12 hosts that see the built apt repository and nothing else of the world."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.packages.node import SITE, Node
from tests.system.testhost import base
from tests.system.testhost.host import Host, sweep

ROOT = Path(__file__).parents[2]
REPOSITORY = Path(os.environ.get("APPLIANCE_APT", ROOT / "build/apt")) / "aptly/public"
NEEDED = ("python3-sdnotify",)
"""Dependencies that the test hosts' base does not have; fetched once by this machine's apt."""
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
