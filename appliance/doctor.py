"""PURE: what is wrong with this node, why, and what to do. `findings(facts)` judges the symptoms `checkup` collected.

Rules: unknown (None) is never a finding; a healthy node has none at all, because a false alarm teaches people to ignore
the next one; each finding has a stable id and its cases in tests/doctor/cases.yaml; an error carries the exit code of
its class, a warning or a note none. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from appliance.budget import GIB, MIB, show
from appliance.symptoms import AccessFacts, DoctorFacts, HostSigns, Problem, ServiceFacts, SetupFacts

ERROR, WARNING, INFO = "error", "warning", "info"
LEVELS = (ERROR, WARNING, INFO)
GRAVEST = (78, 77, 76, 73, 65, 69, 75, 70)
"""Exit codes of errors, the one that is told first when there are several."""

FEW_DAYS = 14
LOW_DISK_BYTES = GIB
FULL_DISK_BYTES = 64 * MIB
SWAPPED_BYTES = 64 * MIB
THROTTLED_SHARE = 0.2
STALLED_PERCENT = 10.0
OFTEN = 3
"""So many faults of one name within an hour are a pattern."""
CLOCK_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`what` is the case, `why` it matters or how it is known, `do` this. `exit_code`: 0 unless it is an error."""

    id: str
    level: str
    what: str
    why: str
    do: str
    exit_code: int = 0


def findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Everything that is wrong, area by area."""
    yield from _setup(facts.setup)
    yield from _host(facts.host)
    yield from _disk(facts.host)
    yield from _service(facts.service)
    yield from _access(facts.access)
    if facts.unseen:
        yield _note("not-seen", f"could not look at: {'; '.join(facts.unseen)}",
                    "this account has no right to", "run it again with sudo")


def exit_code(found: Iterable[Finding]) -> int:
    """0 without errors, else the code of the gravest."""
    codes = [one.exit_code for one in found if one.level == ERROR]
    return min(codes, key=lambda code: GRAVEST.index(code) if code in GRAVEST else len(GRAVEST), default=0)


def _setup(setup: SetupFacts) -> Iterator[Finding]:
    if setup.config:
        yield _of("config-wrong", setup.config)
    for warning in setup.config_warnings:
        yield _warn("config-unknown-key", warning, "a key that is ignored does nothing", "correct or remove it")
    if setup.worker:
        yield _of("worker-unusable", setup.worker)
    if setup.kernels is not None and "native" not in setup.kernels and setup.kernel_setting == "auto":
        yield _warn("no-native-kernels", "the worker has torch's kernels only",
                    "its package was built without a C++ compiler: several times slower",
                    "install the worker from a built wheel, or install g++ and build again")
    for reason in setup.left_out:
        yield _note("kernel-left-out", f"a native kernel is not used: {reason}",
                    "the worker's self-test refused it; the next one serves",
                    "report it with `applianctl probe --json`")
    if setup.compile_setting and setup.compiler is False:
        yield _warn("no-compiler", "`compile: true` has no effect", "no C++ compiler, or no Python.h, was found",
                    "run `apt install g++ python3.11-dev`, or remove `compile`")
    if setup.plan and not setup.config and not setup.worker:
        yield _of("plan-refuses", setup.plan)
    for sentence in setup.damaged:
        yield _error("model-damaged", 65, sentence, "the store does not hold what it should",
                     "run `applianctl model verify` and `applianctl model repair NAME`; check the disk")
    if "native" in (setup.kernels or ()):
        for name in setup.not_laid_out:
            yield _note("not-laid-out", f"the weights of {name} are not laid out for the kernels",
                        "the worker packs them in memory at each start", "it is done at the next start")
    if setup.measurements:
        yield _warn("measurements-damaged", setup.measurements, "the plan goes by rules of thumb",
                    "run `applianctl tune`: it measures anew and replaces them")
    if setup.selftest:
        yield _of("selftest-failed", setup.selftest)
    if setup.generation:
        yield _of("generation-failed", setup.generation)


def _host(host: HostSigns) -> Iterator[Finding]:
    if host.libnuma is False:
        yield _error("no-libnuma", 78, "libnuma is missing", "vLLM's native library cannot be loaded without it",
                     "run `apt install libnuma1`")
    if host.lscpu is False:
        yield _error("no-lscpu", 78, "lscpu is missing", "vLLM asks it for the CPUs", "run `apt install util-linux`")
    if host.executable_mappings is False:
        yield _error("no-executable-memory", 78, "executable memory is forbidden",
                     "torch generates machine code at run time", "remove MemoryDenyWriteExecute=yes from the unit")
    if host.shm_writable is False:
        yield _error("no-shm", 78, "/dev/shm is not writable", "the worker's processes make semaphores there",
                     "mount it writable; 1 MB is enough")
    for reason in host.masked:
        yield _note("cpu-masked", f"the CPU could do more: {reason}",
                    "a virtual machine's CPU type or the system withholds it" if host.hypervisor
                    else "the system withholds it",
                    "choose the CPU type `host` in the hypervisor" if host.hypervisor else "update kernel or firmware")
    if host.governor:
        yield _warn("cpu-slow-governor", f"the CPUs are kept slow: {host.governor}",
                    "generation runs at the lowest clock", "run `cpupower frequency-set -g performance`")
    if host.quota_cpus is not None and host.quota_cpus < 1:
        yield _warn("cpu-quota", f"the CPU quota is {host.quota_cpus:g} CPUs", "less than one core: very slow",
                    "raise CPUQuota= or cpu.max")
    if host.throttled_share is not None and host.throttled_share >= THROTTLED_SHARE:
        yield _warn("cpu-throttled", f"the CPU quota stopped the service in {host.throttled_share:.0%} of its periods",
                    "more threads work than the quota allows for", "raise CPUQuota=, or lower cpu.threads")
    if host.stalled_percent is not None and host.stalled_percent >= STALLED_PERCENT:
        why = (f"the soft limit of {show(host.high_bytes)} (memory.high) slows it down" if host.high_bytes
               else "memory is short")
        yield _warn("memory-stalled", f"the service stood still for memory {host.stalled_percent:.0f} % of the time",
                    why, "raise the limit, lower `context`, or stop other programs")
    if host.oom_kills:
        yield _warn("oom-kills", f"memory ran out here {_times(host.oom_kills)} since the service's start",
                    "the kernel killed a process of the service's group", "raise MemoryMax=, or lower `context`")
    if host.worker_swap_bytes is not None and host.worker_swap_bytes > SWAPPED_BYTES:
        yield _warn("worker-swapped", f"{show(host.worker_swap_bytes)} of the worker are swapped out",
                    "the next answers wait for the disk", "free memory; set MemorySwapMax=0 for the unit")
    if host.clock_behind_s is not None and host.clock_behind_s > CLOCK_S:
        yield _warn("clock-behind", f"the clock is {host.clock_behind_s:.0f} s behind what was recorded before",
                    "it was set back: ages and certificates are judged wrongly", "let it be synchronised (timedatectl)")


def _disk(host: HostSigns) -> Iterator[Finding]:
    free, need = host.store_free_bytes, host.store_need_bytes
    if free is not None and need is not None and free < need:
        yield _error("disk-too-small", 73, f"the store's disk has {show(free)} free, {show(need)} are needed",
                     "the default model must be quantized first", "free space, or set `store` to another disk")
    smallest = min((size for size in (free, host.state_free_bytes) if size is not None), default=None)
    if smallest is not None and smallest < FULL_DISK_BYTES:
        yield _error("disk-full", 73, f"a disk is full: {show(smallest)} free", "logs, state and models lie there",
                     "free space")
    elif smallest is not None and smallest < LOW_DISK_BYTES:
        yield _warn("disk-low", f"a disk is nearly full: {show(smallest)} free", "logs, state and models lie there",
                    "free space")
    if host.state_writable is False:
        yield _error("state-read-only", 73, "the state folder is not writable for the service",
                     "what it learns is forgotten at each restart", "check owner and mount of the state folder")
    if host.foreign_files:
        yield _warn("foreign-files", f"the service does not own {', '.join(host.foreign_files)}",
                    "another account wrote there: the service may not be able to replace them",
                    "run `chown -R` with the owner of the folder")
    if host.old_caches_bytes is not None and host.old_caches_bytes > LOW_DISK_BYTES:
        yield _note("old-caches", f"caches of other CPUs or versions hold {show(host.old_caches_bytes)}",
                    "one older is kept for a way back", "the next start removes what is older")


def _service(service: ServiceFacts) -> Iterator[Finding]:
    yield from _presence(service)
    if service.running and service.answers is False:
        yield _error("agent-silent", 69, "the agent runs and its socket does not answer",
                     "its front door hangs", "run `applianctl restart`; report it with `applianctl support-bundle`")
    if service.running and service.state in ("ready", "busy", "answering") and (service.probes_failed or 0) > 0:
        yield _warn("probe-fails", f"the model did not answer the last {_times(service.probes_failed or 0)}",
                    service.probe_sentence or "the deep probe failed", "it is replaced by itself when it hangs")
    if service.rung not in (None, "full"):
        yield _warn("stepped-down", f"it serves with less than planned: `{service.rung}`",
                    service.rung_reason or "a fault forced it", "mend the cause, then `applianctl reset`")
    if service.rolled_back:
        yield _warn("rolled-back", service.rolled_back, "the wanted configuration failed its trial",
                    "see `applianctl history`; change it, or `applianctl reset` to try it again")
    elif service.failed:
        reason = list(service.failed.values())[-1]
        yield _note("trial-failed", f"{len(service.failed)} configurations failed their trial", f"the last: {reason}",
                    "see `applianctl history`")
    for name, count in sorted(service.faults.items()):
        if count >= OFTEN:
            yield _warn("faults-repeat", f"{name}: {_times(count)} within the last hour",
                        "one fault comes again and again", "see `applianctl logs` and docs/troubleshooting.md")
    if len(service.agents) > 1:
        yield _warn("two-agents", f"{len(service.agents)} agents run on this machine (pids {_list(service.agents)})",
                    "each plans with all of the memory and all cores", "stop one, or give each its own limits")
    if service.unit_needs_reload:
        yield _warn("unit-changed", f"{service.unit} was changed on disk", "systemd still uses what it read before",
                    "run `systemctl daemon-reload`")


def _presence(service: ServiceFacts) -> Iterator[Finding]:
    """Whether there is a service at all; one that was stopped on purpose is no fault."""
    if service.running is False:
        code = service.exit_code or 0
        if service.unit_active == "activating":
            yield _warn("restarting", "the service is not there, systemd starts it again",
                        service.sentence or service.unit_result, "run `applianctl status --wait`")
        elif code or service.state == "failed" or service.unit_active == "failed":
            yield _error("stopped-by-fault", code or 69, "the service stopped by a fault",
                         service.sentence or f"systemd says {service.unit_result}",
                         f"mend it, then `applianctl {'start' if service.unit else 'serve'}`")
        elif service.state not in (None, "stopped"):
            yield _error("agent-gone", 69, "the agent ended without a word", f"it said before: {service.sentence}",
                         f"run `applianctl {'start' if service.unit else 'serve'}`")
        else:
            yield _note("not-running", "the service is not running", service.sentence or "it was not started",
                        f"run `applianctl {'start' if service.unit else 'serve'}`")
        if service.orphans:
            yield _error("orphan-worker", 75, f"a worker runs without its agent (pids {_list(service.orphans)})",
                         "the agent was killed; the worker holds memory", "the next start ends it")
        if service.holder:
            yield _error("port-taken", 75, service.holder, "the service cannot listen on it",
                         "stop the other program, or set listen.port")
    elif service.running and service.state == "failed":
        yield _error("failed", service.exit_code or 69, "the service has failed", service.sentence,
                     "see `applianctl logs`")
    if service.unit and service.unit_enabled == "disabled":
        yield _note("not-enabled", f"{service.unit} does not start at boot", "it is disabled",
                    f"run `systemctl enable {service.unit}`")
    if service.unit_enabled in ("masked", "masked-runtime"):
        yield _error("masked", 78, f"{service.unit} is masked", "systemd refuses to start it",
                     f"run `systemctl unmask {service.unit}`")


def _access(access: AccessFacts) -> Iterator[Finding]:
    if access.keys_problem:
        yield _error("keys-unreadable", 78, access.keys_problem, "nobody is let in by accident",
                     "mend the file, or make a key: `applianctl key new`")
    if access.loopback is False:
        if access.keys == 0 and not access.keys_problem:
            yield _error("open-without-key", 78, f"it is to listen on {access.host} without an API key",
                         "everybody on the network could use it; the service refuses to start so",
                         "run `applianctl key new`")
        if access.tls is False:
            yield _warn("no-tls", f"it listens on {access.host} without TLS",
                        "keys and prompts can be read on the network", "set tls.cert and tls.key, or use a TLS proxy")
    if access.tls_problem:
        yield _error("tls-unusable", 78, "the certificate cannot be used", access.tls_problem,
                     "correct tls.cert and tls.key")
    elif access.tls_days is not None and access.tls_days < 0:
        yield _error("tls-expired", 78, f"the certificate expired {-access.tls_days:.0f} days ago",
                     "clients refuse it", "renew it, then `applianctl reload`")
    elif access.tls_days is not None and access.tls_days < FEW_DAYS:
        yield _warn("tls-expires", f"the certificate expires in {access.tls_days:.0f} days", "clients will refuse it",
                    "renew it, then `applianctl reload`")
    for path in access.readable_secrets:
        yield _warn("secret-readable", f"{path} can be read by everybody on this machine", "it holds a secret",
                    f"run `chmod o= {path}`")


def _of(name: str, problem: Problem) -> Finding:
    return _error(name, problem.exit_code, problem.what, problem.why, problem.do)


def _error(name: str, code: int, what: str, why: str, do: str) -> Finding:
    return Finding(id=name, level=ERROR, what=what, why=why, do=do, exit_code=code)


def _warn(name: str, what: str, why: str, do: str) -> Finding:
    return Finding(id=name, level=WARNING, what=what, why=why, do=do)


def _note(name: str, what: str, why: str, do: str) -> Finding:
    return Finding(id=name, level=INFO, what=what, why=why, do=do)


def _times(count: int) -> str:
    return f"{count} times" if count != 1 else "once"


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)
