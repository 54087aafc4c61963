"""Frozen values: what the doctor judges, collected by `checkup` and written as data in tests/doctor/cases.yaml.

No judgement, no I/O. `None`, an empty text and an empty tuple mean unknown or nothing seen; neither is ever a finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A refusal as it was met elsewhere: its line, split, and its exit code."""

    what: str
    why: str = ""
    do: str = ""
    exit_code: int = 78


@dataclass(frozen=True, kw_only=True)
class ServiceFacts:
    """`running`: an agent lives. `state`, `sentence`, `exit_code`: its present word, else the last one. `answers`: its
    socket answers. `faults`: name -> how often within the last hour. `orphans`: pids of a worker without an agent.
    `agents`: pids of all agents of this machine. `holder`: who has the port, when it is not the service."""

    running: bool | None = None
    state: str | None = None
    sentence: str = ""
    exit_code: int | None = None
    answers: bool | None = None
    probes_failed: int | None = None
    probe_sentence: str = ""
    rung: str | None = None
    rung_reason: str = ""
    rolled_back: str | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    agents: tuple[int, ...] = ()
    orphans: tuple[int, ...] = ()
    holder: str | None = None
    unit: str | None = None
    unit_active: str | None = None
    unit_result: str = ""
    unit_enabled: str | None = None
    unit_needs_reload: bool | None = None


@dataclass(frozen=True, kw_only=True)
class SetupFacts:
    """Configuration, worker, model and plan. `kernels`: what the worker offers; `left_out`: native variants that its
    self-test refused here; `measurements`: why those of this host cannot be read."""

    config: Problem | None = None
    config_warnings: tuple[str, ...] = ()
    worker: Problem | None = None
    kernels: tuple[str, ...] | None = None
    kernel_setting: str = "auto"
    left_out: tuple[str, ...] = ()
    compile_setting: bool | None = None
    compiler: bool | None = None
    plan: Problem | None = None
    damaged: tuple[str, ...] = ()
    not_laid_out: tuple[str, ...] = ()
    measurements: str = ""
    selftest: Problem | None = None
    generation: Problem | None = None


@dataclass(frozen=True, kw_only=True)
class HostSigns:
    """`masked`: tiers that the CPU has and something above it withholds. `stalled_percent`: share of the last minute in
    which nothing ran for want of memory (PSI). `throttled_share`: of the CPU quota's periods."""

    masked: tuple[str, ...] = ()
    hypervisor: bool | None = None
    governor: str | None = None
    quota_cpus: float | None = None
    throttled_share: float | None = None
    libnuma: bool | None = None
    lscpu: bool | None = None
    executable_mappings: bool | None = None
    high_bytes: int | None = None
    stalled_percent: float | None = None
    oom_kills: int | None = None
    worker_swap_bytes: int | None = None
    clock_behind_s: float | None = None
    shm_writable: bool | None = None
    store_free_bytes: int | None = None
    store_need_bytes: int | None = None
    state_free_bytes: int | None = None
    state_writable: bool | None = None
    old_caches_bytes: int | None = None
    foreign_files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AccessFacts:
    """Who may use the service. `readable_secrets`: key files that everybody on this machine may read."""

    loopback: bool | None = None
    host: str = ""
    keys: int | None = None
    keys_problem: str | None = None
    tls: bool | None = None
    tls_problem: str | None = None
    tls_days: float | None = None
    readable_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DoctorFacts:
    """All that is judged. `unseen`: what this account could not look at."""

    service: ServiceFacts = ServiceFacts()
    setup: SetupFacts = SetupFacts()
    host: HostSigns = HostSigns()
    access: AccessFacts = AccessFacts()
    unseen: tuple[str, ...] = ()
