"""Upgrades with real vLLM and the default model on one booted host: under load, broken, slow, interrupted, back, off.

One story, played once by the fixture `story`; each test looks at what was seen of one part of it. The facts go to
build/system/upgrades.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from tests.packages.conftest import ROOT
from tests.packages.node import ALL
from tests.packages.releases import DEBS, release
from tests.packages.upgrading import TREES, Upgraded
from tests.system.installation import REAL_SETTINGS
from tests.system.testhost.host import Host

ONE, TWO, DIES, SLOW, CUT = (f"0.1.{number}~deb12" for number in range(5))
FAULTS = {ONE: None, TWO: None, DIES: "worker-dies", SLOW: "worker-slow", CUT: None}
READY_S = 300.0
SETTINGS = REAL_SETTINGS.replace("trial_s: 20", "trial_s: 40") + "probe_s: 4\n"
"""A speed is measured by three probes, and must be known before twice the trial's time."""
SPARED = ("/etc/systemd/system/appliance.service.d", "/srv/")
"""Files of the test, not of the packages."""


@dataclass(kw_only=True)
class Part:
    """What was seen of one part of the story. `before`, `meanwhile`, `serving`: worker versions before it, in its middle
    and after it; `codes`: a client's HTTP statuses."""

    before: str = ""
    meanwhile: str = ""
    serving: str = ""
    versions: list[str] = field(default_factory=list)
    paris: bool = False
    verified: str = ""
    sentence: str = ""
    apt_s: float = 0.0
    ended_s: float = 0.0
    gap_s: float = 0.0
    codes: dict[int, int] = field(default_factory=dict)
    lost: int = 0
    used_mb: int = 0
    both_mb: int = 0


@dataclass(kw_only=True)
class Story:
    first: Part = field(default_factory=Part)
    under_load: Part = field(default_factory=Part)
    dies: Part = field(default_factory=Part)
    slow: Part = field(default_factory=Part)
    power_cut: Part = field(default_factory=Part)
    back: Part = field(default_factory=Part)
    removed: dict[str, object] = field(default_factory=dict)
    purged: dict[str, object] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(bare: str, tmp_path_factory: pytest.TempPathFactory) -> Story:
    if not list(DEBS.glob("appliance-worker_*.deb")):
        pytest.skip(f"there are no packages in {DEBS}: make deb")
    folder = tmp_path_factory.mktemp("releases")
    told = Story()
    try:
        for version, fault in FAULTS.items():
            release(DEBS, folder / version, version=version, fault=fault)
        with Host(f"b-{uuid4().hex[:8]}", layers=[bare], binds=[(str(folder), "/srv/releases")], disk="14G") as host:
            host.run("rm -rf /var/lib/appliance", check=True)  # the fake worker's model
            play(Upgraded(host), told)
    finally:
        shutil.rmtree(folder)
        target: Path = ROOT / "build/system/upgrades.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(asdict(told), indent=1))
    return told


def play(node: Upgraded, told: Story) -> None:
    install(node, told.first)
    upgrade_under_load(node, told.under_load)
    upgrade_to_one_that_dies(node, told.dies)
    upgrade_to_a_slow_one(node, told.slow)
    cut_the_power_while_staging(node, told.power_cut)
    go_back(node, told.back)
    remove_and_purge(node, told)


def look(node: Upgraded, part: Part) -> None:
    part.serving, part.versions, part.paris = node.serving(), node.trees(), node.answers_paris()
    part.verified, part.used_mb = node.verify(*ALL), used_mb(node)


def used_mb(node: Upgraded) -> int:
    return int(node.host.run(["df", "--output=used", "-m", "/"]).out.split()[-1])


def wait_speed(node: Upgraded) -> None:
    node.wait_for(lambda _: node.record()["good"]["id"] in node.record()["speeds"], 180, "its speed is measured")


def install(node: Upgraded, part: Part) -> None:
    node.first(ONE, SETTINGS)
    node.wait_kept(ONE, READY_S)
    wait_speed(node)
    look(node, part)


def upgrade_under_load(node: Upgraded, part: Part) -> None:
    part.before = node.serving()
    with node.client() as asked:
        time.sleep(3)
        began = time.monotonic()
        node.take(TWO)
        part.apt_s = round(time.monotonic() - began, 1)
        status = node.wait_for(lambda status: status.get("trial") and status.get("ready"), READY_S, "on trial")
        part.sentence = status["trial"]["sentence"]
        assert node.trees() == [ONE, TWO]
        part.both_mb = used_mb(node)
        node.wait_kept(TWO, READY_S)
        part.ended_s = round(time.monotonic() - began, 1)
    part.gap_s, part.codes, part.lost = round(asked.gap_s, 1), asked.codes, asked.lost
    look(node, part)


def upgrade_to_one_that_dies(node: Upgraded, part: Part) -> None:
    wait_speed(node)
    part.before = node.serving()
    with node.client() as asked:
        time.sleep(2)
        node.take(DIES)
        began = time.monotonic()
        part.sentence = node.wait_rolled_back(READY_S)
        part.ended_s = round(time.monotonic() - began, 1)
        time.sleep(2)
    part.gap_s, part.codes, part.lost = round(asked.gap_s, 1), asked.codes, asked.lost
    look(node, part)


def upgrade_to_a_slow_one(node: Upgraded, part: Part) -> None:
    part.before = node.serving()
    node.write_settings(SETTINGS + "tune: {upgrade_rollback: true}\n")
    node.take(SLOW)
    began = time.monotonic()
    part.sentence = node.wait_rolled_back(READY_S)
    part.ended_s = round(time.monotonic() - began, 1)
    look(node, part)


def cut_the_power_while_staging(node: Upgraded, part: Part) -> None:
    part.before = node.serving()
    node.host.run(f"dpkg --unpack /srv/releases/{CUT}/*.deb", timeout_s=300, check=True)
    running = node.host.popen(["dpkg", "--configure", "-a"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not node.file(f"{TREES}/.new/lib").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    node.host.powercut()
    running.wait()
    node.host.boot(wait=False)  # systemd has started when the service is ready
    node.wait_ready(READY_S)
    part.meanwhile = node.serving()  # before anybody mends anything
    done = node.host.run(["dpkg", "--configure", "-a"], timeout_s=300)
    assert done.rc == 0, done.err
    node.wait_kept(CUT, READY_S)
    look(node, part)


def go_back(node: Upgraded, part: Part) -> None:
    part.before = node.serving()
    node.take(ONE)
    node.wait_kept(ONE, READY_S)
    look(node, part)


def remove_and_purge(node: Upgraded, told: Story) -> None:
    objects = "ls /var/lib/appliance/store/objects"
    told.removed["models before"] = node.host.run(objects).out
    node.apt("remove", *ALL).ok()
    told.removed |= {"processes": node.processes(), "programs": node.file("/usr/lib/appliance").exists(), "models": node.host.run(objects).out}
    node.apt("purge", *ALL).ok()
    left = [path for path in node.files() if "appliance" in path and not path.startswith(SPARED)]
    told.purged |= {"files": left, "used MB": used_mb(node)}


def test_the_first_release_serves(story: Story) -> None:
    assert (story.first.serving, story.first.versions, story.first.paris) == (ONE, [ONE], True)


def test_upgraded_under_load_the_gap_is_bounded_and_nothing_accepted_is_lost(story: Story) -> None:
    part = story.under_load
    assert f"worker: {ONE} -> {TWO}" in part.sentence
    assert (part.serving, part.versions, part.verified) == (TWO, [TWO], "")
    assert part.codes[200] > 0
    assert part.lost == 0, part
    assert part.gap_s < 90, part
    assert part.used_mb < story.first.used_mb + 50  # of two versions one is left


def test_a_worker_that_dies_is_rolled_back(story: Story) -> None:
    part = story.dies
    assert f"worker: {part.before} -> {DIES}" in part.sentence
    assert (part.serving, part.versions, part.paris) == (part.before, [part.before, DIES], True)
    assert part.lost == 0, part


def test_a_slow_worker_is_rolled_back_where_that_is_configured(story: Story) -> None:
    part = story.slow
    assert "% slower, 10 % are allowed" in part.sentence
    assert (part.serving, part.versions) == (part.before, [part.before, SLOW])


def test_power_is_cut_while_the_folder_of_the_next_version_is_made(story: Story) -> None:
    part = story.power_cut
    assert part.meanwhile == part.before != CUT
    assert (part.serving, part.versions, part.verified) == (CUT, [CUT], "")


def test_back_to_the_first_release(story: Story) -> None:
    assert (story.back.before, story.back.serving, story.back.paris) == (CUT, ONE, True)


def test_removed_its_data_stay_and_purged_nothing_stays(story: Story) -> None:
    removed = story.removed
    assert (removed["processes"], removed["programs"]) == ([], False)
    assert removed["models"] == removed["models before"] != ""
    assert story.purged["files"] == []
    assert int(str(story.purged["used MB"])) < story.first.used_mb - 1000
