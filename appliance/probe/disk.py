"""Free space where the store lies (or will lie) and in /dev/shm. A captured host brings the numbers along."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.facts import DiskFacts

SHM = Path("/dev/shm")


def read_disk(store: Path | None) -> DiskFacts:
    """Of the live host. Free means: free for this user. A store that does not exist yet is measured at its parent."""
    free = _space(_existing(store.absolute()))[1] if store else None
    shm_total, shm_free = _space(SHM)
    return DiskFacts(
        store_path=str(store) if store else None,
        store_free_bytes=free,
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
    )


def captured_disk(numbers: Mapping[str, Any]) -> DiskFacts:
    """From the `disk` key of captured.json; missing keys are unknown."""
    return DiskFacts(
        store_path=numbers.get("store_path"),
        store_free_bytes=numbers.get("store_free_bytes"),
        shm_total_bytes=numbers.get("shm_total_bytes"),
        shm_free_bytes=numbers.get("shm_free_bytes"),
    )


def _existing(path: Path) -> Path:
    try:
        return next((folder for folder in (path, *path.parents) if folder.exists()), path)
    except PermissionError:
        return path


def _space(path: Path) -> tuple[int | None, int | None]:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
