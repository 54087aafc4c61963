"""What systemd says of the service's unit, and asking systemd to act on it.

Does: `systemctl show` read into a frozen value; start, stop and the like without a password prompt. Does not: write
unit files, or judge. Rules: no systemd (a container, a plain checkout) or no such unit is None, not an error; systemctl
is asked with a time limit; "not permitted" is one line that names sudo.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError, NotReachable

UNIT = "appliance.service"
BOOTED = Path("/run/systemd/system")
"""There when systemd is PID 1 (sd_booted(3))."""
SERVICE_RUNTIME = Path("/run/appliance")
PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "NRestarts", "MemoryMax",
    "MemoryHigh", "FragmentPath", "DropInPaths", "UnitFileState", "NeedDaemonReload",
)
NO_VALUE = 1 << 63
"""systemd writes `infinity` or the largest number for "no limit", `[not set]` for "not known"."""
DENIED = ("access denied", "interactive authentication required", "permission denied", "authentication is required")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One unit as `systemctl show` describes it. `exit_status`: of the main process when it exited by itself;
    `enabled`: `enabled`, `disabled`, `masked`, ...; None = unknown."""

    name: str
    load: str
    active: str
    sub: str
    result: str
    exit_status: int | None
    killed_by: int | None
    restarts: int | None
    memory_max_bytes: int | None
    memory_high_bytes: int | None
    fragment: str
    drop_ins: tuple[str, ...]
    enabled: str
    needs_reload: bool

    @property
    def running(self) -> bool:
        return self.active in ("active", "activating", "reloading", "deactivating")

    def sentence(self) -> str:
        """The unit's state in a few words: `appliance.service is failed (exit-code, exit status 78)`."""
        details = []
        if self.result not in ("", "success"):
            details.append(self.result)
        if self.active in ("failed", "inactive", "activating"):
            if self.exit_status:
                details.append(f"exit status {self.exit_status}")
            if self.killed_by:
                details.append(f"signal {self.killed_by}")
        if self.sub == "auto-restart":
            details.append("waits for its restart")
        if self.restarts:
            details.append(f"restarted {self.restarts} times" if self.restarts > 1 else "restarted once")
        return f"{self.name} is {self.active}" + (f" ({', '.join(details)})" if details else "")


def read(name: str = UNIT, *, env: Mapping[str, str], booted: Path = BOOTED) -> Unit | None:
    """The unit, or None without systemd or without such a unit."""
    if not booted.is_dir():
        return None
    try:
        done = _systemctl(("show", name, f"--property={','.join(PROPERTIES)}"), env=env, timeout_s=10)
    except NotReachable:
        return None
    found = parse(name, done.stdout)
    return found if found is not None and found.load not in ("not-found", "") else None


def parse(name: str, text: str) -> Unit | None:
    """The lines `Key=value` of `systemctl show`. None when there are none."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if "ActiveState" not in values:
        return None
    code, status = _number(values.get("ExecMainCode")), _number(values.get("ExecMainStatus"))
    return Unit(
        name=name, load=values.get("LoadState", ""), active=values["ActiveState"], sub=values.get("SubState", ""),
        result=values.get("Result", ""),
        exit_status=status if code == 1 else None,  # CLD_EXITED; 2 and 3 are CLD_KILLED and CLD_DUMPED
        killed_by=status if code in (2, 3) else None, restarts=_number(values.get("NRestarts")),
        memory_max_bytes=_number(values.get("MemoryMax")), memory_high_bytes=_number(values.get("MemoryHigh")),
        fragment=values.get("FragmentPath", ""), drop_ins=tuple(values.get("DropInPaths", "").split()),
        enabled=values.get("UnitFileState", ""), needs_reload=values.get("NeedDaemonReload") == "yes",
    )


def managing(status: Mapping[str, Any] | None, *, runtime: Path, env: Mapping[str, str],
             booted: Path = BOOTED) -> Unit | None:
    """The unit that manages the service of `runtime`; None when it is run by hand.

    A living agent says so itself (`status`); without one it is the unit when the folder is the unit's.
    """
    if status is not None:
        managed = status.get("managed_by") == "systemd"
        return read(str(status.get("unit") or UNIT), env=env, booted=booted) if managed else None
    return read(env=env, booted=booted) if runtime == SERVICE_RUNTIME and not env.get("APPLIANCE_HOME") else None


def act(verb: str, name: str, *, env: Mapping[str, str], timeout_s: float = 30.0) -> None:
    """`systemctl VERB NAME` without waiting for the job's end and without a password prompt.

    `start` first clears a start limit that was hit, so that a repaired node comes up at once (case 59). Raises
    NotReachable when systemd refuses; ConfigError when the unit cannot be loaded.
    """
    if verb in ("start", "restart"):
        _systemctl(("reset-failed", name), env=env, timeout_s=timeout_s)
    done = _systemctl(("--no-block", "--no-ask-password", verb, name), env=env, timeout_s=timeout_s)
    if done.returncode == 0:
        return
    said = " ".join(done.stderr.split())
    if any(word in said.lower() for word in DENIED):
        raise NotReachable(f"{verb} of {name} is not permitted to this account",
                           do=f"run `sudo applianctl {verb}`")
    if "not found" in said.lower() or "bad unit file" in said.lower() or "masked" in said.lower():
        raise ConfigError(f"systemd cannot {verb} {name}", why=said, do=f"run `systemctl status {name}`")
    raise NotReachable(f"systemd did not {verb} {name}", why=said, do=f"run `systemctl status {name}`")


def _systemctl(args: tuple[str, ...], *, env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    own = {"PATH": env.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"}
    own |= {key: env[key] for key in ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS") if key in env}
    try:
        return subprocess.run(["systemctl", *args], env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=timeout_s, check=False)
    except OSError as error:
        raise NotReachable("systemd cannot be asked", why=f"systemctl: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise NotReachable("systemd does not answer", why=f"systemctl {args[0]} took more than {timeout_s:.0f} s",
                           do="try again") from None


def _number(text: str | None) -> int | None:
    """A whole number; None for `infinity`, `[not set]` and the largest numbers, which mean the same."""
    value = int(text) if text and text.isdecimal() and len(text) < 21 else None
    return value if value is not None and value < NO_VALUE else None
