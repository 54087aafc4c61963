"""Whatever changes the store, interrupted in every way: the store holds whole objects or none (case 32).

The agent is the real command line; only the quantizing child is a fake, a real process that speaks the protocol.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.store import HEADROOM_BYTES, Store
from tests.process.fake_models import fake_python, source_folder

ROUNDS = 20
MANY = 50
MIB = 1 << 20


class Node:
    """An APPLIANCE_HOME with the real command line and a fake worker."""

    def __init__(self, home: Path, tools: Path) -> None:
        self.store = Store(home / "store")
        self.env = {
            "PATH": os.environ["PATH"], "APPLIANCE_HOME": str(home), "APPLIANCE_WORKER_PYTHON": fake_python(tools),
            "NOTIFY_SOCKET": "/run/not-for-the-child",
        }

    def start(self, *args: str, group: str = "model") -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-m", "appliance.cli.main", group, *args], env=self.env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/")

    def run(self, *args: str, group: str = "model") -> tuple[int, str, str]:
        process = self.start(*args, group=group)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def drafts(self) -> list[str]:
        tmp = self.store.root / "tmp"
        return sorted(p.name for p in tmp.iterdir()) if tmp.is_dir() else []

    def check(self) -> None:
        """Every object is whole and every name leads to one."""
        for digest in self.store.digests():
            assert self.store.verify(digest) == []
        for name in self.store.names():
            assert self.store.get(name).names


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "home", tmp_path)


def _eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_case_032_kill_at_any_moment_leaves_no_plausible_half(node: Node, tmp_path: Path) -> None:
    assert node.run("add", str(source_folder(tmp_path / "first", fill=1)), "--name", "first")[0] == 0
    behaviour = {"slices": 20, "pause_s": 0.02}
    began = time.monotonic()
    assert node.run("add", str(source_folder(tmp_path / "measured", fill=2, **behaviour)), "--name", "measured")[0] == 0
    whole_s = time.monotonic() - began
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    left_behind = 0
    for i in range(ROUNDS):
        source = source_folder(tmp_path / f"source{i}", fill=10 + i, **behaviour)
        agent = node.start("add", str(source), "--name", f"round{i}")
        time.sleep(chance.uniform(0, whole_s * 1.1))
        agent.kill()
        agent.communicate()
        node.check()
        left_behind += bool(node.drafts())
        # An unfinished round has no name; a finished one has a whole object behind its name.
        name = f"round{i}"
        assert name not in node.store.names() or node.store.has(node.store.names()[name]), f"seed {seed}"
    assert left_behind, f"no round was interrupted while it wrote (seed {seed})"
    assert node.run("verify", "first")[0] == 0
    # What the last killed agent's child still holds is free once that child notices that nobody reads.
    again = ("add", str(tmp_path / "source0"), "--name", "again")
    _eventually(lambda: node.run(*again)[0] == 0 and not node.store.sweep() and not node.drafts())
    assert node.drafts() == []
    node.check()


@pytest.mark.heavy
def test_case_032_fifty_kills_of_everything_that_changes_the_store(node: Node, tmp_path: Path) -> None:
    """add, import, verify, repair, gc: killed at a random moment. The store is valid each time, nothing that was
    committed is lost, and a damaged model that was being repaired is still the damaged one or the whole one."""
    node.env["APPLIANCE_WORKER_PYTHON"] = fake_python(tmp_path, FAKE_KERNELS="native,aten")
    for name, fill in (("kept", 1), ("worn", 2), ("carried", 3)):
        folder = source_folder(tmp_path / name, fill=fill, slices=8, pause_s=0.02)
        assert node.run("add", str(folder), "--name", name)[0] == 0
    bundle = tmp_path / "carried.bundle"
    assert node.run("export", "carried", str(bundle), "--with-kernel-cache", group="bundle")[0] == 0
    assert node.run("remove", "carried")[0] == 0
    commands = {"add": ("model", "add", str(tmp_path / "worn"), "--name", "worn"), "import": ("bundle", "import", str(bundle)),
                "verify": ("model", "verify"), "repair": ("model", "repair", "worn"), "gc": ("store", "gc")}
    took_s = {}
    for what, (group, *args) in commands.items():
        began = time.monotonic()
        assert node.run(*args, group=group)[0] == 0
        took_s[what] = time.monotonic() - began
    took_s["add"] += 0.5  # the slices of a source that is new
    took_s["repair"] += 0.5
    kept, worn = node.store.names()["kept"], node.store.names()["worn"]
    whole = {file.name: file.read_bytes() for file in node.store.get("kept").path.iterdir()}
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    killed: dict[str, int] = {}
    for i in range(MANY):
        what = ("add", "import", "verify", "repair", "gc")[i % 5]
        weights = node.store.root / "objects" / worn / "model.safetensors"
        if what == "repair" and not node.store.verify(worn):
            data = weights.read_bytes()
            weights.chmod(0o644)
            weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        if what == "gc":  # something to take away
            orphan = node.store.names().get(f"round{i - 4}")
            if orphan:
                (node.store.root / "names" / f"round{i - 4}").unlink()
        if what == "import" and "carried" in node.store.names():
            assert node.run("remove", "carried")[0] == 0
        source = source_folder(tmp_path / f"source{i}", fill=10 + i, slices=8, pause_s=0.02)
        group, *args = ("model", "add", str(source), "--name", f"round{i}") if what == "add" else commands[what]
        agent = node.start(*args, group=group)
        time.sleep(took_s[what] * chance.uniform(0.3, 1.0))
        agent.kill()
        agent.communicate()
        killed[what] = killed.get(what, 0) + (agent.returncode == -signal.SIGKILL)
        told = f"seed {seed}, round {i}, {what}"
        for digest in node.store.digests():
            found = node.store.verify(digest)
            assert not found or (digest == worn and found[0].startswith("model.safetensors: contents changed")), (told, found)
        names = node.store.names()
        assert {"kept", "worn"} <= names.keys(), told
        assert all(digest in node.store.digests() for digest in names.values()), told
        assert {file.name: file.read_bytes() for file in node.store.get("kept").path.iterdir()} == whole, told
        layout = node.store.prepared_finding(kept, contents=True)
        assert layout is None, (told, layout)
    assert all(count > 2 for count in killed.values()), f"most ended before they were killed: {killed}, seed {seed}"
    _eventually(lambda: node.run("gc", group="store")[0] == 0 and not node.drafts())
    assert node.run("repair", "worn")[0] == 0
    assert node.run("import", str(bundle), group="bundle")[0] == 0
    assert node.run("verify")[0] == 0
    assert node.drafts() == []


def test_case_032_a_living_writer_is_never_swept(node: Node, tmp_path: Path) -> None:
    agent = node.start("add", str(source_folder(tmp_path / "source", mode="deaf")), "--name", "one")
    _eventually(lambda: bool(list(node.store.root.glob("tmp/*/object/pid")) and
                             next(node.store.root.glob("tmp/*/object/pid")).read_text()))
    child = int(next(node.store.root.glob("tmp/*/object/pid")).read_text())
    agent.kill()
    agent.communicate()
    try:
        assert node.store.sweep() == []
        assert len(node.drafts()) == 1
    finally:
        os.kill(child, signal.SIGKILL)
    _eventually(lambda: not _alive(child))
    assert len(node.store.sweep()) == 1
    assert node.drafts() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_ends_the_group_and_removes_the_draft(node: Node, tmp_path: Path, number: signal.Signals) -> None:
    agent = node.start("add", str(source_folder(tmp_path / "source", mode="hang")), "--name", "one")
    _eventually(lambda: bool([p for p in node.store.root.glob("tmp/*/object/pids") if p.read_text()]))
    pids = [int(p) for p in next(node.store.root.glob("tmp/*/object/pids")).read_text().split()]
    agent.send_signal(number)
    agent.communicate(timeout=20)
    assert agent.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert not any(map(_alive, pids))
    assert node.drafts() == []
    assert node.store.names() == {}


def test_two_adds_of_one_source_make_it_once(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "runs"
    source = source_folder(tmp_path / "source", slices=10, pause_s=0.05, log=str(log))
    agents = [node.start("add", str(source), "--name", name) for name in ("one", "two")]
    results = [(*agent.communicate(timeout=60), agent.returncode) for agent in agents]
    assert [code for _, _, code in results] == [0, 0], results
    assert len(log.read_text().splitlines()) == 1
    assert len(node.store.digests()) == 1
    assert sorted(node.store.names()) == ["one", "two"]
    assert sum("nothing to do" in out for out, _, _ in results) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a tmpfs of some MiB; needs root and the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(mib: int) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip(f"mount is not permitted here: {done.stderr.decode().strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def _remount(place: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(place)], check=True)


def test_case_032_the_disk_fills_while_writing(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    node = Node(small_disk(HEADROOM_BYTES // MIB + 6), tmp_path)
    assert node.run("add", str(source_folder(tmp_path / "first", fill=1)), "--name", "first")[0] == 0
    code, out, err = node.run("add", str(source_folder(tmp_path / "big", mode="fill")), "--name", "big")
    assert (code, out) == (73, "")
    assert err.splitlines()[-1] == "applianctl: cannot write the checkpoint: No space left on device; free space"
    assert node.drafts() == []
    assert list(node.store.names()) == ["first"]
    node.check()


def test_case_032_need_is_compared_with_free_first(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    node = Node(small_disk(8), tmp_path)
    log = tmp_path / "runs"
    code, out, err = node.run("add", str(source_folder(tmp_path / "source", log=str(log))), "--name", "one")
    assert (code, out) == (73, "")
    line = err.splitlines()[-1]
    assert "too full" in line
    assert "64 MiB of headroom are needed, 8 MiB are free" in line
    assert not log.exists()
    assert node.drafts() == []


def test_case_032_the_disk_fills_while_importing_and_repairing(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    elsewhere = Node(tmp_path / "elsewhere", tmp_path)
    source = source_folder(tmp_path / "source", fill=1)
    assert elsewhere.run("add", str(source), "--name", "one")[0] == 0
    bundle = tmp_path / "one.bundle"
    assert elsewhere.run("export", "one", str(bundle), group="bundle")[0] == 0
    node = Node(small_disk(HEADROOM_BYTES // MIB + 2), tmp_path)
    assert node.run("add", str(source), "--name", "one")[0] == 0
    big = Node(tmp_path / "big", tmp_path)
    assert big.run("add", str(source_folder(tmp_path / "large", mode="large")), "--name", "large")[0] == 0
    assert big.run("export", "large", str(tmp_path / "large.bundle"), group="bundle")[0] == 0
    before = {str(p): p.read_bytes() for p in node.store.root.rglob("*") if p.is_file()}
    code, out, err = node.run("import", str(tmp_path / "large.bundle"), group="bundle")
    assert (code, out) == (73, "")
    assert "too full" in err.splitlines()[-1]
    assert {str(p): p.read_bytes() for p in node.store.root.rglob("*") if p.is_file()} == before
    weights = node.store.get("one").path / "model.safetensors"
    data = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    ballast = node.store.root.parent / "ballast"
    with pytest.raises(OSError), open(ballast, "wb", buffering=0) as file:  # noqa: PT011, PT012 (ENOSPC)
        while True:
            assert file.write(bytes(4096)) == 4096, OSError
    for args, group in ((("repair", "one"), "model"), (("import", str(bundle)), "bundle")):
        code, out, err = node.run(*args, group=group)
        assert (code, out) == (73, ""), err
        assert len([line for line in err.splitlines() if line.startswith("applianctl: ")]) == 1
        assert node.store.verify(node.store.names()["one"])[0].startswith("model.safetensors: contents changed")
    assert node.run("gc", group="store")[0] == 0, "cleaning needs no room"
    ballast.unlink()
    assert node.run("import", str(bundle), group="bundle")[0] == 0
    node.check()


def test_an_export_to_a_full_stick_leaves_nothing(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    node = Node(tmp_path / "home", tmp_path)
    assert node.run("add", str(source_folder(tmp_path / "large", mode="large")), "--name", "large")[0] == 0
    stick = small_disk(2)
    code, out, err = node.run("export", "large", str(stick / "large.bundle"), group="bundle")
    assert (code, out) == (73, "")
    assert err.splitlines()[-1] == f"applianctl: cannot write {stick}/large.bundle: the disk is full; free space there, or choose another"
    assert list(stick.iterdir()) == []


def test_a_full_disk_keeps_the_old_name(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    node = Node(small_disk(HEADROOM_BYTES // MIB + 6), tmp_path)
    for name, fill in (("one", 1), ("two", 2)):
        assert node.run("add", str(source_folder(tmp_path / name, fill=fill)), "--name", name)[0] == 0
    before = node.store.names()
    with pytest.raises(OSError), open(node.store.root / "ballast", "wb", buffering=0) as file:  # noqa: PT011, PT012 (ENOSPC)
        while True:
            assert file.write(bytes(4096)) == 4096, OSError
    code, _, err = node.run("add", str(tmp_path / "two"), "--name", "one")
    assert code == 73
    assert err.splitlines()[-1].startswith("applianctl: cannot write to the store: the disk is full; ")
    assert node.store.names() == before
    node.check()


def test_a_read_only_store_still_gives_what_it_has(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    place = small_disk(HEADROOM_BYTES // MIB + 6)
    node = Node(place, tmp_path)
    assert node.run("add", str(source_folder(tmp_path / "first", fill=1)), "--name", "first")[0] == 0
    _remount(place, "ro")
    try:
        code, out, err = node.run("add", str(source_folder(tmp_path / "second", fill=2)), "--name", "second")
        assert (code, out) == (73, "")
        assert err.splitlines()[-1].startswith("applianctl: cannot write to the store: ")
        assert "Read-only file system" in err.splitlines()[-1]
        assert node.run("add", str(tmp_path / "first"), "--name", "first")[0] == 0
        assert node.run("verify")[0] == 0
        code, _, err = node.run("remove", "first")
        assert code == 73
        assert len(err.splitlines()) == 1
    finally:
        _remount(place, "rw")
    assert list(node.store.names()) == ["first"]


@pytest.mark.parametrize(("behaviour", "code", "line"), [
    ({"mode": "error"}, 65, "tensor x cannot be quantized: it holds NaN; use another copy"),
    ({"mode": "crash"}, 70, "the job failed with exit code 1: RuntimeError: no such luck"),
    ({"mode": "silent"}, 75, "the job ended without a result; try again"),
    ({"mode": "empty"}, 73, "the new model is not stored: model-00002.safetensors is empty; run `applianctl model add` "
                            "again"),
    ({"mode": "signal", "number": 4}, 77, "the job died: SIGILL: the CPU does not know an instruction that torch uses; "
                                          "run `applianctl probe`"),
    ({"mode": "signal", "number": 9}, 76, "the job was killed: SIGKILL: most likely memory ran out; free memory or "
                                          "raise the limit, see `applianctl probe`"),
    ({"mode": "signal", "number": 7}, 75, "the job died: SIGBUS; try again; if it happens again, verify the source's "
                                          "files"),
])
def test_each_end_of_the_child_is_one_line(
    node: Node, tmp_path: Path, behaviour: dict[str, object], code: int, line: str
) -> None:
    returned, out, err = node.run("add", str(source_folder(tmp_path / "source", **behaviour)), "--name", "one")
    assert (returned, out, err.splitlines()[-1]) == (code, "", f"applianctl: {line}")
    assert node.drafts() == []
    assert node.store.digests() == []
    assert node.store.names() == {}


def test_junk_between_the_events_is_ignored(node: Node, tmp_path: Path) -> None:
    code, out, _ = node.run("add", str(source_folder(tmp_path / "source", mode="junk")), "--name", "one")
    assert code == 0
    assert out.startswith("one: stored, ")


def test_case_014_the_child_gets_a_clean_environment_inside_the_draft(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "runs"
    source = source_folder(tmp_path / "source", log=str(log))
    code, _, _ = node.run("add", str(source), "--name", "one", "--ignore", "o_proj")
    assert code == 0
    run = json.loads(log.read_text())
    assert run["recipe"] == {"grid": "auto", "group_size": "auto", "table_bits": "auto", "ignore": ["o_proj"]}
    assert run["env"]["HF_HUB_OFFLINE"] == run["env"]["TRANSFORMERS_OFFLINE"] == "1"
    assert not {"NOTIFY_SOCKET", "APPLIANCE_HOME", "PYTHONPATH"} & run["env"].keys()
    for name in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME"):
        assert run["env"][name].startswith(str(node.store.root / "tmp")), name
    assert run["cwd"].startswith(str(node.store.root / "tmp"))
