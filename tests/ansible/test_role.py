"""The role `appliance` over SSH on booted Debian 12 hosts without a way out of their network.

Most hosts serve with the fake worker (conftest.py); the last test has real vLLM. Tests that share a host say so; their
order counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ansible.conftest import DEBS, ONE, ROOT, TWO, embedded
from tests.ansible.controller import COLLECTION, TOOLS, Controller, Ran
from tests.packages.node import Node
from tests.packages.releases import repository
from tests.system.testhost.host import Host

SETTINGS: dict[str, Any] = {"trial_s": 4, "drain_s": 5, "memory": {"reserve": "64M"}}
KEY = "sk-appl-a-key-that-nobody-may-see"
INCOMING = "ls -d /var/tmp/appliance* /var/lib/appliance-fleet/incoming*"
BROKEN = "/run/broken"
"""A folder that tells the fake worker to die while it loads."""
FILES = r"""find / -xdev \( -path /proc -o -path /sys -o -path /run -o -path /tmp -o -path /var/tmp -o -path /var/log -o -path /home/admin/.ansible
  -o -path /var/lib/private -o -path /var/lib/systemd -o -path /var/cache/ldconfig \) -prune -o -printf '%y %m %u %s %T@ %p\n'"""


class Fleet(Controller):
    """One node and its controller."""

    def __init__(self, folder: Path, host: Host, **variables: Any) -> None:
        super().__init__(folder, {host.name: host}, **variables)
        self.host, self.node = host, Node(host)

    def files(self) -> set[str]:
        """Every file with its size and time."""
        return set(self.host.run(FILES).out.splitlines())

    def worker(self) -> int:
        return int(self.node.status()["worker_pid"])

    def events(self) -> list[str]:
        record = json.loads(self.node.file("/var/lib/appliance/state/record.json").read_text())
        return [f"{line['event']}: {line.get('sentence', '')}" for line in record["history"]]

    def starts(self) -> int:
        """How many workers were started since the boot."""
        return self.node.file("/var/lib/appliance/state/agent.log").read_text().count("loading: starting the worker")

    def asked(self, *, key: str = "", url: str = "http://127.0.0.1:8000") -> int:
        words = ["curl", "-sk", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", "-H", "content-type: application/json",
                 "-d", '{"model": "default", "prompt": "Paris is", "max_tokens": 2}', f"{url}/v1/completions"]
        return int(self.host.run([*words, *(["-H", f"Authorization: Bearer {key}"] if key else [])]).out or 0)


@pytest.fixture(scope="session")
def from_repository(published: Path) -> dict[str, str]:
    """Variables of nodes that fetch; the repository is bound below /srv/repository."""
    return {"appliance_repository_uri": "file:/srv/repository", "appliance_repository_key": str(published / "appliance.asc")}


@pytest.fixture
def make_fleet(make_host: Callable[..., Host], published: Path, from_repository: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Host] = []

    def make(*, variables: dict[str, Any] | None = None, **options: Any) -> Fleet:
        host = make_host(binds=((str(published), "/srv/repository"),), **options)
        host.__enter__()
        made.append(host)
        return Fleet(tmp_path, host, **{"appliance_config": SETTINGS, **(variables or from_repository)})

    yield make
    for host in made:
        host.destroy()


@pytest.fixture(scope="module")
def shared(make_host: Callable[..., Host], published: Path, from_repository: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with make_host(binds=((str(published), "/srv/repository"),), disk="10G") as host:
        host.run(f"mkdir -p {BROKEN} && echo stay >{BROKEN}/load-ill", check=True)
        yield Fleet(tmp_path_factory.mktemp("controller"), host, appliance_config=SETTINGS, **from_repository)


# ---- one node from nothing, in this order ---------------------------------------------------------------------------


def test_case_069_check_on_a_fresh_host_changes_nothing(shared: Fleet) -> None:
    before = shared.files()
    ran = shared.play("appliance.yml", "--check", "--diff").ok()
    assert shared.files() == before
    assert f"+  reserve: {SETTINGS['memory']['reserve']}" in ran.out
    assert "would be installed: appliance, appliance-worker, appliance-model-smollm2" in ran.out


def test_a_fresh_host_starts_once_and_answers(shared: Fleet) -> None:
    ran = shared.play(appliance_verify_expect="Paris").ok()
    assert "answered \\\" Paris" in ran.out
    assert yaml.safe_load(shared.node.file("/etc/appliance/appliance.yaml").read_text()) == SETTINGS
    assert shared.starts() == 1, "apt's start and the configured one"
    assert shared.host.run(["systemctl", "is-enabled", "appliance"]).out.strip() == "enabled"
    assert shared.host.run(["dpkg", "--audit"]).out == ""


def test_case_071_a_second_run_changes_nothing(shared: Fleet) -> None:
    pid, agent = shared.worker(), shared.node.agent()
    ran = shared.play().ok()
    assert ran.changed == 0, ran.changes()
    assert (shared.worker(), shared.node.agent()) == (pid, agent)


def test_case_069_check_after_the_real_run_would_change_nothing(shared: Fleet) -> None:
    before = shared.files()
    ran = shared.play("appliance.yml", "--check", "--diff").ok()
    assert ran.changed == 0, ran.changes()
    assert {line for line in shared.files() ^ before if "/var/lib/appliance" not in line} == set()


def test_case_071_an_unrelated_variable_restarts_nothing(shared: Fleet) -> None:
    pid = shared.worker()
    ran = shared.play(appliance_wait_s=901, appliance_verify_prompt="The capital of France is", appliance_min_memory_mb=1000).ok()
    assert ran.changed == 0, ran.changes()
    assert shared.worker() == pid


def test_case_071_one_setting_is_one_trial_and_no_new_model(shared: Fleet) -> None:
    pid, starts = shared.worker(), shared.starts()
    model = shared.host.run("find /var/lib/appliance/store/objects -type f -printf '%p %T@\n' | sort").out
    shared.variables["appliance_config"] = {**SETTINGS, "context": 256}
    ran = shared.play().ok()
    assert ran.changes() == ["appliance.fleet.appliance : Put them on trial"]
    assert shared.worker() != pid
    assert shared.starts() == starts + 1
    assert shared.node.status()["context"] == 256
    assert shared.node.status()["trial"] is None, "the play waits for the end of the trial"
    assert shared.host.run("find /var/lib/appliance/store/objects -type f -printf '%p %T@\n' | sort").out == model
    assert shared.play().ok().changed == 0


def test_a_setting_of_the_door_needs_no_other_worker(shared: Fleet) -> None:
    pid = shared.worker()
    shared.variables["appliance_config"] = {**SETTINGS, "context": 256, "max_queued": 4}
    ran = shared.play().ok()
    assert ran.changed == 1, ran.changes()
    assert shared.worker() == pid
    assert shared.node.status()["max_queued"] == 4


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"listen": {"port": 99999}}, "listen.port"),
    ({"context": "many"}, "context"),
    ({"memory": {"ceiling": "200M"}}, "memory"),
    ({"worker": {"extra_args": ["--port", "1"]}}, "extra_args"),
    ({"listen": [1]}, "listen"),
    ({"memory": 5}, "memory"),
    ({"contxt": 256}, "appliance_config: unknown key `contxt` is ignored; did you mean `context`?; correct appliance_config, or set appliance_strict: false"),
]


def test_wrong_settings_are_refused_in_one_line_and_nothing_changes(shared: Fleet) -> None:
    """One host under several names, each with other settings."""
    before, pid = shared.node.file("/etc/appliance/appliance.yaml").read_text(), shared.worker()
    names = [f"wrong{number}" for number in range(len(WRONG))]
    many = Controller(shared.folder, dict.fromkeys(names, shared.host), own={name: {"appliance_config": case[0]} for name, case in zip(names, WRONG, strict=True)},
                      **{key: value for key, value in shared.variables.items() if key != "appliance_config"})
    for words in (("--check",), ()):
        lines = many.play("appliance.yml", *words).refusals()
        assert lines.keys() == set(names)
        for name, (_, said) in zip(names, WRONG, strict=True):
            assert said in lines[name], lines
            assert "\n" not in lines[name]
    assert shared.node.file("/etc/appliance/appliance.yaml").read_text() == before
    assert shared.worker() == pid


def test_an_unknown_key_is_shown_where_it_is_let_through(shared: Fleet) -> None:
    pid, good = shared.worker(), shared.variables["appliance_config"]
    for _ in range(2):  # also where nothing changes any more
        ran = shared.play(appliance_config={**good, "contxt": 256}, appliance_strict=False).ok()
        assert "appliance_config: unknown key `contxt` is ignored" in ran.out
    assert ran.changed == 0
    assert "unknown key `contxt`" in shared.play(appliance_config={**good, "contxt": 256}).refusal
    assert shared.play().ok().changed == 1
    assert shared.worker() == pid


def test_a_repository_that_cannot_be_used_leaves_the_one_that_works(shared: Fleet, tmp_path: Path) -> None:
    """One host under several names, and each of them in check mode as well."""
    files = "sha256sum /etc/apt/keyrings/appliance.asc /etc/apt/sources.list.d/appliance.sources && ls /tmp /var/lib/apt/lists"
    before = shared.host.run(files, check=True).out
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "another-key": ({"appliance_repository_key": another_key(tmp_path)}, "check its address, suite and key; the node's source stays as it was"),
        "no-repository": ({"appliance_repository_uri": "http://127.0.0.1:9/nothing"}, "http://127.0.0.1:9/nothing cannot be read"),
        "no-suite": ({"appliance_repository_suite": "trixie"}, "cannot be read"),
    }
    many = Controller(shared.folder, dict.fromkeys(wrong, shared.host), own={name: case[0] for name, case in wrong.items()},
                      **shared.variables)
    for words in (("--check",), ()):
        lines = many.play("appliance.yml", *words).refusals()
        assert lines.keys() == wrong.keys()
        assert {name: said for name, (_, said) in wrong.items() if said not in lines[name]} == {}, lines
    assert shared.host.run(files, check=True).out == before
    assert shared.play().ok().changed == 0


def another_key(folder: Path) -> str:
    """A public key that signed nothing of ours."""
    home = folder / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet"]
    subprocess.run([*gpg, "--passphrase", "", "--quick-generate-key", "another", "ed25519", "sign"], check=True, capture_output=True)
    return subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True, text=True).stdout


def test_each_tag_alone_on_a_node_that_serves(shared: Fleet) -> None:
    pid = shared.worker()
    for tag in ("preflight", "install", "model", "configure", "verify"):
        ran = shared.play("appliance.yml", "--tags", tag).ok()
        assert ran.changed == 0, (tag, ran.changes())
        assert ("answered" in ran.out) == (tag == "verify")
    assert shared.worker() == pid
    assert "--tags remove does nothing while appliance_state is present" in shared.play("appliance.yml", "--tags", "remove").refusal


def test_settings_that_fail_their_trial_are_rolled_back_and_the_play_says_why(shared: Fleet) -> None:
    good = shared.variables["appliance_config"]
    bad = {**good, "worker": {"env": {"FAKE_CONTROL": BROKEN}}}
    ran = shared.play(appliance_config=bad)
    assert ran.rc != 0
    assert "rolled back" in ran.refusal, ran.out
    assert shared.asked() == 200
    again = shared.play(appliance_config=bad)  # the file says it now, and it is still not what serves
    assert "the wanted one failed" in again.refusal, again.out
    assert mode(shared) == "640 root appliance", "they may hold a secret"
    mended = shared.play("appliance.yml", "--diff", "-vvv").ok()
    assert mended.changed == 1  # the good settings are in force by a change of the file
    assert BROKEN not in mended.out, "what was in the file before may be a secret as well"
    assert mode(shared) == "640 root appliance", "what was closed stays closed"
    assert shared.asked() == 200


def mode(fleet: Fleet) -> str:
    return fleet.host.run(["stat", "-c", "%a %U %G", "/etc/appliance/appliance.yaml"]).out.strip()


def test_another_port_is_one_restart(shared: Fleet) -> None:
    starts = shared.starts()
    shared.variables["appliance_config"] = {**shared.variables["appliance_config"], "listen": {"port": 8100}}
    shared.play().ok()
    assert shared.starts() == starts + 1
    assert shared.asked(url="http://127.0.0.1:8100") == 200
    assert shared.play().ok().changed == 0


def test_a_stopped_service_is_started_and_a_masked_one_is_not(shared: Fleet) -> None:
    shared.host.run(["systemctl", "stop", "appliance"], check=True)
    assert shared.play().ok().changes() == ["appliance.fleet.appliance : Start it"]
    shared.host.run("systemctl stop appliance && systemctl mask appliance", check=True)
    assert "masked" in shared.play().refusal
    shared.host.run(["systemctl", "unmask", "appliance"], check=True)
    shared.play().ok()


def test_settings_broken_by_hand_are_mended(shared: Fleet) -> None:
    shared.node.write_settings("listen: [this is\n")
    shared.play().ok()
    assert shared.asked(url="http://127.0.0.1:8100") == 200


def test_an_upgrade_and_the_way_back(shared: Fleet, releases: Path, published: Path) -> None:
    starts = shared.starts()
    repository([releases / TWO], published.parents[1], keys=published.parents[1] / "keys")
    ran = shared.play("appliance.yml", "--check").ok()
    assert shared.node.host.run(["dpkg-query", "-W", "-f", "${Version}", "appliance"]).out == ONE
    ran = shared.play(appliance_version=TWO).ok()
    assert f"(package {TWO})" in ran.out
    assert shared.starts() == starts + 1
    assert shared.play(appliance_version=TWO).ok().changed == 0
    ran = shared.play(appliance_version=ONE).ok()
    assert f"(package {ONE})" in ran.out
    assert shared.play(appliance_version="9.9").refusal.count("9.9") >= 1


def test_absent_keeps_data_and_purged_leaves_nothing(shared: Fleet) -> None:
    shared.play(appliance_state="absent").ok()
    assert shared.node.processes() == []
    assert not shared.node.file("/usr/bin/applianctl").exists()
    assert shared.node.file("/var/lib/appliance/store/objects").is_dir()
    assert shared.node.file("/etc/appliance/appliance.yaml").exists()
    assert shared.play(appliance_state="absent").ok().changed == 0
    shared.play(appliance_state="purged").ok()
    left = [path for path in shared.node.files() if "appliance" in path and not path.startswith(("/etc/systemd/system/appliance.service.d", "/srv/"))]
    assert left == []
    assert shared.play(appliance_state="purged").ok().changed == 0


# ---- hosts of their own ---------------------------------------------------------------------------------------------


def test_key_and_certificate_without_a_trace_in_any_log(make_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = make_fleet()
    cert, key = certificate(tmp_path / "one")
    secret = key.splitlines()[1]
    fleet.variables |= {"appliance_api_key": KEY, "appliance_tls_cert": cert, "appliance_tls_key": key,
                        "appliance_config": {**SETTINGS, "listen": {"host": "0.0.0.0"}}}
    first = fleet.play("appliance.yml", "-vvv", "--diff").ok()
    assert fleet.starts() == 1
    assert fleet.asked(url="https://127.0.0.1:8000") == 401
    assert fleet.asked(url="https://127.0.0.1:8000", key=KEY) == 200
    assert fleet.play().ok().changed == 0
    modes = fleet.host.run("stat -c '%a %U %G' /etc/credstore /etc/credstore/appliance.api_key /etc/appliance/tls/server.key").out.splitlines()
    assert modes == ["700 root root", "600 root root", "640 root appliance"]

    pid = fleet.worker()  # a renewal is a reload
    fleet.variables["appliance_tls_cert"], fleet.variables["appliance_tls_key"] = certificate(tmp_path / "two")
    renewed = fleet.play("appliance.yml", "-vvv", "--diff").ok()
    assert fleet.worker() == pid
    served = fleet.host.run("openssl s_client -connect 127.0.0.1:8000 </dev/null 2>/dev/null | openssl x509 -serial -noout").out
    wanted = subprocess.run(["openssl", "x509", "-serial", "-noout"], input=fleet.variables["appliance_tls_cert"], capture_output=True, text=True, check=True).stdout
    assert served == wanted

    starts = fleet.starts()  # another key is one restart
    fleet.variables["appliance_api_key"] = f"{KEY}-2"
    rotated = fleet.play("appliance.yml", "-vvv", "--diff").ok()
    assert fleet.starts() == starts + 1
    assert fleet.asked(url="https://127.0.0.1:8000", key=f"{KEY}-2") == 200
    assert fleet.asked(url="https://127.0.0.1:8000", key=KEY) == 401

    tls = "sha256sum /etc/appliance/tls/*"
    before, pid = fleet.host.run(tls).out, fleet.worker()
    mixed = fleet.play("appliance.yml", "-vvv", appliance_tls_cert=cert)  # with the key of the second
    assert "cannot be used: key values mismatch; the pair before stays" in mixed.refusal
    assert (fleet.host.run(tls).out, fleet.worker()) == (before, pid)

    unchanged = fleet.host.run(tls).out  # TLS switched off takes the key away, once nothing refers to it
    off = {"appliance_tls_cert": "", "appliance_tls_key": ""}
    assert fleet.play("appliance.yml", "--check", **off).ok().changed
    assert fleet.host.run(tls).out == unchanged
    fleet.host.run("mkdir -p /var/lib/appliance-fleet/rollout && cp /etc/appliance/appliance.yaml /var/lib/appliance-fleet/rollout/before.yaml", check=True)
    fleet.play("appliance.yml", **off).ok()
    assert fleet.host.run(tls).out == unchanged, "a rollback comes back to it"
    fleet.host.run("rm -r /var/lib/appliance-fleet/rollout", check=True)
    assert fleet.play("appliance.yml", **off).ok().changes() == ["appliance.fleet.appliance : Remove certificate and key that nothing refers to"]
    assert fleet.host.run("ls /etc/appliance").out.split() == ["appliance.yaml"]
    assert fleet.play("appliance.yml", **off).ok().changed == 0
    assert fleet.asked(key=f"{KEY}-2") == 200

    broken = fleet.play("appliance.yml", "-vvv", appliance_tls_key="")  # also where it fails
    journal = fleet.host.run(["journalctl", "--no-pager"]).out
    for text in (first.out, renewed.out, rotated.out, mixed.out, broken.out, journal):
        assert KEY not in text
        assert secret not in text
    assert "appliance_tls_key" in broken.refusal


def test_packages_pushed_to_a_node_that_reaches_nothing(make_fleet: Callable[..., Fleet], releases: Path, tmp_path: Path) -> None:
    """The controller's folder has two releases, and the package of Debian that the node lacks."""
    folder = tmp_path / "debs"
    folder.mkdir()
    for deb in (*(releases / ONE).glob("*.deb"), *(releases / TWO).glob("*.deb")):
        if not (folder / deb.name).exists():
            os.link(deb, folder / deb.name)
    fleet = make_fleet(variables={"appliance_source": "packages", "appliance_packages_dir": str(folder), "appliance_version": ONE})
    assert fleet.play("appliance.yml", "--check").ok().changed
    ran = fleet.play().ok()
    assert f"(package {ONE})" in ran.out
    assert fleet.play().ok().changed == 0
    fleet.play(appliance_version="").ok()  # the newest in the folder
    assert fleet.node.installed_mb().keys() == {"appliance", "appliance-worker", "appliance-model-smollm2"}
    assert fleet.host.run(["dpkg-query", "-W", "-f", "${Version}", "appliance"]).out == TWO
    pushed = fleet.host.run("ls /var/cache/appliance-packages").out
    assert f"appliance_{ONE}" in pushed, "the version before stays for the way back"
    (folder / "python3-sdnotify_0.3.1-3_all.deb").unlink()
    other = make_fleet(variables=fleet.variables)
    assert "python3-sdnotify" in other.play().refusal
    assert "no package of version 7" in other.play(appliance_version="7").refusal


def test_an_interrupted_run_converges(make_fleet: Callable[..., Fleet]) -> None:
    """The controller is killed at one task after the other, and once the node loses its power."""
    fleet = make_fleet()
    for task in (": Have the repository among", ": Install]", ": Lay the new settings", ": Start it]"):
        process = fleet.start()
        assert process.stdout is not None
        for line in process.stdout:
            if task in line:
                break
        else:
            pytest.fail(f"there is no task {task}")
        time.sleep(0.7)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    fleet.host.powercut()
    fleet.host.boot()
    fleet.play().ok()
    assert fleet.host.run(["dpkg", "--audit"]).out == ""
    assert fleet.asked() == 200
    assert fleet.play().ok().changed == 0


def test_power_lost_while_apt_runs(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.host.run("sync", check=True)  # the host itself is an old one: without its /etc/hosts sudo waits 20 s for a name
    process = fleet.start()
    deadline = time.monotonic() + 120
    while fleet.host.run("pgrep -x dpkg && ls /usr/lib/appliance").rc:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    fleet.host.powercut()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    fleet.host.boot()
    fleet.host.run("for list in /var/lib/apt/lists/_srv_*; do : >$list; done", check=True)  # as it happens now and then
    fleet.play().ok()
    assert fleet.host.run(["dpkg", "--audit"]).out == ""
    assert fleet.play().ok().changed == 0


def test_models_of_the_controller(make_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """A GGUF file, then the same model as a bundle under another name; nothing is pushed twice, and a lie is refused."""
    fleet = make_fleet()
    source = tmp_path / "My Model.Q4.gguf"
    source.symlink_to(embedded())
    fleet.variables["appliance_model"] = str(source)
    fleet.play().ok()
    assert fleet.node.status()["model"] == "my-model.q4"
    assert fleet.starts() == 1
    assert fleet.host.run(INCOMING).out == ""
    assert "appliance-model-smollm2" not in fleet.node.installed_mb()
    pid = fleet.worker()
    assert fleet.play().ok().changed == 0
    assert fleet.worker() == pid

    fleet.host.run(["applianctl", "bundle", "export", "my-model.q4", "/root/other.bundle"], check=True)
    bundle = tmp_path / "other.bundle"
    bundle.write_bytes(fleet.node.file("/root/other.bundle").read_bytes())
    fleet.variables["appliance_model"] = f"bundle:{bundle}"
    assert fleet.play(appliance_model_name="carried").ok().changed
    assert fleet.node.status()["model"] == "carried"
    assert fleet.play(appliance_model_name="carried").ok().changed == 0

    bundle.write_bytes(bundle.read_bytes()[:-1000])
    assert "bytes and should have" in fleet.play().refusal
    assert fleet.host.run(INCOMING).out == ""
    assert fleet.asked() == 200
    assert "there is no model other" in fleet.play(appliance_model="other").refusal
    assert "is no file of the controller" in fleet.play(appliance_model="/nowhere/x.gguf").refusal
    assert fleet.play(appliance_model="my-model.q4").ok().changed == 1
    assert fleet.node.status()["model"] == "my-model.q4"


def test_a_model_of_the_settings_becomes_one_of_the_role(make_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """The default model, which the node does not have, is never tried in between."""
    fleet = make_fleet()
    source = tmp_path / "mine.gguf"
    source.symlink_to(embedded())
    fleet.play(appliance_model=str(source)).ok()
    fleet.play(appliance_config={**SETTINGS, "model": "mine"}).ok()
    fleet.host.run("rm /var/lib/appliance/state/model", check=True)  # as where only the settings ever named it
    pid, starts = fleet.worker(), fleet.starts()
    ran = fleet.play(appliance_model="mine").ok()
    assert ran.changes() == ["appliance.fleet.appliance : Put them on trial"]
    assert (fleet.worker(), fleet.starts()) == (pid, starts)
    assert fleet.play(appliance_model="mine").ok().changed == 0

    fleet.play(appliance_config={**SETTINGS, "model": "mine"}).ok()  # and where the agent has to start anew
    fleet.host.run("rm /var/lib/appliance/state/model", check=True)
    fleet.play(appliance_model="mine", appliance_config={**SETTINGS, "listen": {"port": 8100}}).ok()
    assert (fleet.starts(), fleet.node.status()["model"]) == (starts + 1, "mine")
    assert not [line for line in fleet.events() if "smollm2" in line]

    fleet.play(appliance_config={**SETTINGS, "listen": {"port": 8100}}).ok()  # the default, which is installed first
    assert fleet.node.status()["model"] == "smollm2"
    assert fleet.play(appliance_config={**SETTINGS, "listen": {"port": 8100}}).ok().changed == 0


def test_settings_of_an_operator_name_the_model(make_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """The role leaves a file alone that it has not written, and does not overrule its model either."""
    fleet = make_fleet()
    source = tmp_path / "mine.gguf"
    source.symlink_to(embedded())
    fleet.play(appliance_model=str(source)).ok()
    mine = f"# my own\n{json.dumps({**SETTINGS, 'model': 'mine'})}\n"
    fleet.node.write_settings(mine)
    fleet.host.run("applianctl reload", check=True)
    assert fleet.play(appliance_config={}).ok().changed == 0
    assert fleet.node.file("/etc/appliance/appliance.yaml").read_text() == mine
    assert fleet.node.status()["model"] == "mine"


def test_parts_by_their_tags_on_a_fresh_node(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    for tag in ("configure", "model", "verify"):
        assert "the packages are not installed; run the play without --tags, or with --tags install first" in fleet.play("appliance.yml", "--tags", tag).refusal
        assert fleet.play("appliance.yml", "--check", "--tags", tag).ok()
    assert "the packages are not installed" in fleet.play("appliance.yml", "--tags", "model", appliance_model="hf:org/name").refusal
    assert fleet.play("appliance.yml", "--tags", "preflight").ok().changed == 0
    assert "the service is not started before it is configured" in fleet.play("appliance.yml", "--tags", "install").ok().out
    assert "the service is not started before it is configured" in fleet.play("appliance.yml", "--tags", "configure").ok().out
    assert fleet.node.processes() == []
    fleet.play("appliance.yml", "--tags", "model,verify").ok()
    assert fleet.starts() == 1
    assert fleet.play().ok().changed == 0
    assert "--tags install does nothing while appliance_state is absent" in fleet.play("appliance.yml", "--tags", "install", appliance_state="absent").refusal
    assert fleet.play("appliance.yml", "--tags", "remove", appliance_state="purged").ok().changed


def test_prefetch_changes_nothing_that_serves(make_fleet: Callable[..., Fleet], releases: Path, published: Path, tmp_path: Path) -> None:
    """Neither now nor at the next restart, also with new contents of the model in use; the role itself then takes both."""
    fleet = make_fleet(variables=None)
    repository([releases / TWO], published.parents[1], keys=published.parents[1] / "keys")
    gguf = tmp_path / "mine.gguf"
    gguf.write_bytes(embedded().read_bytes())
    fleet.variables |= {"appliance_version": ONE, "appliance_model": str(gguf)}
    fleet.play().ok()
    pid, digest = fleet.worker(), fleet.node.status()["digest"]
    head, name, rest = gguf.read_bytes().partition(b"Smollm2 135M")
    gguf.write_bytes(head + b"Smollm9 135M" + rest)
    assert name
    book = fleet.folder / "prefetch.yml"
    book.write_text("- hosts: appliance\n  become: true\n  tasks:\n    - ansible.builtin.include_role: {name: appliance.fleet.appliance, tasks_from: prefetch}\n")
    fleet.play(str(book), appliance_version=TWO).ok()
    assert fleet.worker() == pid
    assert fleet.host.run(["dpkg-query", "-W", "-f", "${Version}", "appliance"]).out == ONE
    fleet.host.run(["applianctl", "restart", "--timeout", "60"], check=True)
    assert fleet.node.status()["digest"] == digest
    assert fleet.play(str(book), appliance_version=TWO).ok().changed == 0  # nothing is fetched twice

    changed = fleet.play().ok()
    assert [task.rpartition(" : ")[2] for task in changed.changes()] == [
        "Let the name stand for the new one", "Note what the name stands for", "Use the model"]
    assert fleet.node.status()["digest"] != digest
    assert fleet.node.status()["model"] == "mine"
    rows = json.loads(fleet.host.run(["applianctl", "model", "list", "--json"], check=True).out)
    assert {row["name"]: row["digest"] for row in rows} == {"mine": fleet.node.status()["digest"], "mine.before": digest}
    assert fleet.play().ok().changed == 0


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "memory": ({"appliance_min_memory_mb": 99_999_999}, "too little memory"),
    "disk": ({"appliance_min_disk_mb": 99_999_999}, "too little free space"),
    "no-avx2": ({"appliance_cpu_flags": ["avx2", "avx2000"]}, "does not name avx2000"),
    "port-taken": ({"appliance_config": {"listen": {"port": 22}}}, "port 22 is taken by sshd, pid "),
    "open-without-a-key": ({"appliance_config": {"listen": {"host": "0.0.0.0"}}}, "there is no API key"),
    "blank-key": ({"appliance_api_key": "  \n"}, "cannot be sent in a header"),
    "key-of-two-lines": ({"appliance_api_key": "abc\ndef"}, "cannot be sent in a header"),
    "key-beyond-ascii": ({"appliance_api_key": "schl\u00fcssel"}, "cannot be sent in a header"),
    "half-of-tls": ({"appliance_tls_cert": "x"}, "TLS needs both"),
    "half-of-a-repository": ({"appliance_repository_key": ""}, "nodes need both"),
    "no-folder": ({"appliance_source": "packages"}, "appliance_packages_dir is empty"),
    "two-models": ({"appliance_model": "a", "appliance_config": {"model": "b"}}, "the model is set twice"),
    "name-with-a-line-break": ({"appliance_model": "tiny\n"}, "no name for a model"),
    "no-name": ({"appliance_model": "A b"}, "no name for a model"),
    "model-name-for-nothing": ({"appliance_model_name": "b"}, "appliance_model_name is set and appliance_model adds no model"),
    "no-model-of-the-hub": ({"appliance_model": "hf:org"}, "is no model of the Hub"),
    "two-keys": ({"appliance_api_key": "abc", "appliance_config": {"api_key_file": "/x"}}, "the API key is set twice"),
    "file-for-a-certificate": ({"appliance_tls_cert": "server.crt", "appliance_tls_key": "server.key"}, "appliance_tls_cert is no certificate"),
    "no-key-file": ({"appliance_repository_key": "nowhere/appliance.asc"}, "appliance_repository_key 'nowhere/appliance.asc' cannot be read on the controller"),
    "key-of-something-else": ({"appliance_repository_key": "hello\nworld"}, "appliance_repository_key is a text and no public key"),
    "address-of-two-lines": ({"appliance_repository_uri": "file:/srv/repository\nTrusted: yes"}, "is no address"),
    "two-suites": ({"appliance_repository_suite": "bookworm trixie"}, "is no name of a suite"),
    "no-version": ({"appliance_version": "-o Dir=/"}, "is no version of a package"),
    "no-root": ({"ansible_become": False}, "the account admin is not root on the node: set become: true"),
    "no-time": ({"appliance_wait_s": 0}, "appliance_wait_s is 0; it is 1 or more"),
    "no-prompt": ({"appliance_verify_prompt": ""}, "appliance_verify_prompt is blank"),
    "settings-as-a-text": ({"appliance_config": '{"context": 5}'}, "appliance_config is a text and no mapping"),
    "unknown-state": ({"appliance_state": "gone"}, "value of appliance_state must be one of: present, absent, purged"),
    "wrong-type": ({"appliance_wait_s": "long"}, "appliance_wait_s"),
}


@pytest.fixture(scope="module")
def bare(make_host: Callable[..., Host], published: Path, from_repository: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with make_host(binds=((str(published), "/srv/repository"),)) as host:
        yield Fleet(tmp_path_factory.mktemp("controller"), host, **from_repository)


def test_what_cannot_work_is_one_line_before_anything_changes(bare: Fleet) -> None:
    """One host under many names, each with something else that is wrong."""
    before = bare.files()
    many = Controller(bare.folder, dict.fromkeys(REFUSALS, bare.host), own={name: case[0] for name, case in REFUSALS.items()}, **bare.variables)
    for words in (("--check",), ()):
        lines = many.play("appliance.yml", *words).refusals()
        assert lines.keys() == REFUSALS.keys()
        for name, (_, said) in REFUSALS.items():
            assert said in lines[name], lines[name]
            assert "\n" not in lines[name].removeprefix("Validation of arguments failed:\n")  # Ansible's own words
    assert bare.files() == before


def test_a_variable_with_a_typing_error_is_shown(bare: Fleet) -> None:
    ran = bare.play("appliance.yml", "--check", "--tags", "preflight", appliance_modle="x", appliance_region="north")
    assert "appliance_modle is no variable of this role; did you mean appliance_model?" in ran.ok().out
    assert "appliance_region" not in ran.out


@pytest.mark.parametrize(("variables", "said"), [
    ({"appliance_repository_uri": "http://127.0.0.1:9/nothing"}, "http://127.0.0.1:9/nothing cannot be read"),
    ({"appliance_repository_key": "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmDMEZ\n-----END PGP PUBLIC KEY BLOCK-----"}, "cannot be read"),
], ids=["no repository there", "another key"])
def test_a_repository_that_cannot_be_read(bare: Fleet, variables: dict[str, Any], said: str) -> None:
    for words in (("--check",), ()):
        assert said in bare.play("appliance.yml", *words, **variables).refusal
    assert not bare.node.file("/usr/bin/applianctl").exists()
    assert not bare.node.file("/etc/apt/sources.list.d/appliance.sources").exists()


def test_case_052_a_32_bit_userland(bare: Fleet) -> None:
    bare.host.write("/usr/local/bin/dpkg", "#!/bin/sh\necho armhf\n", 0o755)
    said = bare.play().refusal
    bare.host.run(["rm", "/usr/local/bin/dpkg"], check=True)
    assert "it is armhf under a 64-bit kernel, and the worker needs amd64; install a 64-bit userland" in said


def test_case_052_another_distribution(bare: Fleet) -> None:
    bare.host.run("cp /usr/lib/os-release /root/ && sed -i 's/^ID=.*/ID=alpine/; s/^NAME=.*/NAME=Alpine/; s/^VERSION_ID=.*/VERSION_ID=3.20/' /usr/lib/os-release && mv /etc/debian_version /root/", check=True)
    said = bare.play().refusal
    bare.host.run("cp /root/os-release /usr/lib/ && mv /root/debian_version /etc/", check=True)
    assert "is not supported: the packages are built for Debian 12" in said


# ---- without hosts --------------------------------------------------------------------------------------------------


def test_every_variable_is_described_and_has_the_same_default_in_both_places() -> None:
    specs = yaml.safe_load((COLLECTION / "roles/appliance/meta/argument_specs.yml").read_text())["argument_specs"]
    defaults = yaml.safe_load((COLLECTION / "roles/appliance/defaults/main.yml").read_text())
    options = specs["main"]["options"]
    assert options.keys() == defaults.keys()
    assert {name: said["default"] for name, said in options.items() if "default" in said}.items() <= defaults.items()
    for name, spec in specs.items():
        assert (COLLECTION / f"roles/appliance/tasks/{name}.yml").exists()
        assert spec["options"] == options
    assert {name for name, said in options.items() if said.get("no_log")} == {"appliance_api_key", "appliance_tls_key"}


def test_the_collection_is_built_and_installed_without_a_network(tmp_path: Path) -> None:
    env = {"PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "LANG": "C.UTF-8", "ANSIBLE_COLLECTIONS_PATH": str(tmp_path / "c")}
    def run(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, env=env, text=True, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout

    run("ansible-galaxy", "collection", "build", str(COLLECTION), "--output-path", str(tmp_path))
    (tarball,) = tmp_path.glob("appliance-fleet-*.tar.gz")
    run("ansible-galaxy", "collection", "install", str(tarball), "-p", str(tmp_path / "c"))
    assert "appliance_repository_uri" in run("ansible-doc", "-t", "role", "appliance.fleet.appliance")
    run("ansible-playbook", "--syntax-check", "-i", "localhost,", "appliance.fleet.appliance")


def test_a_secret_of_a_vault_inside_the_settings_is_written_as_what_it_says(tmp_path: Path) -> None:
    """Ansible's own filters write it as the vault's text."""
    env = {"PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "LANG": "C.UTF-8", "ANSIBLE_COLLECTIONS_PATH": str(TOOLS / "collections")}
    (tmp_path / "password").write_text("password\n")
    locked = subprocess.run(["ansible-vault", "encrypt_string", "--vault-password-file", "password", "s3cret", "--name", "token"],
                            cwd=tmp_path, env=env, text=True, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    assert "!vault" in locked
    (tmp_path / "book.yml").write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": [
        {"name": "Say it", "ansible.builtin.debug": {"msg": "{{ {'worker': {'env': {'T': token}}} | appliance.fleet.settings_text('# mark') }}"}}]}]))
    (tmp_path / "vars.yml").write_text(locked)
    said = subprocess.run(["ansible-playbook", "-i", "localhost,", "--vault-password-file", "password", "-e", "@vars.yml", "book.yml"],
                          cwd=tmp_path, env=env, text=True, check=True, stdout=subprocess.PIPE).stdout
    assert "T: s3cret" in said


def test_no_module_of_another_collection_is_used() -> None:
    for path in (COLLECTION / "roles/appliance").rglob("*.yml"):
        for task in yaml.safe_load(path.read_text()) or [] if "tasks" in path.parts else []:
            for word in _keys(task):
                assert "." not in word or word.startswith(("ansible.builtin.", "appliance.fleet.")), f"{path}: {word}"


def _keys(task: dict[str, Any]) -> Iterator[str]:
    for word, value in task.items():
        yield word
        if word in ("block", "always", "rescue"):
            for inner in value:
                yield from _keys(inner)


# ---- real vLLM ------------------------------------------------------------------------------------------------------


def test_real_packages_pushed_to_a_closed_off_node_answer_paris(make_host: Callable[..., Host], needed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "debs"
    folder.mkdir()
    for deb in (*DEBS.glob("*.deb"), *needed.glob("python3-sdnotify_*.deb")):
        (folder / deb.name).symlink_to(deb)
    with make_host(disk="12G") as host:
        settings = {"context": 2048, "max_running": 2, "trial_s": 5, "drain_s": 5}
        fleet = Fleet(tmp_path, host, appliance_source="packages", appliance_packages_dir=str(folder), appliance_config=settings)
        first = fleet.play(appliance_verify_expect="Paris").ok()
        assert "native" in fleet.node.status()["kernel"]
        pid = fleet.worker()
        again = fleet.play(appliance_verify_expect="Paris").ok()
        assert again.changed == 0, again.changes()
        assert fleet.worker() == pid
        report(first, again)


def report(first: Ran, again: Ran) -> None:
    (ROOT / "build/system").mkdir(parents=True, exist_ok=True)
    (ROOT / "build/system/ansible.json").write_text(json.dumps({"first run s": round(first.seconds, 1), "second run s": round(again.seconds, 1)}))


def certificate(folder: Path) -> tuple[str, str]:
    """A self-signed certificate and its key."""
    folder.mkdir()
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=node", "-addext", "subjectAltName=DNS:node",
                    "-keyout", folder / "key", "-out", folder / "cert"], check=True, capture_output=True)
    return (folder / "cert").read_text(), (folder / "key").read_text()


