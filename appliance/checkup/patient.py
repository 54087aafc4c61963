"""Who is examined: one service, its folders, settings, status, record and unit as they are now.

Reads files and asks systemd; a broken configuration is kept as a problem, not raised.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance import status, unit
from appliance.directories import Directories
from appliance.errors import ApplianceError
from appliance.settings import Parsed, Settings
from appliance.store import Store
from appliance.symptoms import Problem
from appliance.unit import Unit


@dataclass(frozen=True, kw_only=True)
class Patient:
    """What is looked at. `parsed`: the settings, or the problem with them; `record`: as it stands in the file;
    `names`: the models, None when this account may not read the store; `store_problem`: another reason not to."""

    directories: Directories
    parsed: Parsed | Problem
    running: Mapping[str, Any] | None
    record: Mapping[str, Any]
    unit: Unit | None
    names: Mapping[str, str] | None
    store_problem: str
    env: Mapping[str, str]
    now: float

    @property
    def settings(self) -> Settings:
        return self.parsed.settings if isinstance(self.parsed, Parsed) else Settings()

    def remembered(self, key: str) -> list[Mapping[str, Any]]:
        """Entries of a list in the record, whatever stands there."""
        found = self.record.get(key)
        return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def patient(directories: Directories, read_settings: Callable[[], Parsed], *, env: Mapping[str, str],
            now: float) -> Patient:
    """The service of these folders as it is now."""
    try:
        parsed: Parsed | Problem = read_settings()
    except ApplianceError as error:
        parsed = problem(error)
    running = status.current(directories.runtime)
    names, store_problem = _names(directories)
    return Patient(directories=directories, parsed=parsed, running=running, record=status.record(directories.state),
                   unit=unit.managing(running, runtime=directories.runtime, env=env), names=names,
                   store_problem=store_problem, env=env, now=now)


def _names(directories: Directories) -> tuple[Mapping[str, str] | None, str]:
    try:
        return Store(directories.store).names(), ""
    except ApplianceError as error:
        return (None, "") if os.strerror(errno.EACCES) in error.why else ({}, error.line)


def problem(error: ApplianceError) -> Problem:
    return Problem(what=error.what, why=error.why, do=error.do, exit_code=error.exit_code)
