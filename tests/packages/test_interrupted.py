"""Upgrades of the packages that end in the middle: dpkg killed, power cut, the disk full. The service goes on, and apt mends it.

With the fake worker's files in real packages, as test_upgrade.py.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packages.releases import ONE, TWO, add_release, repository
from tests.packages.upgrading import TREES, Upgraded

FILLER_MB = 200


@pytest.fixture
def node(make: Callable[..., Upgraded]) -> Upgraded:
    return make()


def dpkg(node: Upgraded, words: str) -> subprocess.Popen[str]:
    return node.host.popen(f"exec dpkg --force-unsafe-io {words}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_path(node: Upgraded, path: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not node.file(path).exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


@pytest.fixture(scope="session")
def large(releases: Path) -> str:
    return add_release(releases, "0.1.1+large~deb12", filler_mb=FILLER_MB)


@pytest.fixture(scope="session")
def archive(releases: Path, large: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with ONE and the large release, by which apt mends what was interrupted."""
    folder = tmp_path_factory.mktemp("archive")
    repository([releases / ONE, releases / large], folder, keys=folder / "keys")
    return folder / "aptly/public"


def mend(node: Upgraded) -> None:
    """What an operator does. `-f install` alone leaves a package as it is that was interrupted while it was unpacked."""
    node.host.run("dpkg --configure -a", timeout_s=300)
    node.host.write("/etc/apt/sources.list", "deb [trusted=yes] file:/srv/archive bookworm main\n")
    node.apt("update").ok()
    for words in (("-f", "install"), ("dist-upgrade",)):
        done = node.apt(*words)
        assert done.rc == 0, done.out[-2000:] + done.err[-2000:]
    assert node.host.run(["dpkg", "--audit"]).out == ""


@pytest.mark.parametrize("end", ["killed", "power cut"])
@pytest.mark.parametrize("place", ["unpacking", "configuring"])
def test_an_interrupted_upgrade_harms_nothing_and_can_be_finished(
    make: Callable[..., Upgraded], archive: Path, large: str, place: str, end: str,
) -> None:
    node = make(more_binds=[(str(archive), "/srv/archive")])
    worker = node.leader()
    started = []
    if place == "unpacking":
        started.append(dpkg(node, f"-i /srv/releases/{large}/*.deb"))
        wait_path(node, "/usr/lib/appliance/pool/filler/9.dpkg-new")
    else:
        # The folder of the new version is half made when it ends: its script waits for a lock that somebody else holds.
        node.host.run(f"dpkg --unpack /srv/releases/{large}/*.deb", check=True)
        started.append(node.host.popen(["flock", f"{TREES}/.lock", "sleep", "600"]))
        time.sleep(0.3)
        started.append(dpkg(node, "--configure -a"))
        time.sleep(1)
        node.host.run(f"mkdir -p {TREES}/.new/bin && echo half >{TREES}/.new/bin/python", check=True)
    assert [process.poll() for process in started] == [None] * len(started)
    if end == "killed":
        for process in reversed(started):
            node.host.kill_command(process)
        assert node.leader() == worker  # nothing has happened to the service
    else:
        node.host.powercut()
        node.host.boot()
        node.wait_ready(90)
    for process in started:
        process.communicate(timeout=20)
    assert node.answers()
    assert node.serving() == ONE
    assert node.target() == ONE
    node.host.run(["applianctl", "restart"], timeout_s=120, check=True)  # the agent of either release with the old worker
    node.wait_ready()
    if end == "killed":  # packages that came as files
        node.host.run(f"dpkg -i /srv/releases/{large}/*.deb", timeout_s=300, check=True)
    else:
        mend(node)
    node.wait_kept(large)
    assert node.verify("appliance", "appliance-worker") == ""
    assert node.host.run("dpkg --audit; find /usr/lib/appliance -name '*.dpkg-new'").out == ""


@pytest.mark.parametrize("words", ["-i", "--unpack"], ids=["upgraded alone", "unpacked, then interrupted"])
def test_packages_of_files_with_a_new_agent_apt_keeps_the_older_worker(node: Upgraded, words: str) -> None:
    """There is no repository to take the newer worker from: apt must not settle it by removing the older one."""
    node.host.run(f"dpkg {words} /srv/releases/{TWO}/appliance_*.deb", check=True)
    done = node.apt("-f", "install")
    assert done.rc == 0, done.out + done.err
    shown = node.host.run(["dpkg-query", "-W", "-f", "${Package} ${Version} ${Status}\n", "appliance", "appliance-worker"]).out
    assert shown == f"appliance {TWO} install ok installed\nappliance-worker {ONE} install ok installed\n"
    assert node.apt("check").rc == 0
    node.wait_ready()
    assert (node.answers(), node.serving()) == (True, ONE)
    node.take(TWO)
    node.wait_kept(TWO)


def test_a_full_disk_ends_the_upgrade_and_not_the_service(make: Callable[..., Upgraded], archive: Path, large: str) -> None:
    node = make(disk=f"{2 * FILLER_MB}M", more_binds=[(str(archive), "/srv/archive")])
    free = node.host.run(["df", "--output=avail", "-k", "/"]).out.split()[-1]
    node.host.run(f"fallocate -l {int(free) - (100 << 10)}K /root/filler", check=True)
    worker = node.leader()
    done = node.host.run(f"apt-get -y -q install /srv/releases/{large}/*.deb", timeout_s=300)
    assert done.rc != 0
    assert node.answers()
    assert (node.leader(), node.serving(), node.target()) == (worker, ONE, ONE)
    node.host.run(["rm", "/root/filler"], check=True)
    mend(node)
    node.wait_ready()
    assert node.answers()
    assert node.verify("appliance", "appliance-worker") == ""
