"""Make the worker's installed tree from a prepared environment: worker_tree.py ENVIRONMENT WHEEL TARGET

Does: copy the packages of packaging/worker.lock without what packaging/worker.omit names, unpack this project's wheel
beside them, strip symbols, compile the modules, write a pyvenv.cfg for the node's Python, and collect the licences.
Does not: fetch anything. Rules: the environment holds exactly the lock's versions and is one of the Python that runs
this (the node's), or nothing is made; the same input gives the same bytes; nothing in the tree names the machine that
made it.
"""

from __future__ import annotations

import argparse
import contextlib
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path, PurePosixPath

HERE = Path(__file__).parent
HOME = PurePosixPath("/usr/lib/appliance/worker")
NOT_LOCKED = {"appliance", "pip"}
"""In the environment without being in the lock: this project itself, and what installed it."""
STRIPPED = ("**/*.abi3.so", "**/*.cpython-*.so", "torch/lib/*.so", "torch/bin/*")
"""What has symbols. Libraries that auditwheel has packed (*.libs) stay as they are: strip damages some of them."""
NOTICE = re.compile(r"(licen[cs]e|copying|notice|authors|third.?party)", re.I)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--notices", type=Path, help="write the licences of third parties to this file")
    given = parser.parse_args()
    site = given.environment / f"lib/python3.{sys.version_info.minor}/site-packages"
    found = distributions(site)
    if reason := python_refusal(given.environment, site) or lock_refusal(found):
        print(f"worker_tree: {reason}", file=sys.stderr)
        return 78
    omit = omissions((HERE / "worker.omit").read_text())
    made = given.target / site.relative_to(given.environment)
    shutil.rmtree(given.target, ignore_errors=True)
    copy(site, made, wanted(site, found, omit["dist"] | NOT_LOCKED, omit["path"]))
    unpack(given.wheel, made)
    strip(made)
    interpreter(given.target, Path(sys.executable).resolve())
    compile_modules(given.target, made, omit["code"])
    if given.notices:
        given.notices.parent.mkdir(parents=True, exist_ok=True)
        given.notices.write_text(notices(made))
    return 0


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(site: Path) -> dict[str, metadata.Distribution]:
    return {normal(found.metadata["Name"]): found for found in metadata.distributions(path=[str(site)])}


def locked(text: str) -> dict[str, str]:
    """Name and version of each requirement of the lock."""
    return {normal(name): version for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", text, re.M)}


def python_refusal(environment: Path, site: Path) -> str | None:
    """Why this environment is not of the Python that runs this, or None."""
    if site.is_dir():
        return None
    held = ", ".join(sorted(path.name for path in environment.glob("lib/python3.*"))) or "none"
    return (f"{environment} is no environment of {Path(sys.executable).resolve()}, the distribution's Python "
            f"(found: {held}); make it again with PYTHON={Path(sys.executable).resolve()}")


def lock_refusal(found: dict[str, metadata.Distribution]) -> str | None:
    """Why this environment is not the lock's, or None."""
    path = HERE / ("worker.lock" if sys.version_info.minor == 11 else f"worker-3.{sys.version_info.minor}.lock")
    if not path.exists():
        return f"there is no {path.name}; make lock LOCK_PYTHON=3.{sys.version_info.minor}"
    lock = locked(path.read_text())
    have = {name: one.version for name, one in found.items() if name not in NOT_LOCKED}
    names = (have.keys() | lock.keys()) - NOT_LOCKED
    wrong = sorted(name for name in names if have.get(name) != lock.get(name))
    if not wrong:
        return None
    first = wrong[0]
    return (f"the environment differs from {path.name} in {len(wrong)} packages, for example {first}: "
            f"{have.get(first)} is installed, {lock.get(first)} is locked; make the environment again")


def omissions(text: str) -> dict[str, set[str]]:
    """What each kind of line names: `dist` distributions, `path` files or folders, `code` modules without byte code."""
    named: dict[str, set[str]] = {"dist": set(), "path": set(), "code": set()}
    for line in text.splitlines():
        if words := line.split("#")[0].split():
            kind, what = words
            named[kind].add(normal(what) if kind == "dist" else what)
    return named


def wanted(
    site: Path, found: dict[str, metadata.Distribution], names: set[str], patterns: set[str],
) -> list[PurePosixPath]:
    """The files to copy, sorted: those that the distributions' own records list, and of them what is not left out."""
    files: set[PurePosixPath] = set()
    for name, one in found.items():
        if name in names:
            continue
        for file in one.files or ():
            path = PurePosixPath(file)
            outside = path.is_absolute() or ".." in path.parts  # scripts
            if not outside and "__pycache__" not in path.parts and path.name != "direct_url.json":
                files.add(path)
    gone = {PurePosixPath(path.relative_to(site)) for pattern in patterns for path in site.glob(pattern)}
    return sorted(file for file in files if file not in gone and not gone.intersection(file.parents))


def copy(site: Path, target: Path, files: list[PurePosixPath]) -> None:
    for file in files:
        source = site / file
        if not source.exists():  # torch's wheel lists a few files that it does not have
            continue
        place = target / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
        program = source.stat().st_mode & 0o100 and ("bin" in file.parts or file.suffix == ".sh")
        place.chmod(0o755 if program else 0o644)


def unpack(wheel: Path, site: Path) -> None:
    """This project; the kernels are built, so their sources stay out."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if "/native/" not in name])


def strip(site: Path) -> None:
    for pattern in STRIPPED:
        for library in sorted(site.glob(pattern)):
            if library.is_file() and library.open("rb").read(4) == b"\x7fELF":
                subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


def interpreter(target: Path, python: Path) -> None:
    """A virtual environment of the node's own Python. Its scripts are left out: the agent starts modules."""
    (target / "bin").mkdir(parents=True)
    (target / "bin/python").symlink_to(python)
    (target / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")


def compile_modules(target: Path, site: Path, without: set[str]) -> None:
    """Byte code that no time stamp makes stale: the tree is read-only for the service, and a start must not compile.

    `without`: patterns of modules that few starts import, if any. Each folder is compiled by a process that has
    compiled nothing before it: what marshal writes depends on which strings the process has met.
    """
    left_out = {path for pattern in without for path in site.glob(pattern)}
    folders = sorted({path.parent for path in target.rglob("*.py")})
    tasks = [(target, sorted(path for path in folder.glob("*.py") if path not in left_out)) for folder in folders]
    with get_context("fork").Pool(maxtasksperchild=1) as pool:
        pool.starmap(compile_folder, tasks, chunksize=1)


def compile_folder(target: Path, modules: list[Path]) -> None:
    for module in modules:
        # Some packages hold files that no Python compiles; they are nobody's imports.
        with contextlib.suppress(py_compile.PyCompileError, ValueError):
            py_compile.compile(str(module), dfile=str(HOME / module.relative_to(target)), doraise=True,
                               invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def notices(site: Path) -> str:
    """Name, version, licence and the licence texts of everything that is redistributed."""
    found = sorted(distributions(site).items())
    lines = ["The worker's environment contains these packages of others, each under its own licence.", ""]
    lines += [f"{name} {one.version}: {licence(one)}" for name, one in found if name != "appliance"]
    for name, one in found:
        for path in texts(one) if name != "appliance" else ():
            text = path.read_text(errors="replace").strip()
            lines += ["", "=" * 100, f"{name} {one.version}: {path.name}", "=" * 100, text]
    return "\n".join(lines) + "\n"


def licence(one: metadata.Distribution) -> str:
    """As its metadata say it, in one line."""
    stated = one.metadata["License-Expression"] or (one.metadata["License"] or "").strip().split("\n")[0]
    classes = one.metadata.get_all("Classifier", [])
    classified = [value.split(" :: ")[-1] for value in classes if value.startswith("License ::")]
    return stated if stated and len(stated) < 100 else ", ".join(classified) or "see its text below"


def texts(one: metadata.Distribution) -> Iterator[Path]:
    for file in sorted(one.files or (), key=str):
        path = Path(str(one.locate_file(file)))
        if ".dist-info" in str(file) and NOTICE.search(path.name) and path.is_file():
            yield path


if __name__ == "__main__":
    sys.exit(main())
