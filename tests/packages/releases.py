"""The next release of the built packages, made in seconds for tests of upgrades, and a repository of several releases.

    release(build/deb, target, version="0.1.1~deb12")                        the same, newer
    release(build/deb, target, version="0.1.2~deb12", fault="worker-dies")   with a worker that is broken
    stand_in(build/deb, target, version="0.1.1~deb12", fake="ok")            with the fake worker instead of vLLM
    repository([build/deb, target], folder)                                  folder/aptly/public, signed

Does: write each package anew with another version and, for a fault, one module more in the worker. Does not: unpack or
compress what stays as it is; the worker's data are compressed again where a fault is put before them. Rules: `dpkg --verify` of the result
is clean; the fault acts in the worker's own Python only.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
DEBS = Path(os.environ.get("APPLIANCE_DEBS", ROOT / "build/deb"))
ONE, TWO, THREE = "0.1.0~deb12", "0.1.1~deb12", "0.1.2~deb12"
LINK = 0o120777
"""The mode of a symbolic link, whose content is its target."""
POOL = "usr/lib/appliance/pool"
FAKE_PYTHON = """#!/bin/sh
# The fake worker in the place of a worker's Python.
home=$(dirname "$(dirname "$0")")
case $2 in
  appliance.quantize|appliance.kernels.prepare) exec /usr/lib/appliance/agent/bin/python "$home/fake_quantizer.py" "$@" ;;
esac
exec env FAKE=ok /usr/bin/python3 "$home/fake_worker.py" "$@"
"""
MODULE = "appliance_fault"
BEGIN = "import sys\nwords = sys.orig_argv\nserving = 'appliance.worker' in words and 'serve' in words\n"
FAULTS = {
    # The worker ends as soon as it is started to serve; it still tells its contract.
    "worker-dies": BEGIN + "if serving:\n    sys.exit('a release that is broken on purpose')\n",
    # Nothing at all can be run with it.
    "worker-unusable": "import sys\nsys.exit('a release that is broken on purpose')\n",
    # It starts and never becomes ready.
    "worker-hangs": BEGIN + "if serving:\n    import time\n    time.sleep(3600)\n",
    # It answers; each step of the engine takes so much longer that other work on the machine cannot hide it.
    "worker-slow": BEGIN + """
if serving:
    import importlib.abc
    import importlib.util
    import time

    class Slow(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "vllm.v1.engine.core":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def patched(module):
                execute(module)
                for step in ("step", "step_with_batch_queue"):
                    original = getattr(module.EngineCore, step)

                    def slow(self, original=original):
                        began = time.monotonic()
                        done = original(self)
                        time.sleep(0.15 + 1.5 * (time.monotonic() - began))
                        return done

                    setattr(module.EngineCore, step, slow)

            spec.loader.exec_module = patched
            return spec

    sys.meta_path.insert(0, Slow())
""",
}


def release(debs: Path, target: Path, *, version: str, fault: str | None = None) -> list[Path]:
    """The packages of the folder `debs` as release `version`, in the folder `target`; returns their files."""
    target.mkdir(parents=True, exist_ok=True)
    made = []
    for deb in sorted(debs.glob("*.deb")):
        name, old, rest = deb.name.split("_")
        added = FAULTS[fault] if fault and name == "appliance-worker" else None
        made.append(target / f"{name}_{version}_{rest}")
        _rewrite(deb, made[-1], old=old, new=version, module=added)
    assert made, f"there are no packages in {debs}"
    return made


def stand_in(debs: Path, target: Path, *, version: str, fake: str = "ok", interpreter: str | None = None,
             filler_mb: int = 0) -> list[Path]:
    """`appliance` and `appliance-worker` as release `version`; the worker's files are those of the fake worker that
    behaves like `fake` ("crash", "ok FAKE_TOKEN_S=0.05"), its scripts and units those of the built package. `interpreter`:
    a link to it instead; `filler_mb`: so much more, which nothing compresses."""
    target.mkdir(parents=True, exist_ok=True)
    made = []
    for deb in sorted(debs.glob("appliance_*.deb")) + sorted(debs.glob("appliance-worker_*.deb")):
        name, old, rest = deb.name.split("_")
        made.append(target / f"{name}_{version}_{rest}")
        files = _fake_files(fake, interpreter, filler_mb) if name == "appliance-worker" else None
        _rewrite(deb, made[-1], old=old, new=version, files=files)
    assert len(made) == 2, f"there is no agent and worker in {debs}"
    return made


def add_release(folder: Path, version: str, **how: object) -> str:
    """A stand-in of the built packages in folder/VERSION, once."""
    if not (folder / version).exists():
        stand_in(DEBS, folder / version, version=version, **how)  # type: ignore[arg-type]
    return version


def repository(folders: Sequence[Path], target: Path, *, keys: Path) -> Path:
    """A signed repository of the packages in all folders; a second call adds to it. `keys`: a GNUPGHOME of its own, made
    when it is not there. Returns the folder that nodes see."""
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in folders:
        done = subprocess.run([ROOT / "packaging/build-repository", folder, target], text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "GNUPGHOME": str(keys)})
        assert done.returncode == 0, done.stdout
    return target / "aptly/public"


def _rewrite(deb: Path, made: Path, *, old: str, new: str, module: str | None = None,
             files: dict[str, tuple[bytes, int]] | None = None) -> None:
    """The archive again: another control file, and before the data those of the module, or `files` instead of the data."""
    with open(made, "wb") as out:
        out.write(b"!<arch>\n")
        for name, offset, size in _members(deb):
            with open(deb, "rb") as file:
                file.seek(offset)
                if name.startswith("control.tar"):
                    tar = _control(_decompressed(name, file.read(size)), old=old, new=new, module=module, files=files)
                    _write_member(out, "control.tar.zst", _zstd(tar))
                elif name.startswith("data.tar") and files is not None:
                    _write_member(out, "data.tar.zst", _zstd(_entries(files) + bytes(1024)))
                elif name.startswith("data.tar") and module is not None:
                    assert name.endswith(".zst"), f"{deb}: {name} is not zstd"
                    before = _entries({path: (data, 0o644) for path, data in _files(_site_packages(deb), module)})
                    with tempfile.NamedTemporaryFile(dir=made.parent) as packed:
                        _prepend(before, deb, packed)
                        _write_member(out, name, b"", more=(Path(packed.name), 0, Path(packed.name).stat().st_size))
                else:
                    _write_member(out, name, b"", more=(deb, offset, size))


def _members(deb: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each member of an ar archive."""
    with open(deb, "rb") as file:
        assert file.read(8) == b"!<arch>\n", deb
        while header := file.read(60):
            size = int(header[48:58])
            yield header[:16].decode().strip().rstrip("/"), file.tell(), size
            file.seek(size + size % 2, os.SEEK_CUR)


def _prepend(before: bytes, deb: Path, packed: IO[bytes]) -> None:
    """The package's data with this before it, in one frame: dpkg reads no second one."""
    with subprocess.Popen(["zstd", "-q", "-1", "-c"], stdin=subprocess.PIPE, stdout=packed) as compress:
        assert compress.stdin is not None
        compress.stdin.write(before)
        compress.stdin.flush()
        subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], stdout=compress.stdin, check=True)
        compress.stdin.close()
    assert compress.returncode == 0


def _write_member(out: io.BufferedWriter, name: str, data: bytes, *, more: tuple[Path, int, int] | None = None) -> None:
    size = len(data) + (more[2] if more else 0)
    out.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{size:<10}`\n".encode())
    out.write(data)
    if more:
        deb, offset, left = more
        with open(deb, "rb") as file:
            file.seek(offset)
            while left and (block := file.read(min(left, 1 << 22))):
                out.write(block)
                left -= len(block)
    out.write(b"\n" * (size % 2))


def _control(tar: bytes, *, old: str, new: str, module: str | None, files: dict[str, tuple[bytes, int]] | None) -> bytes:
    """The control archive with the other version, also where our packages name each other."""
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tar)) as source, tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as target:
        for member in source:
            data = source.extractfile(member).read() if member.isfile() else b""  # type: ignore[union-attr]
            if member.name == "./control":
                text, count = re.subn(rf"(^Version: |= ){re.escape(old)}(?=$|\))", rf"\g<1>{new}", data.decode(), flags=re.M)
                assert count, text
                data = text.encode()
            elif member.name == "./md5sums" and files is not None:
                data = b"".join(_md5sum(path, content) for path, (content, mode) in files.items() if mode != LINK)
            elif member.name == "./md5sums" and module is not None:
                data += b"".join(_md5sum(path, content) for path, content in _files(_folder_of(data.decode()), module))
            member.size = len(data)
            target.addfile(member, io.BytesIO(data) if member.isfile() else None)
    return made.getvalue()


def _md5sum(path: str, content: bytes) -> bytes:
    return f"{hashlib.md5(content, usedforsecurity=False).hexdigest()}  {path}\n".encode()


def _site_packages(deb: Path) -> str:
    sums = subprocess.run(["dpkg-deb", "--ctrl-tarfile", deb], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(sums)) as tar:
        return _folder_of(tar.extractfile("./md5sums").read().decode())  # type: ignore[union-attr]


def _folder_of(md5sums: str) -> str:
    found = re.search(r"  (usr/lib/appliance/\S+/site-packages)/appliance/worker\.py$", md5sums, re.M)
    assert found, "this package holds no worker"
    return found[1]


def _files(folder: str, module: str) -> list[tuple[str, bytes]]:
    """A .pth line is run by every Python of an environment before anything else."""
    return [(f"{folder}/{MODULE}.pth", f"import {MODULE}\n".encode()), (f"{folder}/{MODULE}.py", module.encode())]


def _fake_files(fake: str, interpreter: str | None, filler_mb: int) -> dict[str, tuple[bytes, int]]:
    """path -> (content, mode) of a worker's package with the fake worker."""
    files = {f"{POOL}/bin/python": (FAKE_PYTHON.replace("FAKE=ok", f"FAKE={fake}").encode(), 0o755)}
    if interpreter:
        files = {f"{POOL}/bin/python": (interpreter.encode(), LINK)}
    for name in ("fake_worker.py", "fake_quantizer.py"):
        files[f"{POOL}/{name}"] = (ROOT / "tests/process" / name).read_bytes(), 0o644
    files[f"{POOL}/lib/python3.11/site-packages/appliance/worker.py"] = b"", 0o644
    for unit in ("path", "service"):
        name = f"appliance-old-workers.{unit}"
        files[f"lib/systemd/system/{name}"] = (ROOT / "systemd" / name).read_bytes(), 0o644
    for number in range(filler_mb):
        files[f"{POOL}/filler/{number}"] = os.urandom(1 << 20), 0o644
    return files


def _entries(files: dict[str, tuple[bytes, int]]) -> bytes:
    """Files as the beginning of a tar archive, without its end. Each folder comes before what is in it."""
    made = _entry("./", None, 0o755)
    known = {"."}
    for path, (content, mode) in files.items():
        for folder in map(str, reversed(Path(path).parents)):
            if folder not in known:
                known.add(folder)
                made += _entry(f"./{folder}/", None, 0o755)
        made += _entry(f"./{path}", content, mode)
    return made


def _entry(name: str, content: bytes | None, mode: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.mode = (tarfile.DIRTYPE if content is None else tarfile.REGTYPE), mode
    if mode == LINK:
        info.type, info.linkname, info.mode, content = tarfile.SYMTYPE, (content or b"").decode(), 0o777, b""
    info.size, info.uname, info.gname = len(content or b""), "root", "root"
    return info.tobuf(tarfile.GNU_FORMAT) + (content or b"") + bytes(-info.size % 512)


def _zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-1", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout


def _decompressed(name: str, data: bytes) -> bytes:
    tool = {".zst": "zstd", ".xz": "xz", ".gz": "gzip"}[Path(name).suffix]
    return subprocess.run([tool, "-dc"], input=data, stdout=subprocess.PIPE, check=True).stdout
