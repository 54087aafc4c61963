"""Programs and libraries that the worker needs, looked up as files: nothing is started.

A value is the path or version found, None is *not found*. For the live host PATH, CXX and LD_LIBRARY_PATH of the
given environment count; for a captured host the usual folders do. An `lscpu` or `libnuma.so.1` of another word size
does not count as found, because only the folders of a 64-bit userland are searched.
"""

from __future__ import annotations

import dataclasses
import os
import re
import struct
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.facts import SoftwareFacts
from appliance.probe.tree import Tree

PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
LIBRARY_FOLDERS = (
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
)
MACHINES = {3: "i386", 40: "armhf", 62: "amd64", 183: "arm64"}
"""ELF e_machine -> Debian architecture."""


def read_software(
    tree: Tree, *, env: Mapping[str, str], live: bool, versions: Mapping[str, str], executable_mappings: bool | None
) -> SoftwareFacts:
    programs = tuple(env.get("PATH", "").split(os.pathsep)) if env.get("PATH") else PROGRAM_FOLDERS
    libraries = tuple(_library_folders(tree, env))
    return SoftwareFacts(
        compiler=_compiler(tree, env.get("CXX"), programs),
        python_headers=_python_headers(tree, live),
        lscpu=_first(tree, programs, "lscpu"),
        libnuma=_first(tree, libraries, "libnuma.so.1"),
        libgomp=_first(tree, libraries, "libgomp.so.1"),
        libc=_libc(tree, libraries, live),
        userland=_userland(tree),
        kernel=(tree.read("/proc/sys/kernel/osrelease") or "").strip() or None,
        versions=dict(versions),
        executable_mappings=executable_mappings,
    )


def captured_software(found: SoftwareFacts, told: Mapping[str, Any]) -> SoftwareFacts:
    """What the files of a captured host say, and over it what the machine itself found (`software` of captured.json);
    names that no fact has are left out."""
    known = {field.name for field in dataclasses.fields(SoftwareFacts)}
    return dataclasses.replace(found, **{name: value for name, value in told.items() if name in known})


def parse_dpkg_status(text: str | None, package: str) -> dict[str, str]:
    """The one-line fields of an installed package in /var/lib/dpkg/status; empty when it is not there."""
    match = re.search(rf"^Package: {re.escape(package)}\n(?:.+\n)*", text or "", re.MULTILINE)
    fields = dict(line.split(": ", 1) for line in match[0].splitlines() if re.match(r"\S+: ", line)) if match else {}
    return fields if fields.get("Status", "").endswith(" installed") else {}


def parse_elf_machine(head: bytes) -> str | None:
    """Debian architecture of a program from the first 20 bytes of its ELF header (little-endian ones only)."""
    if len(head) < 20 or head[:4] != b"\x7fELF" or head[5] != 1:
        return None
    machine: int = struct.unpack("<H", head[18:20])[0]
    if machine == 62 and head[4] == 1:
        return "x32"
    return MACHINES.get(machine)


def parse_ld_conf(text: str | None) -> tuple[str, ...]:
    """Folders named in an ld.so.conf file."""
    return tuple(line.strip() for line in (text or "").splitlines() if line.startswith("/"))


def _library_folders(tree: Tree, env: Mapping[str, str]) -> Iterator[str]:
    yield from (folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder)
    for name in tree.names("/etc/ld.so.conf.d"):
        if not name.startswith("i386"):
            yield from parse_ld_conf(tree.read(f"/etc/ld.so.conf.d/{name}"))
    yield from LIBRARY_FOLDERS


def _first(tree: Tree, folders: tuple[str, ...], name: str) -> str | None:
    return next((f"{folder}/{name}" for folder in folders if tree.is_file(f"{folder}/{name}")), None)


def _compiler(tree: Tree, cxx: str | None, folders: tuple[str, ...]) -> str | None:
    """The C++ compiler that Inductor would start: $CXX, else g++."""
    name = cxx.split()[0] if cxx and cxx.split() else "g++"
    if name.startswith("/"):
        return name if tree.is_file(name) else None
    return _first(tree, folders, name)


def _python_headers(tree: Tree, live: bool) -> str | None:
    if live:
        folders = [sysconfig.get_paths()["include"]]
    else:
        folders = [f"/usr/include/{name}" for name in tree.names("/usr/include") if name.startswith("python3")]
    return next((folder for folder in folders if tree.is_file(f"{folder}/Python.h")), None)


def _libc(tree: Tree, libraries: tuple[str, ...], live: bool) -> str | None:
    # glibc first: a glibc system may have musl installed beside it.
    if live and "CS_GNU_LIBC_VERSION" in os.confstr_names:
        return os.confstr("CS_GNU_LIBC_VERSION") or None
    upstream = re.match(r"[\d.]+", parse_dpkg_status(tree.read("/var/lib/dpkg/status"), "libc6").get("Version", ""))
    if upstream:
        return f"glibc {upstream[0]}"
    if any(name.startswith("ld-musl-") for name in tree.names("/lib")):
        return "musl"
    return "glibc" if _first(tree, libraries, "libc.so.6") else None


def _userland(tree: Tree) -> str | None:
    """dpkg's architecture, or that of the shell where there is no dpkg."""
    dpkg = parse_dpkg_status(tree.read("/var/lib/dpkg/status"), "dpkg")
    return dpkg.get("Architecture") or parse_elf_machine(tree.head("/bin/sh", 20) or b"")
