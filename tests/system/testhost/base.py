"""The shared, read-only Debian 12 below every host: debootstrap once, a tarball of it afterwards.

Everything the product's Debian package will depend on is in it, so that a host needs no network.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import zlib
from pathlib import Path

from tests.system.testhost.kernel import run

TOP = Path(os.environ.get("TESTHOST_DIR", "/var/tmp/testhost"))
BASE, HOSTS, LAYERS, KEY = TOP / "base", TOP / "hosts", TOP / "layers", TOP / "id_ed25519"
PACKAGES = (
    "systemd,systemd-sysv,dbus,libpam-systemd,libnss-systemd,python3,python3-venv,iproute2,openssh-server,nftables,"
    "ca-certificates,curl,procps,adduser,less,e2fsprogs,netbase,kmod,util-linux,libnuma1,libgomp1,python3-pip,"
    "python3-click,python3-psutil,python3-yaml,python3-aiohttp"
)
VERSION = f"{zlib.crc32(PACKAGES.encode()):08x}"
STAMP = BASE / f".testhost-{VERSION}"
TARBALL = Path(os.environ.get("TESTHOST_TARBALL", TOP / f"base-{VERSION}.tar"))
NEEDED = ("debootstrap", "ip", "mkfs.ext4", "nsenter", "unshare", "ssh-keygen")
ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
       "TERM": "dumb", "DEBIAN_FRONTEND": "noninteractive"}

OOM_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
static const char *v1(const char *path, char *buf) {
    size_t n = strlen(path), k = strlen("/memory.events");
    if (n < k || n > PATH_MAX - 20 || strcmp(path + n - k, "/memory.events")) return path;
    memcpy(buf, path, n - k);
    strcpy(buf + n - k, "/memory.oom_control");
    return buf;
}
#define OPEN(f) FILE *f(const char *p, const char *m) { char b[PATH_MAX]; \
    return ((FILE *(*)(const char *, const char *)) dlsym(RTLD_NEXT, #f))(v1(p, b), m); }
OPEN(fopen)
OPEN(fopen64)
"""
"""Where this machine has the memory controller on cgroup v1, the kernel enforces MemoryMax= all the same, but systemd
learns of OOM kills from cgroup2's memory.events only and would say Result=signal. v1's memory.oom_control has the very
line it looks for; preloaded into the guest's PID 1 alone, this lets it look there."""


def missing() -> str | None:
    """Why this machine cannot have test hosts, or None."""
    if os.geteuid() != 0:
        return "test hosts need root"
    absent = [name for name in NEEDED if not shutil.which(name)]
    if "debootstrap" in absent and (TARBALL.exists() or STAMP.exists()):
        absent.remove("debootstrap")
    if absent:
        return f"test hosts need {', '.join(absent)} (packages debootstrap, iproute2, e2fsprogs, util-linux, openssh-client)"
    if not Path("/dev/loop-control").exists():
        return "test hosts need loop devices"
    return None


def mirror() -> str:
    """The Debian mirror that this machine's own apt uses for its main suite."""
    if chosen := os.environ.get("TESTHOST_MIRROR"):
        return chosen
    for file in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.*"))):
        text = file.read_text() if file.exists() else ""
        if found := re.search(r"^(?:URIs:|deb(?:\s+\[[^]]*\])?)\s*(\S+/debian)/?(?:\s|$)", text, re.M):
            return found[1]
    raise RuntimeError("no Debian mirror in the apt sources: set TESTHOST_MIRROR")


def make_base() -> Path:
    """Make sure that the base is there; one process at a time."""
    TOP.mkdir(parents=True, exist_ok=True)
    with open(TOP / ".base.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if STAMP.exists():
            return BASE
        if BASE.exists():
            shutil.rmtree(BASE)
        if TARBALL.exists():
            BASE.mkdir()
            run("tar", "-C", BASE, "--numeric-owner", "--xattrs", "-xpf", TARBALL)
        else:
            run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", BASE, mirror())
            _adapt()
            run("tar", "-C", BASE, "--numeric-owner", "--xattrs", "-cf", f"{TARBALL}.part", ".")
            Path(f"{TARBALL}.part").rename(TARBALL)
        if not KEY.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testhost", "-f", KEY)
        authorized = BASE / "root/.ssh/authorized_keys"
        authorized.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(f"{KEY}.pub", authorized)
        STAMP.touch()
    return BASE


def _adapt() -> None:
    archives = BASE / "var/cache/apt/archives"
    shutil.rmtree(archives, ignore_errors=True)
    (archives / "partial").mkdir(parents=True)
    (BASE / "var/log/journal").mkdir(exist_ok=True)  # a persistent journal, as on a real host
    (BASE / "etc/machine-id").write_text("")


def make_shim() -> str | None:
    """OOM_SHIM, compiled; None where there is no C compiler."""
    library = TOP / f"oomshim-{zlib.crc32(OOM_SHIM.encode()):08x}.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not library.exists() and compiler:
        part = Path(f"{library}.{os.getpid()}")
        run(compiler, "-O2", "-shared", "-fPIC", "-o", part, "-x", "c", "-", input=OOM_SHIM)
        part.rename(library)
    return str(library) if library.exists() else None
