"""Where the appliance keeps its files: store, state, cache and runtime.

Does: choose the four folders from the environment (`locate`, pure) and create one of them on request
(`ensure`). Does not: read settings, or create anything on its own. Rules, first match wins, folder by folder:

1. APPLIANCE_HOME: one folder that holds store/, state/, cache/ and run/.
2. systemd's STATE_DIRECTORY, CACHE_DIRECTORY and RUNTIME_DIRECTORY (the first entry of each list).
3. as root: /var/lib/appliance, /var/cache/appliance, /run/appliance.
4. the XDG base directories; a relative XDG value is ignored, as the specification asks.
5. no usable home (HOME unset, `/`, missing or read-only): /var/tmp/appliance-UID, and /tmp/appliance-UID
   for sockets, whose paths must stay short. The account need not exist in the passwd database.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import StoreError

MAX_SOCKET_DIRECTORY = 60
"""vLLM puts a 36-character socket name below its socket directory; AF_UNIX paths end at 107 bytes."""
AGENT_SOCKET = "agent.sock"
WORKER_SOCKET = "worker.sock"


@dataclass(frozen=True, kw_only=True)
class Directories:
    """`store`: models, large; `state`: small files that must last; `cache`: may be deleted; `runtime`: sockets."""

    store: Path
    state: Path
    cache: Path
    runtime: Path


def locate(env: Mapping[str, str], *, uid: int, home: str | None, store: str | None = None) -> Directories:
    """Choose the folders. Pure: nothing is looked at or created.

    `home` is a home folder that can be written, or None (see `usable_home`); `store` is the setting of that name
    and wins over every rule.
    """
    found = _locate(env, uid=uid, home=home)
    if store is None:
        return found
    return Directories(store=Path(store), state=found.state, cache=found.cache, runtime=found.runtime)


def from_process(env: Mapping[str, str], *, store: str | None = None) -> Directories:
    """The folders for this process: its environment, its user id and its home."""
    return locate(env, uid=os.geteuid(), home=usable_home(env), store=store)


def of_service(env: Mapping[str, str], *, uid: int, home: str | None, system: Directories | None = None) -> Directories:
    """The folders of the service that a command speaks about: the account's own, or the system's where an ordinary
    account runs no agent of its own and the machine has the service. Asks no settings: a broken file hides nothing."""
    own = locate(env, uid=uid, home=home)
    whole = system or _system()
    if env.get("APPLIANCE_HOME") or uid == 0 or (own.runtime / "status.json").exists():
        return own
    with contextlib.suppress(PermissionError):
        return whole if whole.runtime.is_dir() or whole.state.is_dir() else own
    return whole  # a state folder that is there and closed


def usable_home(env: Mapping[str, str]) -> str | None:
    """HOME if it is an absolute path other than `/` to a folder that can be written; else None (case 14)."""
    home = env.get("HOME", "")
    if not home.startswith("/") or os.path.normpath(home) in ("/", "//"):
        return None
    return home if Path(home).is_dir() and os.access(home, os.W_OK | os.X_OK) else None


def sockets(runtime: Path) -> Path:
    """Where sockets go: the runtime folder, or one in /tmp with a short name where their paths would get too long."""
    if len(str(runtime)) <= MAX_SOCKET_DIRECTORY:
        return runtime
    mark = hashlib.sha256(str(runtime).encode()).hexdigest()[:8]
    return Path(f"/tmp/appliance-{os.geteuid()}-{mark}")


def ensure(path: Path, *, mode: int = 0o755) -> Path:
    """Create the folder and its parents if missing. Raises StoreError when that is not possible or not safe."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        reason = _foreign_owner(path, uid=os.geteuid())
    except OSError as error:
        raise StoreError(
            f"cannot create the folder {path}",
            why=error.strerror or str(error),
            do="check its owner, or set APPLIANCE_HOME to a folder you can write",
        ) from None
    if reason:
        raise StoreError(f"will not use the folder {path}", why=reason, do="remove it, or set APPLIANCE_HOME")
    return path


def _locate(env: Mapping[str, str], *, uid: int, home: str | None) -> Directories:
    if env.get("APPLIANCE_HOME"):
        base = Path(env["APPLIANCE_HOME"])
        return Directories(store=base / "store", state=base / "state", cache=base / "cache", runtime=base / "run")
    places = _system() if uid == 0 else _xdg(env, uid=uid, home=home)
    unit = {name: Path(env[name].split(":")[0]) for name in
            ("STATE_DIRECTORY", "CACHE_DIRECTORY", "RUNTIME_DIRECTORY") if env.get(name)}
    lib_given = unit.get("STATE_DIRECTORY")
    return Directories(
        store=lib_given / "store" if lib_given else places.store,
        state=lib_given / "state" if lib_given else places.state,
        cache=unit.get("CACHE_DIRECTORY", places.cache),
        runtime=unit.get("RUNTIME_DIRECTORY", places.runtime),
    )


def _system() -> Directories:
    lib = Path("/var/lib/appliance")
    return Directories(store=lib / "store", state=lib / "state", cache=Path("/var/cache/appliance"),
                       runtime=Path("/run/appliance"))


def _xdg(env: Mapping[str, str], *, uid: int, home: str | None) -> Directories:
    spare = Path(f"/var/tmp/appliance-{uid}")

    def place(variable: str, below_home: str, fallback: Path) -> Path:
        if env.get(variable, "").startswith("/"):
            return Path(env[variable]) / "appliance"
        return Path(home) / below_home / "appliance" if home and below_home else fallback

    return Directories(
        store=place("XDG_DATA_HOME", ".local/share", spare) / "store",
        state=place("XDG_STATE_HOME", ".local/state", spare / "state"),
        cache=place("XDG_CACHE_HOME", ".cache", spare / "cache"),
        runtime=place("XDG_RUNTIME_DIR", "", Path(f"/tmp/appliance-{uid}")),
    )


def _foreign_owner(path: Path, *, uid: int) -> str | None:
    """Why a folder below a world-writable one cannot be trusted: somebody else made it first. Root is exempt,
    because root's places are not below one unless an operator chose so."""
    if uid == 0:
        return None
    for folder in (path, *path.parents[:-1]):
        mode = folder.parent.stat().st_mode
        if mode & stat.S_ISVTX and mode & stat.S_IWOTH:
            owner = folder.lstat().st_uid
            if owner not in (0, uid):
                return f"{folder} belongs to user {owner}, not to user {uid}"
    return None
