"""PURE: what is refused, whatever the model is, and how a refusal looks.

A refusal has the exit code of its class of error and says what, why and what to do. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance import launch
from appliance.errors import ApplianceError, by_exit_code
from appliance.facts import HostFacts
from appliance.quantize.format import KERNELS, NATIVE_VARIANTS
from appliance.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Refusal:
    exit_code: int
    what: str
    why: str
    do: str

    def error(self) -> ApplianceError:
        return by_exit_code(self.exit_code)(self.what, why=self.why, do=self.do)


def early_refusal(host: HostFacts, settings: Settings, *, kernels: tuple[str, ...]) -> Refusal | None:
    """What is refused whatever the model is: asked before anything that takes minutes."""
    return _host_refusal(host) or _settings_refusal(settings, host, kernels)


def _host_refusal(host: HostFacts) -> Refusal | None:
    cpu = host.cpu
    if cpu.architecture not in (None, "x86_64"):
        return Refusal(exit_code=77, what="this machine cannot run the worker",
                       why=f"its architecture is {cpu.architecture}", do="use a 64-bit x86 machine with AVX2")
    if host.software.libc is not None and "musl" in host.software.libc:
        return Refusal(exit_code=77, what="this userland cannot run the worker",
                       why="torch's wheels need glibc, found musl", do="use Debian, Ubuntu or another glibc system")
    if host.software.userland not in (None, "amd64"):
        return Refusal(exit_code=77, what="this userland cannot run the worker",
                       why=f"it is {host.software.userland}, the worker needs amd64", do="install a 64-bit userland")
    if cpu.tier in (None, "scalar"):
        reason = next((t.reason for t in cpu.tiers if t.name == "avx2"), "") or "AVX2 is not available"
        return Refusal(exit_code=77, what="this CPU cannot run the worker", why=reason,
                       do="use a CPU with AVX2, or let the hypervisor pass it through")
    return None


def _settings_refusal(settings: Settings, host: HostFacts, kernels: tuple[str, ...]) -> Refusal | None:
    offered = [name for name in kernels if name in KERNELS]
    if settings.dtype == "float16":
        return Refusal(exit_code=78, what="dtype float16 is refused", why="cpu_int4 computes in bfloat16 only",
                       do="remove dtype from the settings")
    if settings.dtype == "float32":
        return Refusal(exit_code=78, what="dtype float32 is refused", why="the int4 kernel has no vector path for it",
                       do="remove dtype from the settings")
    kernel = "native" if settings.kernel in NATIVE_VARIANTS else settings.kernel
    if kernel not in ("auto", *offered):
        return Refusal(exit_code=78, what=f"kernel {settings.kernel} is not available",
                       why=f"the installed worker offers {', '.join(offered)}", do="set kernel to auto")
    if settings.cpu.cpus and not set(settings.cpu.cpus) & set(host.topology.allowed):
        return Refusal(exit_code=78, what="cpu.cpus cannot be used", do="choose among them",
                       why=f"this process may run on CPUs {ranges(host.topology.allowed)} only")
    if reason := launch.extra_args_refusal(settings.worker.extra_args):
        return Refusal(exit_code=78, what="worker.extra_args is refused", why=reason,
                       do="use the setting of that name, or leave it to the plan")
    if reason := launch.env_refusal(settings.worker.env):
        return Refusal(exit_code=78, what="worker.env is refused", why=reason, do="remove it from worker.env")
    return None


def ranges(cpus: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> `0-2,5`."""
    spans: list[list[int]] = []
    for cpu in cpus:
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)
