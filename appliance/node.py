"""This node, now: facts of the host, the chosen model and the settings, brought together into a plan.

Reads only; the commands `plan` and `serve` and later the agent's reload share it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import status
from appliance.directories import WORKER_SOCKET, Directories, sockets
from appliance.errors import ConfigError, NotReachable
from appliance.facts import HostFacts, KernelTrial, ModelFacts
from appliance.jobs import worker_contract
from appliance.launch import TRIAL_FILE, Places
from appliance.library import active_name
from appliance.measured import Record, decision
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host
from appliance.probe.model import read_model
from appliance.refusal import early_refusal
from appliance.regularfile import read_regular
from appliance.settings import Parsed
from appliance.store import Store
from appliance.tune import archive


@dataclass(frozen=True, kw_only=True)
class Node:
    """Everything a worker start needs to know. `versions`: what the worker reports of itself; `measured`: the figures
    that the plan goes by."""

    host: HostFacts
    model: ModelFacts
    plan: Plan
    places: Places
    versions: Mapping[str, str]
    measured: Record | None = None


def read_node(parsed: Parsed, directories: Directories, worker_python: str, *, env: Mapping[str, str],
              model_name: str | None = None, digest: str | None = None,
              figures: Mapping[str, Any] | None = None) -> Node:
    """Probe this machine, read the active model from the store and plan.

    `digest`: the object itself, whatever its name stands for now. `figures`: what measurements are to decide
    (`Plan.tuned`): where the present ones decide otherwise, the plan goes by those that are kept for it, or by none.

    Raises ModelError when the model is not in the store, ConfigError when the worker cannot be asked.
    """
    contract = worker_contract(worker_python, env=env)
    versions = {name: str(version) for name, version in contract["versions"].items() if version}
    host = read_host("/", store=directories.store, versions=versions)
    name = model_name or active_name(parsed, directories)
    store = Store(directories.store)
    stored = store.read(digest) if digest else store.get(name)
    model = read_model(stored.path, name=name, digest=stored.digest)
    where = places(directories, model_path=stored.path, fingerprint=host.fingerprint,
                   prepared=store.prepared(stored.digest))
    probed, measured = host, archive.load(directories.state, host)
    host = without_own_worker(host, directories)

    def planned(measured: Record | None) -> Plan:
        return make_plan(host, model, parsed.settings, where, kernels=tuple(contract["kernels"]), measured=measured,
                         trial=read_trial(Path(where.cache) / TRIAL_FILE))

    plan = planned(measured)
    if figures is not None and dict(plan.tuned) != dict(figures) and measured is not None and not measured.stale:
        measured = archive.kept(directories.state, probed, digest=stored.digest, figures=figures)
        plan = planned(measured)
    return Node(host=host, model=model, plan=plan, places=where, versions=versions, measured=measured)


def read_wanted(parsed: Parsed, directories: Directories, worker_python: str, *, env: Mapping[str, str],
                model_name: str, digest: str, refused: Collection[str],
                good: Mapping[str, Any]) -> tuple[Node, Mapping[str, Any] | None]:
    """The node planned by its present measurements. Where these decide what was given up (`refused`:
    `measured.decision`), by those behind `good`, the good configuration's figures for this model; the second value is
    then what was given up. Raises what `read_node` raises."""
    node = read_node(parsed, directories, worker_python, env=env, model_name=model_name, digest=digest)
    tuned = node.plan.tuned
    if decision(digest, tuned) not in refused or dict(tuned) == dict(good):
        return node, None
    return read_node(parsed, directories, worker_python, env=env, model_name=model_name, digest=digest,
                     figures=good), tuned


def plan_unmade(model: ModelFacts, parsed: Parsed, directories: Directories, worker_python: str, *,
                env: Mapping[str, str]) -> Plan:
    """The plan for a model that is not stored yet: as `read_node` would make it, its weights laid out."""
    contract = worker_contract(worker_python, env=env)
    versions = {name: str(version) for name, version in contract["versions"].items() if version}
    host = read_host("/", store=directories.store, versions=versions)
    kernels = tuple(contract["kernels"])
    where = places(directories, model_path=Path("unmade"), fingerprint=host.fingerprint,
                   prepared=Path("unmade") if "native" in kernels else None)
    return make_plan(without_own_worker(host, directories), model, parsed.settings, where, kernels=kernels,
                     measured=archive.load(directories.state, host), trial=read_trial(Path(where.cache) / TRIAL_FILE))


def places(directories: Directories, *, model_path: Path, fingerprint: str, prepared: Path | None = None) -> Places:
    """The worker's folders. Compiled code lies below the host's fingerprint, so that no other CPU ever loads it."""
    cache = directories.cache / fingerprint
    return Places(model=str(model_path), cache=str(cache), tmp=str(cache / "tmp"),
                  socket=str(sockets(directories.runtime) / WORKER_SOCKET), sockets=str(sockets(directories.runtime)),
                  prepared=str(prepared or ""))


def read_trial(file: Path) -> KernelTrial | None:
    """What the worker's self-test wrote at its last start for this CPU and these versions; None before the first."""
    try:
        found = json.loads(read_regular(file, most_bytes=1 << 16))
        return KernelTrial(variant=found["variant"], left_out=tuple(found["left_out"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_early(parsed: Parsed, directories: Directories, worker_python: str, *, env: Mapping[str, str]) -> None:
    """Raise what this machine or these settings refuse whatever the model is, before a model is quantized for them."""
    contract = worker_contract(worker_python, env=env)
    host = read_host("/", store=directories.store)
    missing = software_refusal(host)
    if missing and host.software.executable_mappings is False:
        raise missing  # first: it also keeps the CPU from being asked, which would be refused as unknown
    if refusal := early_refusal(host, parsed.settings, kernels=tuple(contract["kernels"])):
        raise refusal.error()
    if missing:
        raise missing


def without_own_worker(host: HostFacts, directories: Directories) -> HostFacts:
    """The facts as if our own running worker were not there: a new worker takes its place, not memory beside it."""
    try:
        own = int(status.read(directories.runtime).get("memory_bytes") or 0)
    except NotReachable:
        return host
    memory = host.memory
    return dataclasses.replace(host, memory=dataclasses.replace(
        memory,
        available_bytes=None if memory.available_bytes is None else memory.available_bytes + own,
        used_bytes=None if memory.used_bytes is None else max(0, memory.used_bytes - own),
    ))


def software_refusal(host: HostFacts) -> ConfigError | None:
    """What is missing on this machine that vLLM would only notice late, or as a crash."""
    if host.software.executable_mappings is False:
        return ConfigError("executable memory is forbidden", why="torch generates machine code at run time",
                           do="remove MemoryDenyWriteExecute=yes from the unit's drop-ins")
    if host.software.libnuma is None:
        return ConfigError("libnuma is missing", why="vLLM's native library cannot be loaded without it",
                           do="run `apt install libnuma1`")
    if host.software.lscpu is None:
        return ConfigError("lscpu is missing", why="vLLM asks it for the CPUs", do="run `apt install util-linux`")
    return None
