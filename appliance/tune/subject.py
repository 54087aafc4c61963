"""What is tuned: this node, one stored model, the settings in force; and what would be planned for them.

Reads only. The plan is the service's: where one runs, the limits of its control group count, not those of the shell
that measures; its worker's memory counts as free, for the next one takes its place. What is free here and now is
another thing: a measured worker stands beside the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from appliance import node, status, tuning
from appliance.budget import LEAST_RESERVE_BYTES
from appliance.directories import Directories
from appliance.facts import HostFacts, KernelTrial, ModelFacts
from appliance.jobs import worker_contract
from appliance.launch import TRIAL_FILE, Places
from appliance.library import active_name
from appliance.measured import Record
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host, read_live
from appliance.probe.model import read_model
from appliance.probe.tree import Tree
from appliance.quantize.format import NATIVE_VARIANTS
from appliance.settings import Parsed, Settings
from appliance.store import Store

FLAGS: Mapping[str, tuple[str, ...]] = {
    "avx512-vnni": ("avx512f", "avx512bw", "avx512vl", "avx512_vnni"), "avx512": ("avx512f", "avx512bw", "avx512vl"),
    "avx-vnni": ("avx2", "fma", "avx_vnni"), "avx2": ("avx2", "fma"),
}
"""Flags without which a native variant is not tried. The slow `scalar` one is never faster."""


@dataclass(frozen=True, kw_only=True)
class OfProcess(Tree):
    """The file system as another process sees itself in it: its control groups are meant by /proc/self."""

    pid: int

    def path(self, path: str) -> Path:
        return super().path(path.replace("/proc/self/", f"/proc/{self.pid}/", 1))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """`host`: as the service sees it; `here`: as this process does. `kernel`: the one that would serve; `stored`: the
    model's folder; `prepared`: its mapped weights, if any."""

    host: HostFacts
    here: HostFacts
    model: ModelFacts
    settings: Settings
    kernels: tuple[str, ...]
    kernel: str
    stored: Path
    prepared: Path | None
    trial: KernelTrial | None

    def plan(self, record: Record | None, places: Places) -> Plan:
        return make_plan(self.host, self.model, self.settings, places, kernels=self.kernels, trial=self.trial,
                         measured=record)

    def plan_of_one(self, record: Record | None, places: Places) -> Plan:
        """The same with one engine: what is measured is one engine's, however many will serve."""
        one = replace(self.settings, cpu=replace(self.settings.cpu, engines=1))
        return replace(self, settings=one).plan(record, places)

    @property
    def free_bytes(self) -> int:
        """Memory that a process beside the service may take."""
        memory = self.here.memory
        free = [value for value in (memory.available_bytes, None if memory.ceiling_bytes is None else
                                    memory.ceiling_bytes - (memory.used_bytes or 0)) if value is not None]
        return max(0, min(free, default=0) - LEAST_RESERVE_BYTES)

    @property
    def variants(self) -> tuple[str, ...]:
        """Instruction sets of the native kernel that this CPU's flags allow, the preferred one first."""
        return tuple(name for name in reversed(NATIVE_VARIANTS)
                     if name in FLAGS and self.host.cpu.flags.issuperset(FLAGS[name]))


def read_subject(parsed: Parsed, directories: Directories, worker_python: str, *, env: Mapping[str, str],
                 model_name: str | None = None, digest: str | None = None) -> Subject:
    """Raises ModelError when the model is not stored, ConfigError when the worker cannot be asked, and what this node
    or these settings refuse."""
    contract = worker_contract(worker_python, env=env)
    versions = {name: str(version) for name, version in contract["versions"].items() if version}
    kernels = tuple(str(name) for name in contract["kernels"])
    here = read_host("/", store=directories.store, versions=versions)
    agent = (status.current(directories.runtime) or {}).get("agent", {}).get("pid")
    host = here if agent is None else read_live(OfProcess(root=Path("/"), pid=int(agent)), store=directories.store,
                                                versions=versions)[0]
    store = Store(directories.store)
    name = model_name or active_name(parsed, directories)
    stored = store.read(digest) if digest else store.get(name)
    prepared = store.prepared(stored.digest)
    places = node.places(directories, model_path=stored.path, fingerprint=host.fingerprint, prepared=prepared)
    trial = node.read_trial(Path(places.cache) / TRIAL_FILE)
    model = read_model(stored.path, name=name, digest=stored.digest)
    return Subject(host=node.without_own_worker(host, directories), here=here, model=model, kernels=kernels,
                   settings=parsed.settings, kernel=tuning.served_kernel(parsed.settings.kernel, kernels, trial),
                   stored=stored.path, prepared=prepared, trial=trial)
