"""Upgrades that nobody watches: unattended-upgrades takes our origin, needrestart leaves the service alone, a purge leaves
the disk as it was. With the fake worker's files in real packages, as test_upgrade.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.packages.layers import NEEDED, make_layer, packages_of_debian
from tests.packages.releases import ONE, TWO
from tests.packages.releases import repository as make_repository
from tests.packages.upgrading import Upgraded
from tests.system.installation import FAKE_SETTINGS
from tests.system.service import UNIT
from tests.system.testhost import base
from tests.system.testhost.host import Host, sweep

ORIGIN = 'Unattended-Upgrade::Origins-Pattern { "origin=appliance,codename=${distro_codename}"; };\n'
SOURCE = """Types: deb
URIs: file:/srv/repository/aptly/public
Suites: bookworm
Components: main
Signed-By: /srv/repository/aptly/public/appliance.asc
"""


@pytest.fixture(scope="module")
def attended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A host with unattended-upgrades and needrestart."""
    if reason := base.missing():
        pytest.skip(reason)
    sweep()
    folder = tmp_path_factory.mktemp("needed")
    packages_of_debian([*NEEDED, "unattended-upgrades", "needrestart"], folder)
    yield make_layer(name := f"unattended-{os.getpid()}", folder)
    shutil.rmtree(base.LAYERS / name, ignore_errors=True)


@pytest.fixture
def node(attended: str, releases: Path, tmp_path: Path) -> Iterator[Upgraded]:
    """It knows a repository that holds release ONE."""
    make_repository([releases / ONE], tmp_path / "apt", keys=tmp_path / "keys")
    binds = [(str(tmp_path / "apt"), "/srv/repository"), (str(releases), "/srv/releases")]
    with Host(f"b-{uuid4().hex[:8]}", layers=[attended], binds=binds) as host:
        host.write("/etc/apt/sources.list.d/appliance.sources", SOURCE)
        yield Upgraded(host)


def test_unattended_upgrades_takes_the_next_release(node: Upgraded, releases: Path, tmp_path: Path) -> None:
    node.apt("update").ok()
    node.apt("install", "--no-install-recommends", "appliance", "appliance-worker").ok()
    node.first(ONE, FAKE_SETTINGS)
    node.wait_kept(ONE)
    node.host.write("/etc/apt/apt.conf.d/52appliance", ORIGIN)
    make_repository([releases / TWO], tmp_path / "apt", keys=tmp_path / "keys")
    node.apt("update").ok()
    done = node.host.run(["unattended-upgrade", "-v"], timeout_s=300)
    assert done.rc == 0, done.out + done.err
    shown = node.host.run(["dpkg-query", "-W", "-f", "${Version} ${Status}\n", "appliance", "appliance-worker"]).out
    assert shown == f"{TWO} install ok installed\n" * 2, done.out + done.err
    node.wait_kept(TWO)
    assert node.answers()
    assert node.file("/etc/appliance/appliance.yaml").read_text() == FAKE_SETTINGS


def test_needrestart_names_the_service_and_does_not_restart_it(node: Upgraded) -> None:
    node.first(ONE, FAKE_SETTINGS)
    node.wait_kept(ONE)
    quiet = node.host.run(["needrestart", "-b", "-l"]).out
    assert UNIT not in quiet, quiet
    node.take(TWO)
    node.wait_for(lambda status: status.get("trial") and status.get("ready"), 60, "on trial")
    quiet = node.host.run(["needrestart", "-b", "-l"]).out
    assert UNIT not in quiet, quiet  # both workers are whole on the disk
    node.wait_kept(TWO)
    worker, agent = node.leader(), node.agent()
    library = node.host.run(f"grep -oE '/\\S+libyaml\\S+' /proc/{agent}/maps | head -n 1").out.strip()
    node.host.run(f"cp {library} {library}.new && mv {library}.new {library}", check=True)
    named = node.host.run(["needrestart", "-b", "-l"]).out
    assert UNIT in named, named
    node.host.run(["needrestart", "-b", "-l", "-r", "a"])
    assert (node.leader(), node.agent()) == (worker, agent)


def test_a_purge_leaves_the_disk_as_it_was(node: Upgraded) -> None:
    node.host.run("rm -r /var/lib/appliance", check=True)  # the layer's model
    before = node.files()
    services = node.host.run("systemctl list-unit-files --no-legend | sort").out
    node.take(ONE)
    node.first(ONE, FAKE_SETTINGS)
    node.wait_unit(["failed"], 60)  # no model
    node.take(TWO)
    assert node.host.run(["systemctl", "is-enabled", "appliance-old-workers.path"]).out == "enabled\n"
    node.apt("purge", "appliance", "appliance-worker").ok()
    after = node.files()
    assert before.keys() - after.keys() == set()
    assert {path for path in after.keys() - before.keys() if "appliance" in path} == set()
    assert node.host.run("systemctl list-unit-files --no-legend | sort").out == services
    assert node.processes() == []
    assert "appliance" not in node.host.run("systemctl list-units --all --no-legend").out
