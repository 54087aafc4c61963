"""The service as it is installed on a node, as layers for test hosts: once per test run, from this checkout.

`fake`: the worker's Python is the fake worker of tests/process, and a tiny model is in the store. `real`: Debian's own
Python with the worker environment's packages of this checkout bound read-only, and the embedded model, not quantized yet.
Both have the same agent, unit and accounts, put there by `make install-agent`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from uuid import uuid4

from appliance import manifest
from appliance.store import Store
from tests.process.conftest import CONFIG
from tests.process.fake_models import int4, write_model
from tests.system.testhost.host import Host

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build/system"
WORKER = "usr/lib/appliance/worker"
WORKER_PACKAGES = REPOSITORY / ".venv-worker/lib/python3.11/site-packages"
BOUND = "/usr/lib/appliance/worker-packages"
FAKE_PYTHON = """#!/bin/sh
# The fake worker's Python. A file /run/fake/slow-quantize makes quantizing take as many seconds as it says, with progress;
# while there is a file /run/fake/stuck-quantize it stands still.
if [ "$2" = appliance.quantize ] || [ "$2" = appliance.kernels.prepare ]; then
  left=$(cat /run/fake/slow-quantize 2>/dev/null || echo 0)
  while [ "$left" -gt 0 ]; do
    echo "{\\"event\\": \\"progress\\", \\"done_bytes\\": 1, \\"total_bytes\\": $left, \\"item\\": \\"slow\\"}"; sleep 1; left=$((left - 1))
  done
  while [ -e /run/fake/stuck-quantize ]; do sleep 1; done
  exec /usr/lib/appliance/agent/bin/python /usr/lib/appliance/fake/fake_quantizer.py "$@"
fi
exec /usr/bin/python3 /usr/lib/appliance/fake/fake_worker.py "$@"
"""
FAKE_SETTINGS = """model: tiny
drain_s: 10
trial_s: 5
probe_s: 2
memory: {reserve: 64M}
worker: {env: {FAKE: ok, FAKE_CONTROL: /run/fake}}
"""
REAL_SETTINGS = """drain_s: 10
trial_s: 20
context: 2048
max_running: 2
memory: {reserve: 64M}
"""
DROP_IN = """# A test host's own boot id is a mount over /proc, which ProtectProc= replaces by a new /proc.
[Service]
ReadWritePaths=-/run/fake
BindReadOnlyPaths=-/run/.boot-id:/proc/sys/kernel/random/boot_id
"""
FAKE_CONTROL = "d /run/fake 0777 root root -\n"


def install_tree(target: Path) -> Path:
    """What `make install` puts on a node, without the worker's environment."""
    shutil.rmtree(target, ignore_errors=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:  # pip builds in the checkout
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _make_install(target)
    assert done.returncode == 0, done.stdout
    drop_in = target / "usr/lib/systemd/system/appliance.service.d/testhost.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(DROP_IN)
    return target


def _make_install(target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-s", "install", f"DESTDIR={target}", "WORKER_ENV=0"], cwd=REPOSITORY, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "APPLIANCE_HOME": "/tmp"})


def fake_tree(target: Path) -> Path:
    install_tree(target)
    folder = target / "usr/lib/appliance/fake"
    folder.mkdir()
    for name in ("fake_worker.py", "fake_quantizer.py"):
        shutil.copy(REPOSITORY / "tests/process" / name, folder)
    python = target / WORKER / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (target / "usr/lib/tmpfiles.d/fake.conf").write_text(FAKE_CONTROL)
    (target / "etc/appliance/appliance.yaml").write_text(FAKE_SETTINGS)
    put_tiny_model(target / "var/lib/appliance/store")
    return target


def put_tiny_model(folder: Path) -> None:
    """The model of FAKE_SETTINGS, in a store in this folder."""
    shapes = {
        **int4("model.embed_tokens", 256, 64, 32), **int4("model.layers.0.self_attn.q_proj", 64, 64, 32),
        **int4("model.layers.0.mlp.down_proj", 64, 64, 32), "model.norm.weight": ("BF16", (64,)),
    }
    store = Store(folder)
    with store.begin(manifest.key("1" * 64, {})) as draft:
        write_model(draft.folder, CONFIG, shapes)
        store.commit(draft, source="tiny", source_digest="1" * 64, recipe={}, report={}, created="2026-01-01T00:00:00", name="tiny")


def real_tree(target: Path) -> Path:
    """The package itself is a copy: the checkout's editable install does not exist on the host."""
    install_tree(target)
    worker = target / WORKER
    site = worker / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (worker / "bin").mkdir()
    (worker / "bin/python").symlink_to("/usr/bin/python3")
    (worker / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    # A folder added by a .pth file has its own .pth files ignored: those of the editable install too.
    (site / "bound.pth").write_text(f"{BOUND}\n")
    shutil.copytree(REPOSITORY / "appliance", site / "appliance", ignore=shutil.ignore_patterns("__pycache__"))
    for info in WORKER_PACKAGES.glob("appliance-*.dist-info"):
        shutil.copytree(info, site / info.name)
    (target / "etc/appliance/appliance.yaml").write_text(REAL_SETTINGS)
    return target


def make_layer(kind: str) -> str:
    """Install on a fresh host and keep the result as a layer; returns its name."""
    tree = {"fake": fake_tree, "real": real_tree}[kind](BUILD / f"tree-{kind}-{os.getpid()}")
    with Host(f"install-{uuid4().hex[:6]}") as host:
        host.push(tree, "/")
        shutil.rmtree(tree)
        # What the Debian package's scripts will do.
        host.run("systemd-sysusers && systemd-tmpfiles --create && chown -R appliance:appliance /var/lib/appliance && "
                 "chmod 750 /var/lib/appliance && systemctl daemon-reload", check=True)
        host.poweroff()
        layer = f"appliance-{kind}-{os.getpid()}"
        host.commit(layer)
    return layer


def host(layer: str, **options: Any) -> Host:
    """A host with the service installed; the worker's packages are bound where the layer needs them."""
    binds = [(str(WORKER_PACKAGES), BOUND)] if "-real-" in layer else []
    return Host(f"t-{uuid4().hex[:8]}", layers=[layer], binds=binds, **options)
