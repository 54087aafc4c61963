"""The worker's installed versions: which interpreter is meant, which folders may go, and that a hostile record takes none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance import workers
from appliance.errors import ConfigError
from appliance.jobs import find_worker_python
from appliance.settings import Settings
from appliance.trial import candidate as make_candidate
from appliance.trial import difference, worker_version


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What packages leave: three versions, the link on the newest, and the package's own work."""
    for version in ("1", "2", "3", ".new"):
        python = tmp_path / "workers" / version / "bin/python"
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
    (tmp_path / "worker").symlink_to("workers/3")
    return tmp_path


def superfluous(home: Path) -> list[str]:
    return [tree.name for tree in workers.superfluous(home / "workers", home / "worker", home / "record.json")]


def write(home: Path, **record: Any) -> None:
    (home / "record.json").write_text(json.dumps(record))


def candidate(home: Path, version: str) -> dict[str, str]:
    return {"worker_python": str(home / "workers" / version / "bin/python")}


def test_the_packages_worker_is_found_by_the_folder_of_its_version(home: Path) -> None:
    found = find_worker_python(Settings(), prefix="/nowhere", packaged=str(home / "worker/bin/python"))
    assert found == str(home / "workers/3/bin/python")
    assert worker_version(found) == "3"


def test_a_folder_of_make_install_keeps_its_name(home: Path) -> None:
    plain = home / "workers/1/bin/python"
    assert find_worker_python(Settings(), prefix="/nowhere", packaged=str(plain)) == str(plain)
    assert worker_version("/usr/lib/appliance/worker/bin/python") is None
    assert worker_version("python") is None


def test_an_upgrade_is_shown_by_its_versions() -> None:
    old, new = (make_candidate(model="m", digest="d", settings={}, versions={}, worker_python=f"/usr/lib/appliance/workers/{version}/bin/python")
                for version in ("1.0", "1.1"))
    assert difference(old, new) == "worker: 1.0 -> 1.1"


def test_case_064_an_interpreter_that_is_gone_is_named(home: Path) -> None:
    python = home / "workers/3/bin/python"
    python.unlink()
    python.symlink_to("/usr/bin/python3.99")
    with pytest.raises(ConfigError, match=r"the node's interpreter changed: .* is /usr/bin/python3\.99, which is not there any more"):
        find_worker_python(Settings(), prefix="/nowhere", packaged=str(home / "worker/bin/python"))


@pytest.mark.parametrize(("good", "trial", "gone"), [
    ("3", None, ["1", "2"]),      # kept
    ("2", "3", ["1"]),            # on trial
    ("2", None, ["1"]),           # rolled back
    ("1", "2", []),               # a second upgrade during a trial: until the next start
    (None, "3", ["1", "2"]),      # the first configuration
    (None, None, ["1", "2"]),     # never started
])
def test_what_may_still_be_needed_stays(home: Path, good: str | None, trial: str | None, gone: list[str]) -> None:
    write(home, good=candidate(home, good) if good else None,
          trial={"candidate": candidate(home, trial)} if trial else None)
    assert superfluous(home) == gone


def test_without_a_record_only_the_newest_is_needed(home: Path) -> None:
    assert superfluous(home) == ["1", "2"]


def as_link(record: Path) -> None:
    target = record.with_name("elsewhere")
    record.rename(target)
    record.symlink_to(target)


def as_pipe(record: Path) -> None:
    record.unlink()
    os.mkfifo(record)


def as_folder(record: Path) -> None:
    record.unlink()
    record.mkdir()


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "garbage": lambda record: record.write_bytes(b"\xff{"),
    "a list": lambda record: record.write_text("[]"),
    "another trial": lambda record: record.write_text('{"trial": [1]}'),
    "deep": lambda record: record.write_text("[" * 100_000),
    "large": lambda record: record.write_text(" " * (workers.MAX_RECORD_BYTES + 1)),
    "a link": as_link, "a pipe": as_pipe, "a folder": as_folder,
}


@pytest.mark.parametrize("spoil", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_record_that_cannot_be_read_takes_nothing(home: Path, spoil: Callable[[Path], object]) -> None:
    write(home, good=candidate(home, "3"))
    spoil(home / "record.json")
    assert superfluous(home) == []


def test_a_state_folder_that_is_not_there_takes_nothing(home: Path) -> None:
    """It may not be mounted."""
    assert workers.superfluous(home / "workers", home / "worker", home / "state/record.json") == []


def test_a_link_above_the_versions_hides_no_good_one(home: Path) -> None:
    """/usr/lib/appliance on another disk: the agent notes the place behind the link."""
    real = home / "disk"
    real.mkdir()
    (home / "workers").rename(real / "workers")
    (home / "worker").rename(real / "worker")
    (home / "appliance").symlink_to(real)
    write(home, good={"worker_python": str(real / "workers/2/bin/python")})
    found = workers.superfluous(home / "appliance/workers", home / "appliance/worker", home / "record.json")
    assert [tree.name for tree in found] == ["1"]


def test_a_version_loses_its_name_before_its_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a version that kept its name would be taken for one to go back to; the rest goes the next time."""
    write(home, good=candidate(home, "3"))

    def cut_off(tree: Path) -> None:
        (tree / "bin/python").unlink()
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(workers.shutil, "rmtree", cut_off)
        with pytest.raises(OSError, match="power cut"):
            workers.remove(home / "workers", home / "worker", home / "record.json")
    assert not (home / "workers/1").exists()
    workers.remove(home / "workers", home / "worker", home / "record.json")
    assert {path.name for path in (home / "workers").iterdir()} == {".new", "3"}


@pytest.mark.parametrize("name", ["../../etc/bin/python", "/etc/passwd", "", "\0", "workers/3/bin/python"])
def test_names_in_the_record_are_compared_and_nothing_else(home: Path, name: str) -> None:
    write(home, good={"worker_python": name}, trial={"candidate": {"worker_python": [name]}})
    assert superfluous(home) == ["1", "2"]


def test_links_and_files_beside_the_versions_stay(home: Path) -> None:
    (home / "workers/link").symlink_to("/etc")
    (home / "workers/file").touch()
    write(home, good=candidate(home, "3"))
    assert superfluous(home) == ["1", "2"]


def test_without_the_link_nothing_is_known_to_be_superfluous(home: Path) -> None:
    (home / "worker").unlink()
    assert superfluous(home) == []


def test_the_end_of_a_trial_is_said_again_and_again(tmp_path: Path) -> None:
    workers.settled(tmp_path)
    workers.settled(tmp_path)
    assert (tmp_path / workers.SETTLED).exists()
    workers.settled(tmp_path / "missing")
