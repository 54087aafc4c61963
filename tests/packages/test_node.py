"""The packages on a node that has no worker: scripts that must not fail, settings and data that must not be lost.

Only the agent's package is installed (it is small), so each case has a fresh host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from tests.packages.conftest import ROOT
from tests.packages.node import OURS, Node
from tests.system.service import UNIT
from tests.system.testhost.host import Host

ALONE = ("--no-install-recommends",)
DEFAULT_SETTINGS = "20599f7496c307469f7d149d0876d11f"
CHROOT = ("mkdir -p /srv/root && mount --bind / /srv/root && mount --bind /dev /srv/root/dev && mount --bind /srv/repository /srv/root/srv/repository"
          " && chroot /srv/root sh -c 'apt-get update -q && apt-get install -y -q --no-install-recommends appliance'")


def test_case_066_without_worker_and_model_it_installs_and_says_what_is_missing(node: Node) -> None:
    node.install("appliance", options=ALONE)
    assert node.wait_unit(["failed"], 30) == "failed"
    assert node.show("ExecMainStatus")["ExecMainStatus"] == "78"
    assert "worker" in node.reason()
    assert node.host.run(["systemctl", "is-enabled", UNIT]).out.strip() == "enabled"
    assert node.verify("appliance") == ""


def test_case_066_masked(node: Node) -> None:
    node.host.run(["systemctl", "mask", UNIT], check=True)
    node.install("appliance", options=ALONE)
    assert node.state() == "inactive"
    assert node.host.run(["systemctl", "is-enabled", UNIT]).out.strip() == "masked"
    node.apt("purge", "appliance").ok()


def test_case_066_policy_forbids_starting(node: Node) -> None:
    node.host.write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n", 0o755)
    node.install("appliance", options=ALONE)
    assert node.state() == "inactive"


def test_case_066_in_a_chroot(node: Node) -> None:
    """As an image is built: no systemd to talk to, no /proc."""
    done = node.host.run(CHROOT, timeout_s=300)
    assert done.rc == 0, done.out[-2000:] + done.err[-2000:]
    assert node.state() == "inactive"
    assert "appliance" in node.host.run(["getent", "passwd", "appliance"]).out
    node.host.reboot()
    assert node.wait_unit(["failed"], 30) == "failed"  # enabled, and tried
    assert node.host.run(["stat", "-c", "%U %a", "/var/lib/appliance"]).out.split() == ["appliance", "750"]
    assert node.show("ExecMainStatus")["ExecMainStatus"] == "78"


def test_case_066_a_broken_configuration_does_not_stop_a_reinstallation(node: Node) -> None:
    node.install("appliance", options=ALONE)
    node.write_settings("listen: [this is\n")
    assert node.apt("install", "--reinstall", "appliance").rc == 0
    assert "appliance.yaml" in node.reason()
    assert node.file("/etc/appliance/appliance.yaml").read_text() == "listen: [this is\n"


def test_case_067_edited_settings_stay_as_they_are(node: Node) -> None:
    """No question without a terminal: the file is as shipped in every release, so only one side ever changed."""
    node.install("appliance", options=ALONE)
    text = "# mine\nlisten: {port: 8123}\n"
    node.write_settings(text)
    done = node.apt("install", "--reinstall", "appliance")
    assert done.rc == 0, done.err
    assert node.file("/etc/appliance/appliance.yaml").read_text() == text
    node.apt("remove", "appliance").ok()
    node.install("appliance", options=ALONE)
    assert node.file("/etc/appliance/appliance.yaml").read_text() == text


def test_case_068_removal_keeps_and_purge_takes_ours_only(make_node: Callable[..., Host]) -> None:
    """A store that is a mount of its own, a cache that is a link, and a file of somebody else in /etc/appliance."""
    with make_node(volumes=[("/var/lib/appliance/store", "64M")]) as host:
        node = Node(host)
        before = node.files()
        host.run("mkdir -p /srv/fast && echo theirs >/srv/fast/file && ln -s /srv/fast /var/cache/appliance", check=True)
        node.install("appliance", options=ALONE)
        host.run("echo model >/var/lib/appliance/store/model && echo theirs >/etc/appliance/notes && touch /var/lib/appliance/own", check=True)
        node.apt("remove", "appliance").ok()
        for path in ("/etc/appliance/appliance.yaml", "/var/lib/appliance/own", "/var/lib/appliance/store/model"):
            assert node.file(path).exists(), path
        assert node.processes() == []
        done = node.apt("purge", "appliance")
        assert done.rc == 0, done.err
        said = done.out + done.err
        assert "link" in said
        assert "not all of /var/lib/appliance" in said
        assert "holds files of yours" in said
        assert node.file("/var/lib/appliance/store/model").read_text() == "model\n"
        assert node.file("/srv/fast/file").read_text() == "theirs\n"
        assert node.file("/etc/appliance/notes").read_text() == "theirs\n"
        assert not node.file("/var/lib/appliance/own").exists()
        assert not node.file("/var/cache/appliance").is_symlink()
        left = {path for path in node.files().keys() - before.keys() if any(path == one or path.startswith(f"{one}/") for one in OURS)}
        assert left == {"/etc/appliance", "/etc/appliance/notes"}
        node.install("appliance", options=ALONE)  # and again after each


def test_purge_leaves_the_disk_as_it_was(node: Node) -> None:
    before = node.files()
    node.install("appliance", options=ALONE)
    node.wait_unit(["failed"], 30)
    node.apt("purge", "appliance").ok()
    after = node.files()
    assert before.keys() - after.keys() == set()
    left = {path for path in after.keys() - before.keys() if "appliance" in path or "python3" in path}
    assert left == set()


def test_case_064_the_agent_outlives_a_change_of_the_nodes_python(node: Node) -> None:
    """Its modules are found by whatever minor version python3 is; the worker's package names the one it fits."""
    node.install("appliance", options=ALONE)
    links = node.host.run("readlink /usr/lib/appliance/agent/lib/python3.1?").out.split()
    assert links == ["python3"] * 4
    depends = node.host.run(["apt-cache", "depends", "appliance-worker"]).out
    shown = node.host.run(["apt-cache", "show", "appliance-worker"]).out
    assert "python3 (>= 3.11), python3 (<< 3.12)" in shown, depends


@pytest.mark.parametrize("change", [
    "rm /usr/lib/appliance/agent/lib/python3.11",  # as if python3 were a version that this release does not know
    "dpkg --force-depends --purge python3-click",
], ids=["another Python", "a package forced off"])
def test_case_064_a_changed_interpreter_is_one_line(node: Node, change: str) -> None:
    node.install("appliance", options=ALONE)
    node.host.run(change, check=True)
    done = node.control("status")
    assert done.rc == 78
    assert "the node's interpreter changed" in done.err
    assert len(done.err.splitlines()) == 1
    node.host.run(["systemctl", "restart", UNIT])
    node.wait_unit(["failed"], 30)
    assert node.show("NRestarts")["NRestarts"] == "0"  # and it is not tried for ever


@pytest.mark.parametrize("architecture", ["i386", "armhf", "arm64"])
def test_case_052_apt_offers_no_worker_to_another_userland(node: Node, architecture: str) -> None:
    """What the agent says of such a node: tests/hosts/userland-i386, armhf-on-aarch64 and musl."""
    node.apt("update").ok()
    done = node.apt("-o", f"APT::Architecture={architecture}", "-o", f"APT::Architectures={architecture}", "-s", "install", "appliance-worker")
    assert done.rc == 100
    assert "appliance-worker" in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("E:")]) == 1


def test_pages_and_completion_are_installed(node: Node) -> None:
    node.install("appliance", options=ALONE)
    for path in ("man/man1/applianctl-model.1.gz", "bash-completion/completions/applianctl", "zsh/vendor-completions/_applianctl",
                 "fish/vendor_completions.d/applianctl.fish", "doc/appliance/systemd.md"):
        assert node.file(f"/usr/share/{path}").stat().st_size > 100
    words = node.host.run(["applianctl"], env={"_APPLIANCTL_COMPLETE": "bash_complete", "COMP_WORDS": "applianctl mod", "COMP_CWORD": "1"}).out
    assert "model" in words


def test_the_default_settings_never_change() -> None:
    """They are comments only. A changed conffile makes unattended upgrades of edited nodes stop and ask (case 067): news
    about settings go to docs/configuration.md."""
    assert hashlib.md5((ROOT / "systemd/appliance.yaml").read_bytes(), usedforsecurity=False).hexdigest() == DEFAULT_SETTINGS
