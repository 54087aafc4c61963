"""Upgrades of the packages on booted hosts: the new worker on trial beside the old one, kept, rolled back, interrupted.

The worker's files are those of the fake worker (`releases.stand_in`); packages, scripts, units, agent and dpkg are the real
ones. test_served_upgrade.py does the same with real vLLM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from tests.packages.conftest import NEEDED, ROOT
from tests.packages.node import SITE
from tests.packages.releases import repository, stand_in
from tests.packages.upgrading import TREES, Upgraded
from tests.system.installation import FAKE_CONTROL, FAKE_SETTINGS, put_tiny_model
from tests.system.testhost import base
from tests.system.testhost.host import Host, sweep

DEBS = Path(os.environ.get("APPLIANCE_DEBS", ROOT / "build/deb"))
ONE, TWO, THREE = "0.1.0~deb12", "0.1.1~deb12", "0.1.2~deb12"
FILLER_MB = 200


def packages_of_debian(names: list[str], folder: Path) -> None:
    """Fetch packages with what they need beyond the hosts' base, by this machine's apt."""
    base.make_base()
    options = [f"Dir::State::status={base.BASE}/var/lib/dpkg/status", f"Dir::Cache::archives={folder}", "Debug::NoLocking=1"]
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", *(f"-o{option}" for option in options), "-y", "-q", "--no-install-recommends", "--download-only", "install", *names],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine's apt cannot fetch {' '.join(names)}: {done.stderr.strip()[-300:]}")


def make_layer(name: str, folder: Path) -> str:
    """A node before the installation: Debian's packages of the folder, settings and model of the fake worker."""
    store = folder.parent / f"{name}-store"
    put_tiny_model(store)
    with Host(f"b-prepare-{uuid4().hex[:6]}") as host:
        host.push(folder, "/root/needed")
        host.run("dpkg -i /root/needed/*.deb && rm -r /root/needed /etc/apt/sources.list* /etc/apt/sources.list.d/* 2>/dev/null; true")
        assert host.run(["dpkg", "--audit"]).out == ""
        host.write("/etc/systemd/system/appliance.service.d/testhost.conf", SITE + "ReadWritePaths=-/run/fake\n")
        host.write("/usr/lib/tmpfiles.d/fake.conf", FAKE_CONTROL)
        host.push(store, "/var/lib/appliance/store")
        host.poweroff()
        host.commit(name)
    return name


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


@pytest.fixture
def node(make: Callable[..., Upgraded]) -> Upgraded:
    return make()


def add_release(releases: Path, version: str, **how: object) -> str:
    if not (releases / version).exists():
        stand_in(DEBS, releases / version, version=version, **how)  # type: ignore[arg-type]
    return version


def test_the_packages_interpreter_is_found_from_every_folder() -> None:
    """debhelper makes links relative, which would be right in the pool and wrong in a version's folder."""
    if not (built := list(DEBS.glob("appliance-worker_*.deb"))):
        pytest.skip(f"there are no packages in {DEBS}: make deb")
    listed = subprocess.run(["dpkg-deb", "-c", built[0]], capture_output=True, text=True, check=True).stdout
    assert "./usr/lib/appliance/pool/bin/python -> /usr/bin/python3." in listed


# ---- on trial --------------------------------------------------------------------------------------------------------


def test_the_new_worker_is_on_trial_and_then_the_old_one_goes(node: Upgraded) -> None:
    assert node.serving() == ONE
    with node.client() as asked:
        time.sleep(1)
        node.take(TWO)
        on_trial = node.wait_for(lambda status: status.get("trial") and status.get("ready"), 60, "on trial")
        assert node.trees() == [ONE, TWO]
        assert node.serving() == TWO
        node.wait_kept(TWO)
        time.sleep(1)
    assert f"worker: {ONE} -> {TWO}" in on_trial["trial"]["sentence"]
    assert node.history()[-2:] == ["trial", "kept"]
    assert node.verify("appliance", "appliance-worker") == ""
    assert asked.lost == 0, asked
    assert asked.gap_s < 20, asked


BROKEN = {
    "dies while loading": "crash",
    "an illegal instruction": "load-ill",
    "nothing runs with it": "ok; exit 1; :",
}


@pytest.mark.parametrize("fake", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_new_worker_is_rolled_back_and_the_next_release_is_tried(make: Callable[..., Upgraded], releases: Path, fake: str) -> None:
    node = make()
    broken = add_release(releases, f"0.1.1+{list(BROKEN.values()).index(fake)}~deb12", fake=fake)
    node.take(broken)
    sentence = node.wait_rolled_back()
    assert f"worker: {ONE} -> {broken}" in sentence
    assert node.answers()
    assert node.serving() == ONE
    assert node.trees() == [ONE, broken]
    assert node.target() == broken
    assert "rolled-back" in node.history()
    node.host.reboot()  # and it is not tried again
    node.wait_ready()
    assert node.serving() == ONE
    node.take(add_release(releases, THREE))
    node.wait_kept(THREE)
    assert node.status()["rolled_back"] is None


def test_case_064_a_worker_for_another_python_is_rolled_back_and_named(make: Callable[..., Upgraded], releases: Path) -> None:
    """Forced onto a node whose Python it does not fit: the agent goes on with the worker that fits."""
    node = make()
    other = add_release(releases, "0.1.1+python~deb12", interpreter="/usr/bin/python3.12")
    node.take(other)
    sentence = node.wait_rolled_back()
    assert "the node's interpreter changed" in sentence
    assert "/usr/bin/python3.12" in sentence
    assert node.serving() == ONE


def test_an_upgrade_before_the_first_trial_is_over_can_be_rolled_back_too(make: Callable[..., Upgraded], releases: Path) -> None:
    node = make(fresh=True)
    node.first(ONE, FAKE_SETTINGS.replace("trial_s: 5", "trial_s: 600"))
    node.wait_ready()
    assert node.status()["trial"]
    node.take(add_release(releases, "0.1.1+0~deb12", fake="crash"))
    node.wait_rolled_back()
    assert node.serving() == ONE


def test_a_slower_worker_is_named_and_where_it_is_configured_rolled_back(make: Callable[..., Upgraded], releases: Path) -> None:
    node = make()
    node.wait_for(lambda _: node.record()["speeds"], 60, "its speed is measured")
    slow = add_release(releases, "0.1.1+slow~deb12", fake="ok FAKE_TOKEN_S=0.02")
    slower = add_release(releases, "0.1.1+slower~deb12", fake="ok FAKE_TOKEN_S=0.2")
    node.take(slow)
    node.wait_kept(slow)
    kept = node.record()["history"][-1]["sentence"]
    assert "% slower, 10 % are allowed" in kept
    node.write_settings(FAKE_SETTINGS + "tune: {upgrade_rollback: true}\n")
    node.take(slower)
    assert "% slower, 10 % are allowed" in node.wait_rolled_back()
    assert node.serving() == slow


def test_a_power_cut_does_not_end_a_trial(make: Callable[..., Upgraded], releases: Path) -> None:
    node = make()
    node.write_settings(FAKE_SETTINGS.replace("trial_s: 5", "trial_s: 15"))
    node.take(TWO)
    since = node.wait_for(lambda status: status.get("trial") and status.get("ready"), 60, "on trial")["trial"]["since"]
    node.host.powercut()
    node.host.boot()
    again = node.wait_ready()
    assert again["trial"]["since"] == since
    assert node.trees() == [ONE, TWO]
    node.wait_kept(TWO)


# ---- what an upgrade leaves as it is ---------------------------------------------------------------------------------


def test_case_067_upgraded_unattended_with_edited_settings(node: Upgraded) -> None:
    """No terminal; an unknown key of another release is a warning, new keys have their defaults."""
    text = FAKE_SETTINGS + "# mine\nan_older_key: 1\n"
    node.write_settings(text)
    node.take(TWO)
    node.wait_kept(TWO)
    assert node.file("/etc/appliance/appliance.yaml").read_text() == text
    assert any("an_older_key" in warning for warning in node.status()["warnings"])


def test_case_066_upgraded_with_a_broken_configuration(node: Upgraded) -> None:
    node.write_settings("listen: [this is\n")
    node.take(TWO)
    node.wait_unit(["failed"], 60)
    assert "appliance.yaml" in node.reason()
    assert node.trees() == [ONE, TWO]
    node.write_settings(FAKE_SETTINGS)
    node.control("start", timeout_s=90)
    node.wait_kept(TWO)


def test_a_stopped_service_stays_stopped_and_keeps_what_it_may_go_back_to(make: Callable[..., Upgraded], releases: Path) -> None:
    node = make()
    node.host.run(["systemctl", "stop", "appliance"], check=True)
    node.take(TWO)
    node.take(add_release(releases, THREE))
    time.sleep(1)
    assert node.state() == "inactive"
    assert node.trees() == [ONE, THREE]  # TWO was never tried
    node.start()
    node.wait_kept(THREE)


def test_back_to_an_older_release(node: Upgraded) -> None:
    node.take(TWO)
    node.wait_kept(TWO)
    node.take(ONE)
    node.wait_kept(ONE)
    assert node.history()[-4:] == ["trial", "kept", "trial", "kept"]


def test_by_hand_nothing_is_gone_back_to_that_is_not_there(node: Upgraded) -> None:
    node.take(TWO)
    node.wait_kept(TWO)
    worker = node.leader()
    done = node.control("rollback")
    assert done.rc == 2
    assert ONE in done.err
    assert "apt install" in done.err
    assert (node.leader(), node.serving()) == (worker, TWO)


def test_installed_again_the_same_release_is_made_whole(make: Callable[..., Upgraded]) -> None:
    """A damaged file, a file too many: repaired without a trial. The worker's folder shares its files with the package."""
    node = make(fresh=True)  # a layer below would break the hard links
    node.first(ONE, FAKE_SETTINGS)
    node.wait_kept(ONE)
    damaged = f"{TREES}/{ONE}/fake_worker.py"
    node.host.run(f"echo damaged >>{damaged}; echo stray >{TREES}/{ONE}/stray", check=True)
    assert "fake_worker.py" in node.verify("appliance-worker")
    before = node.history()
    node.take(ONE, "--reinstall")
    assert node.verify("appliance-worker") == ""
    node.wait_ready()
    assert not node.file(damaged).read_text().endswith("damaged\n")
    assert not node.file(f"{TREES}/{ONE}/stray").exists()
    assert node.file(damaged).stat().st_ino == node.file("/usr/lib/appliance/pool/fake_worker.py").stat().st_ino
    assert [event for event in node.history()[len(before):] if event in ("trial", "kept")] == []


def test_a_folder_of_make_install_is_used_and_named(make: Callable[..., Upgraded]) -> None:
    node = make(fresh=True)
    node.host.run("mkdir -p /usr/lib/appliance/worker/bin && echo mine >/usr/lib/appliance/worker/bin/python", check=True)
    done = node.take(ONE)
    assert node.trees() == [ONE]
    assert "is a folder that no package has put there" in done.err + done.out
    assert node.file("/usr/lib/appliance/worker/bin/python").read_text() == "mine\n"
    node.host.run("rm -r /usr/lib/appliance/worker", check=True)
    node.first(ONE, FAKE_SETTINGS)  # configures nothing anew: the package is installed
    assert node.wait_unit(["failed"], 30) == "failed"
    node.take(ONE, "--reinstall")
    node.wait_kept(ONE)


def test_without_hard_links_there_are_copies(make: Callable[..., Upgraded]) -> None:
    node = make(fresh=True, volumes=[(TREES, "64M")])
    node.first(ONE, FAKE_SETTINGS)
    node.wait_kept(ONE)
    node.take(TWO)
    node.wait_kept(TWO)
    node.take(TWO, "--reinstall")
    node.wait_ready()
    assert node.trees() == [TWO]


# ---- interrupted -----------------------------------------------------------------------------------------------------


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
    mend(node)
    node.wait_kept(large)
    assert node.verify("appliance", "appliance-worker") == ""


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
