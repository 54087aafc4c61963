"""The machine's symptoms: CPU, memory, disks, clock, as far as they touch the service.

What the control group suffers is read for the running agent only: this command's own group is another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from appliance import library
from appliance.checkup.patient import Patient
from appliance.directories import Directories
from appliance.errors import ApplianceError
from appliance.facts import HostFacts
from appliance.importing.source import inspect
from appliance.probe.strain import read_strain, swapped_bytes
from appliance.probe.tree import Tree
from appliance.settings import DEFAULT_MODEL
from appliance.supervisor import folders
from appliance.symptoms import HostSigns, Problem


def machine(case: Patient, host: HostFacts) -> HostSigns:
    tree = Tree(root=Path("/"))
    running = case.running or {}
    agent = running.get("agent")
    pid = agent.get("pid") if isinstance(agent, Mapping) else None
    strain = read_strain(tree, pid=pid if isinstance(pid, int) else "self")
    software, place = host.software, case.directories
    return HostSigns(
        masked=tuple(f"{tier.name}: {tier.reason}" for tier in host.cpu.tiers
                     if tier.flags and False in (tier.os_enabled, tier.proven)),
        hypervisor=host.cpu.hypervisor, governor=strain.governor,
        quota_cpus=host.topology.quota.cpus if host.topology.quota else None,
        # What this command's own control group suffers says nothing about the service.
        throttled_share=strain.throttled_share if pid else None,
        stalled_percent=strain.stalled_percent if pid else None,
        high_bytes=strain.high_bytes if pid else None,
        oom_kills=strain.oom_kills if pid and case.unit is not None else None,
        libnuma=software.libnuma is not None, lscpu=software.lscpu is not None,
        executable_mappings=software.executable_mappings,
        worker_swap_bytes=swapped_bytes(tree, [one for one in running.get("pids") or () if isinstance(one, int)]),
        clock_behind_s=_clock_behind(case), shm_writable=os.access("/dev/shm", os.W_OK | os.X_OK),
        store_free_bytes=host.disk.store_free_bytes, store_need_bytes=_need(case),
        state_free_bytes=_free(place.state), state_writable=_writable(place.state),
        old_caches_bytes=_old_caches(place.cache), foreign_files=_foreign(place),
    )


def _clock_behind(case: Patient) -> float | None:
    """How far the present lies before the newest record."""
    times = [entry.get("at") for key in ("history", "faults") for entry in case.remembered(key)]
    word = case.record.get("last_word")
    times.append(word.get("at") if isinstance(word, Mapping) else None)
    known = [at for at in times if isinstance(at, (int, float))]
    return max(known) - case.now if known else None


def _need(case: Patient) -> int | None:
    """What quantizing the default model will take, when that is what a start would do."""
    if isinstance(case.parsed, Problem) or case.running is not None or case.names is None:
        return None
    with contextlib.suppress(ApplianceError):
        name = library.active_name(case.parsed, case.directories)
        if name != DEFAULT_MODEL or name in case.names:
            return None
        # The model, and once more as the layout that the kernels map.
        return 2 * library.estimate_bytes(inspect(library.resolve(name, env=case.env)), table_bits=None)
    return None


def _free(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return None


def _writable(folder: Path) -> bool | None:
    """False on a read-only mount; whether the service's account may write there is not asked."""
    with contextlib.suppress(OSError):
        return not os.statvfs(folder).f_flag & os.ST_RDONLY
    return None


def _old_caches(cache: Path) -> int | None:
    with contextlib.suppress(OSError):
        found = sorted((path for path in cache.iterdir() if folders.is_fingerprint(path.name)),
                       key=lambda path: path.stat().st_mtime, reverse=True)
        return sum(folders.folder_bytes(path) for path in found[folders.KEPT_CACHES:])
    return None


def _foreign(place: Directories) -> tuple[str, ...]:
    """Files that another account than the folder's owner put into the state folder or the store."""
    found = []
    for folder in (place.state, place.store, place.store / "names"):
        with contextlib.suppress(OSError):
            owner = folder.stat().st_uid
            found += [str(path) for path in sorted(folder.iterdir()) if path.lstat().st_uid != owner]
    return tuple(found[:5])
