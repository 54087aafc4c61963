"""Hosts before an installation, kept as layers: Debian's packages that ours need, settings and model of the fake worker.

Does: fetch packages of Debian by this machine's apt, and make a layer with them. Does not: install ours. Rules: where apt
cannot fetch, the test is skipped and says why.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from tests.packages.node import SITE
from tests.system.installation import FAKE_CONTROL, put_tiny_model
from tests.system.testhost import base
from tests.system.testhost.host import Host

NEEDED = ("python3-sdnotify",)
"""Dependencies that the test hosts' base does not have; fetched once by this machine's apt."""


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
