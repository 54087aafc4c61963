"""Upgrades with real vLLM and the default model on one booted host: under load, broken, slow, interrupted, back, off.

The order counts. Figures go to build/system/upgrades.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.packages.conftest import ROOT
from tests.packages.node import ALL
from tests.packages.releases import release
from tests.packages.test_upgrade import DEBS, bare  # noqa: F401 (a fixture)
from tests.packages.upgrading import TREES, Asked, Upgraded
from tests.system.installation import REAL_SETTINGS
from tests.system.testhost.host import Host

ONE, TWO, DIES, SLOW, CUT = (f"0.1.{number}~deb12" for number in range(5))
READY_S = 300.0
SETTINGS = REAL_SETTINGS.replace("trial_s: 20", "trial_s: 40") + "probe_s: 4\n"
"""A speed is measured by three probes, and must be known before twice the trial's time."""
FIGURES: dict[str, object] = {}


@pytest.fixture(scope="module")
def served(bare: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:  # noqa: F811
    if not list(DEBS.glob("appliance-worker_*.deb")):
        pytest.skip(f"there are no packages in {DEBS}: make deb")
    folder = tmp_path_factory.mktemp("releases")
    for version, fault in {ONE: None, TWO: None, DIES: "worker-dies", SLOW: "worker-slow", CUT: None}.items():
        release(DEBS, folder / version, version=version, fault=fault)
    with Host(f"b-{uuid4().hex[:8]}", layers=[bare], binds=[(str(folder), "/srv/releases")], disk="14G") as host:
        host.run("rm -rf /var/lib/appliance", check=True)  # the fake worker's model
        yield Upgraded(host)
    shutil.rmtree(folder)
    (ROOT / "build/system").mkdir(parents=True, exist_ok=True)
    (ROOT / "build/system/upgrades.json").write_text(json.dumps(FIGURES, indent=1))


def used_mb(node: Upgraded) -> int:
    return int(node.host.run(["df", "--output=used", "-m", "/"]).out.split()[-1])


def seen(asked: Asked) -> dict[str, object]:
    return {"longest gap s": round(asked.gap_s, 1), "answers": asked.codes}


def test_the_first_release_serves(served: Upgraded) -> None:
    served.first(ONE, SETTINGS)
    served.wait_kept(ONE, READY_S)
    served.wait_for(lambda _: served.record()["speeds"], 120, "its speed is measured")
    assert served.answers_paris()
    FIGURES["used MB, one version"] = used_mb(served)


def test_upgraded_under_load_the_gap_is_bounded_and_nothing_accepted_is_lost(served: Upgraded) -> None:
    with served.client() as asked:
        time.sleep(3)
        began = time.monotonic()
        served.take(TWO)
        taken = time.monotonic() - began
        status = served.wait_for(lambda status: status.get("trial") and status.get("ready"), READY_S, "on trial")
        assert served.trees() == [ONE, TWO]
        both = used_mb(served)
        served.wait_kept(TWO, READY_S)
        kept = time.monotonic() - began
    FIGURES["upgrade under load"] = {"apt s": round(taken, 1), "kept after s": round(kept, 1), **seen(asked),
                                     "used MB, two versions": both, "used MB, afterwards": used_mb(served)}
    assert f"worker: {ONE} -> {TWO}" in status["trial"]["sentence"]
    assert served.serving() == TWO
    assert served.verify(*ALL) == ""
    assert asked.lost == 0, asked
    assert asked.gap_s < 90, asked


def test_a_worker_that_dies_is_rolled_back(served: Upgraded) -> None:
    served.wait_for(lambda _: served.record()["good"]["id"] in served.record()["speeds"], 180, "its speed is measured")
    good = served.serving()
    with served.client() as asked:
        time.sleep(2)
        served.take(DIES)
        began = time.monotonic()
        sentence = served.wait_rolled_back(READY_S)
        FIGURES["broken worker"] = {"rolled back after s": round(time.monotonic() - began, 1), "sentence": sentence}
        time.sleep(2)
    FIGURES["broken worker"] |= seen(asked)  # type: ignore[operator]
    assert f"worker: {good} -> {DIES}" in sentence
    assert served.answers_paris()
    assert served.serving() == good
    assert asked.lost == 0, asked


def test_a_slow_worker_is_rolled_back_where_that_is_configured(served: Upgraded) -> None:
    good = served.serving()
    served.write_settings(SETTINGS + "tune: {upgrade_rollback: true}\n")
    served.take(SLOW)
    sentence = served.wait_rolled_back(READY_S)
    FIGURES["slow worker"] = {"sentence": sentence}
    assert "% slower, 10 % are allowed" in sentence
    assert served.serving() == good
    assert served.trees() == [good, SLOW]


def test_power_is_cut_while_the_folder_of_the_next_version_is_made(served: Upgraded) -> None:
    good = served.serving()
    served.host.run(f"dpkg --unpack /srv/releases/{CUT}/*.deb", timeout_s=300, check=True)
    running = served.host.popen(["dpkg", "--configure", "-a"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not served.file(f"{TREES}/.new/lib").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    served.host.powercut()
    running.wait()
    served.host.boot(wait=False)  # systemd has started when the service is ready
    served.wait_ready(READY_S)
    assert served.serving() == good
    done = served.host.run(["dpkg", "--configure", "-a"], timeout_s=300)
    assert done.rc == 0, done.err
    served.wait_kept(CUT, READY_S)
    assert served.verify(*ALL) == ""


def test_back_to_the_first_release(served: Upgraded) -> None:
    served.take(ONE)
    served.wait_kept(ONE, READY_S)
    assert served.answers_paris()


def test_removed_its_data_stay_and_purged_nothing_stays(served: Upgraded) -> None:
    objects = served.host.run("ls /var/lib/appliance/store/objects").out
    served.apt("remove", *ALL).ok()
    assert served.processes() == []
    assert not served.file("/usr/lib/appliance").exists()
    assert served.host.run("ls /var/lib/appliance/store/objects").out == objects != ""
    served.apt("purge", *ALL).ok()
    left = [path for path in served.files() if "appliance" in path
            and not path.startswith(("/etc/systemd/system/appliance.service.d", "/srv/"))]
    assert left == []
    assert used_mb(served) < int(str(FIGURES["used MB, one version"])) - 1000
