"""Where files go, as a table: environment, user and home -> the four folders."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from appliance.directories import Directories, ensure, locate, usable_home
from appliance.errors import StoreError

SERVICE = {"STATE_DIRECTORY": "/var/lib/appliance", "CACHE_DIRECTORY": "/var/cache/appliance",
           "RUNTIME_DIRECTORY": "/run/appliance"}
XDG = {"XDG_DATA_HOME": "/d", "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c", "XDG_RUNTIME_DIR": "/run/user/7"}
SYSTEM = ("/var/lib/appliance/store", "/var/lib/appliance/state", "/var/cache/appliance", "/run/appliance")
SPARE = "/var/tmp/appliance-7"
HOMELESS = (f"{SPARE}/store", f"{SPARE}/state", f"{SPARE}/cache", "/tmp/appliance-7")


@pytest.mark.parametrize(("env", "uid", "home", "expected"), [
    ({}, 0, "/root", SYSTEM),
    (SERVICE, 7, None, SYSTEM),
    (SERVICE, 0, "/root", SYSTEM),
    ({"STATE_DIRECTORY": "/var/lib/private/a:/var/lib/b"}, 0, None,
     ("/var/lib/private/a/store", "/var/lib/private/a/state", "/var/cache/appliance", "/run/appliance")),
    ({}, 7, "/home/u", ("/home/u/.local/share/appliance/store", "/home/u/.local/state/appliance",
                        "/home/u/.cache/appliance", "/tmp/appliance-7")),
    (XDG, 7, "/home/u", ("/d/appliance/store", "/s/appliance", "/c/appliance", "/run/user/7/appliance")),
    (XDG, 7, None, ("/d/appliance/store", "/s/appliance", "/c/appliance", "/run/user/7/appliance")),
    ({"XDG_CACHE_HOME": "relative"}, 7, "/home/u", ("/home/u/.local/share/appliance/store",
     "/home/u/.local/state/appliance", "/home/u/.cache/appliance", "/tmp/appliance-7")),
    ({}, 7, None, HOMELESS),
    ({"XDG_RUNTIME_DIR": ""}, 7, None, HOMELESS),
    ({"APPLIANCE_HOME": "/x", **SERVICE, **XDG}, 7, "/home/u", ("/x/store", "/x/state", "/x/cache", "/x/run")),
], ids=["root", "unit", "unit as root", "list", "user", "xdg", "xdg without home", "relative", "case_014 no home",
        "case_014 empty", "one folder"])
def test_places(env: dict[str, str], uid: int, home: str | None, expected: tuple[str, ...]) -> None:
    store, state, cache, runtime = map(Path, expected)
    assert locate(env, uid=uid, home=home) == Directories(store=store, state=state, cache=cache, runtime=runtime)


def test_the_setting_moves_the_store_alone() -> None:
    found = locate({"APPLIANCE_HOME": "/x"}, uid=7, home=None, store="/big/store")
    assert (found.store, found.state) == (Path("/big/store"), Path("/x/state"))


def test_case_014_what_is_no_home(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert usable_home({"HOME": str(tmp_path)}) == str(tmp_path)
    for home in ("/", "//", "/.", "", "relative", "/nonexistent", "/proc/1", str(tmp_path / "file")):
        assert usable_home({"HOME": home}) is None, home
    assert usable_home({}) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become a user without a passwd entry")
def test_case_014_a_user_without_a_name_and_with_a_read_only_home(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    script = (
        "import os\n"
        "from appliance.directories import from_process, ensure\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "d = from_process(os.environ)\n"
        "print(d.store, d.state, d.cache, d.runtime)\n"
        "ensure(d.store), ensure(d.runtime, mode=0o700)\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", script], env={"HOME": "/"}, capture_output=True, text=True)
        assert done.stderr == ""
        assert done.stdout.split() == [p.replace("-7", "-54321") for p in HOMELESS]
        assert Path("/var/tmp/appliance-54321/store").is_dir()
    finally:
        subprocess.run(["rm", "-rf", "/var/tmp/appliance-54321", "/tmp/appliance-54321"], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a folder of somebody else")
def test_a_folder_that_somebody_else_made_first_is_not_used() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shared = Path(folder)
        shared.chmod(0o1777)
        _try_foreign(shared)


def _try_foreign(shared: Path) -> None:
    (shared / "appliance-54321").mkdir()
    os.chown(shared / "appliance-54321", 12345, 12345)
    (shared / "appliance-54321").chmod(0o777)
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from appliance.directories import ensure\n"
        "from appliance.errors import StoreError\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "try: ensure(Path(sys.argv[1]))\n"
        "except StoreError as error: print(error.line)\n"
    )
    target = str(shared / "appliance-54321" / "store")
    done = subprocess.run([sys.executable, "-c", script, target], capture_output=True, text=True)
    assert done.stderr == ""
    assert "belongs to user 12345, not to user 54321" in done.stdout


def test_ensure_says_what_is_in_the_way(tmp_path: Path) -> None:
    assert ensure(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot create the folder"):
        ensure(tmp_path / "file" / "below")
