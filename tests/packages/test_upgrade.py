"""Upgrades of the packages on booted hosts: the new worker on trial beside the old one, kept, rolled back.

The worker's files are those of the fake worker (`releases.stand_in`); packages, scripts, units, agent and dpkg are the real
ones. test_interrupted.py ends them in the middle, test_served_upgrade.py does the same with real vLLM.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packages.releases import DEBS, ONE, THREE, TWO, add_release
from tests.packages.upgrading import TREES, Upgraded
from tests.system.installation import FAKE_SETTINGS
from tests.system.service import UNIT


@pytest.fixture
def node(make: Callable[..., Upgraded]) -> Upgraded:
    return make()


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


IN_THE_WAY = {
    "a folder where the next link is made": "mkdir -p /usr/lib/appliance/worker.new/theirs",
    "half of a version": f"mkdir -p {TREES}/.new/bin/python",
    "a file with the version's name": f"echo theirs >{TREES}/{TWO}",
    "a link with the version's name": f"mkdir /srv/theirs && ln -s /srv/theirs {TREES}/{TWO}",
    "a file in a folder's place": f"mkdir {TREES}/{TWO} && echo theirs >{TREES}/{TWO}/lib",
    "a folder in a file's place": f"mkdir -p {TREES}/{TWO}/fake_worker.py/theirs",
    "an older version that could not be removed": f"mkdir -p {TREES}/.going-{TWO}/bin {TREES}/{TWO}/fake_worker.py/theirs",
}


@pytest.mark.parametrize("made", IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_what_lies_in_the_way_of_the_next_version_is_replaced(node: Upgraded, made: str) -> None:
    """The folders are the package's own; what a link leads to is not."""
    node.host.run(made, check=True)
    node.take(TWO)
    node.wait_kept(TWO)
    assert node.verify("appliance-worker") == ""
    assert node.host.run("ls -A /srv/theirs 2>/dev/null").out == ""
    assert sorted(node.host.run("ls -A /usr/lib/appliance").out.split()) == ["agent", "pool", "worker", "workers"]
    assert sorted(node.host.run(f"ls -A {TREES}").out.split()) == [".lock", TWO]


@pytest.mark.parametrize(("made", "place"), [
    (f"echo theirs >{TREES}", TREES), (f"ln -s /srv/nowhere {TREES}", TREES), (f"mkdir -p {TREES}/.lock", f"{TREES}/.lock"),
    (f"mkdir {TREES} && mkfifo {TREES}/.lock", f"{TREES}/.lock"),
], ids=["a file for the versions' folder", "a link to nothing", "a folder for the lock", "a pipe for the lock"])
def test_what_a_package_may_not_remove_is_named_and_the_installation_can_be_finished(
    make: Callable[..., Upgraded], made: str, place: str,
) -> None:
    node = make(fresh=True)
    node.host.run(f"mkdir -p /usr/lib/appliance && {made}", check=True)
    done = node.host.run(f"apt-get -y -q install /srv/releases/{ONE}/*.deb", timeout_s=300)
    assert done.rc != 0
    assert f"appliance-worker: {place} is in the way; move it elsewhere, then run: dpkg --configure -a" in done.err + done.out
    node.host.run(f"mv {place} /srv/theirs && dpkg --configure -a", check=True)
    node.first(ONE, FAKE_SETTINGS)
    node.wait_kept(ONE)


def test_upgraded_while_it_is_masked_it_runs_on_and_apt_says_so(node: Upgraded) -> None:
    worker = node.leader()
    node.host.run(["systemctl", "mask", UNIT], check=True)
    done = node.take(TWO)
    assert "the service is masked and goes on as it was started" in done.out + done.err
    assert "Failed" not in done.err, done.err
    assert (node.leader(), node.serving(), node.trees()) == (worker, ONE, [ONE, TWO])
    node.host.run(["systemctl", "unmask", UNIT], check=True)
    node.host.run(["systemctl", "restart", UNIT], check=True)
    node.wait_kept(TWO)


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
    done = node.apt("purge", "appliance", "appliance-worker")  # a mount of its own cannot be removed
    assert done.rc == 0, done.err
    assert "not all of" in done.err + done.out
    assert node.host.run(f"ls -A {TREES}").out.split() in ([], ["lost+found"])
