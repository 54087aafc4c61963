"""What a package build refuses and in which words, and that the lists it works from agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
TOOLS = ("dh", "dpkg-deb", "strip", "g++")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = {"pyyaml": "yaml"}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("lacks", "refused"), [
    ("dh", "build-deb: dh is missing; apt install debhelper binutils"),
    ("g++", "build-deb: g++ is missing, which builds the kernels; apt install g++"),
    ("agent", "build-deb: there is no agent's environment in {agent}; make .venv/.model"),
    ("worker", "build-deb: there is no worker's environment in {worker}; make .venv-worker/.installed"),
    ("python", "build-deb: {worker} is of Python 3.99 and this distribution has 3.{minor}; make it with PYTHON=python3.{minor}"),
    ("commit", "build-deb: no commit to take the time of; set SOURCE_DATE_EPOCH (seconds)"),
])
def test_a_build_that_cannot_be_is_refused_in_one_line(tmp_path: Path, lacks: str, refused: str) -> None:
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("no /usr/bin/python3")
    tools, agent, worker = (tmp_path / name for name in ("tools", "agent", "worker"))
    for name in TOOLS:
        if name != lacks:
            program(tools / name, "exit 1")
    for name in ("sh", "dirname", "realpath", "mkdir"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    minor = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True, check=True).stdout.strip()
    for folder in (agent, worker):
        if folder.name != lacks:
            program(folder / "bin/python", f"echo {99 if lacks == 'python' else minor}")
    if lacks == "commit":
        program(tools / "git", "exit 128")
    target = tmp_path / "deb"
    done = subprocess.run([PACKAGING / "build-deb", agent, worker, target], env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (78, refused.format(agent=agent, worker=worker, minor=minor) + "\n")
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(("lacks", "refused"), [
    ("aptly", "build-repository: aptly is missing; apt install aptly gpg"),
    ("packages", "build-repository: there are no packages in {debs}; make deb"),
])
def test_a_repository_of_nothing_is_refused_in_one_line(tmp_path: Path, lacks: str, refused: str) -> None:
    tools, debs = tmp_path / "tools", tmp_path / "deb"
    for name in ("aptly", "gpg"):
        if name != lacks:
            program(tools / name, "exit 1")
    for name in ("sh", "realpath", "mkdir", "ls"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    done = subprocess.run([PACKAGING / "build-repository", debs, tmp_path / "apt"], env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (78, refused.format(debs=debs) + "\n")


def test_an_environment_of_another_python_makes_no_tree(tmp_path: Path) -> None:
    (tmp_path / "environment/lib/python3.99/site-packages").mkdir(parents=True)
    done = subprocess.run([sys.executable, PACKAGING / "worker_tree.py", tmp_path / "environment", "none.whl", tmp_path / "target"], capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "python3.99" in done.stderr
    assert not (tmp_path / "target").exists()


def test_an_environment_that_is_not_the_locks_makes_no_tree(tmp_path: Path) -> None:
    site = tmp_path / f"environment/lib/python3.{sys.version_info.minor}/site-packages"
    (site / "torch-1.0.dist-info").mkdir(parents=True)
    (site / "torch-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    done = subprocess.run([sys.executable, PACKAGING / "worker_tree.py", tmp_path / "environment", "none.whl", tmp_path / "target"], capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "differs from worker.lock" in done.stderr
    assert not (tmp_path / "target").exists()


def test_the_package_asks_for_the_versions_that_the_project_asks_for() -> None:
    control = (PACKAGING / "debian/control").read_text()
    for requirement in PROJECT["project"]["dependencies"]:
        name, least = requirement.split(">=")
        assert f"python3-{NAMES.get(name, name)} (>= {least})" in control
    assert f"python3 ({PROJECT['project']['requires-python'].replace('>=', '>= ')})" in control


def test_what_is_left_out_is_in_the_lock_and_has_a_reason() -> None:
    locked = set(re.findall(r"^([A-Za-z0-9_.-]+)==", (PACKAGING / "worker.lock").read_text(), re.M))
    for line in (PACKAGING / "worker.omit").read_text().splitlines():
        if line and not line.startswith("#"):
            words, _, reason = line.partition("#")
            kind, what = words.split()
            assert reason.strip() or kind == "code", line
            assert kind in ("dist", "path", "code"), line
            assert kind != "dist" or what in locked | {"pip"}, line
