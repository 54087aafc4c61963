"""PURE: what a worker's end means. `classify(evidence)` names the fault in one sentence with what to do next.

Evidence is what the agent saw: exit status or signal, the phase, the last lines of the worker's log and the growth
of the cgroup's oom_kill counter. Rules are tried in order; the first that matches names the fault. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.errors import (
    ApplianceError,
    ConfigError,
    CpuNotSupported,
    DoesNotFit,
    ModelError,
    StoreError,
    TransientError,
    by_exit_code,
)

SIGILL, SIGKILL, SIGSEGV, SIGBUS = 4, 9, 11, 7


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How a worker ended. `status`: as subprocess reports it (negative = signal); `oom_kills`: growth of the counter,
    None where it cannot be read."""

    status: int
    phase: str
    log: Sequence[str] = ()
    oom_kills: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`name`: a stable word for metrics and rules; `error`: the class that carries the exit code."""

    name: str
    error: type[ApplianceError]
    what: str
    why: str
    do: str

    def exception(self) -> ApplianceError:
        return self.error(self.what, why=self.why, do=self.do)


ERRORS = {cls.__name__: cls for cls in ApplianceError.__subclasses__()}
ENGINE_GONE = "its engine process ended without a word, as one that is killed does"
LOG_SIGNAL = re.compile(r"died unexpectedly \(exit code: -(\d+)\)")
RULES: tuple[tuple[str, str, type[ApplianceError], str, str], ...] = (
    # pattern in the log, name, class, why, do
    (r"[Aa]ddress already in use",
     "port-taken", TransientError, "another program took the port meanwhile", "stop it or choose another port"),
    (r"No space left on device|Insufficient space in /dev/shm",
     "disk-full", StoreError, "a disk is full", "free space and start again"),
    (r"MemoryError|DefaultCPUAllocator: can't allocate memory|not enough memory|Cannot allocate memory",
     "out-of-memory", DoesNotFit, "an allocation failed", "raise the memory ceiling, or lower context"),
    (r"Available memory on node .* is less than|No available memory for the cache blocks|larger than the available KV",
     "out-of-memory", DoesNotFit, "vLLM found less memory than planned", "stop other programs, or lower context"),
    (r"SafetensorError|InvalidHeaderDeserialization|not initialized from checkpoint|There is no module or parameter",
     "bad-model", ModelError, "the stored model is not what vLLM needs", "run `applianctl model verify`"),
    (r"Unknown quantization method",
     "plugin-missing", ConfigError, "the cpu_int4 plugin did not load in the worker", "install the worker again"),
    (r"InvalidCxxCompiler|CppCompileError|No working C\+\+ compiler",
     "compiler-broken", ConfigError, "the C++ compiler does not work", "repair g++, or set compile to false"),
    (r"Illegal instruction",
     "unsupported-isa", CpuNotSupported, "code for a CPU this is not", "report it with `applianctl probe --json`"),
)


def classify(evidence: Evidence) -> Fault:
    """Name the end of a worker. Never raises; what no rule knows is `worker-died` with the last telling log line."""
    text = "\n".join(evidence.log)
    signal = -evidence.status if evidence.status < 0 else 0
    if not signal and (match := LOG_SIGNAL.search(text)):
        signal = int(match[1])
    while_doing = f"while {evidence.phase}" if evidence.phase else ""
    died = f"the worker died {while_doing}".rstrip()
    if evidence.oom_kills or (signal == SIGKILL and evidence.oom_kills is None):
        why = "the kernel's OOM killer ended it" if evidence.oom_kills else "killed by signal 9, most often for memory"
        return Fault(name="oom-kill" if evidence.oom_kills else "killed", error=DoesNotFit, what=died, why=why,
                     do="raise the memory ceiling, or lower context")
    if signal == SIGKILL:
        return Fault(name="killed", error=TransientError, what=died, why="killed by signal 9, and not for memory",
                     do="start again")
    if signal == SIGILL:
        return Fault(name="unsupported-isa", error=CpuNotSupported, what=died,
                     why="illegal instruction (signal 4): code for a CPU this is not",
                     do="report it with `applianctl probe --json`")
    if signal == SIGBUS:
        return Fault(name="unreadable-weights", error=StoreError, what=died,
                     why="signal 7: a mapped file of weights could not be read",
                     do="check the disk; run `applianctl model verify`")
    if signal:
        return Fault(name="crash", error=TransientError, what=died,
                     why=f"signal {signal}", do="start again; see the worker's log")
    for line in reversed(evidence.log):
        if match := re.match(r"appliance worker: (.+)", line):
            return _own(match[1], by_exit_code(evidence.status))
        if match := re.search(r"appliance\.errors\.(\w+): (.+)", line):  # raised by the plugin in the engine process
            return _own(match[2], ERRORS.get(match[1], TransientError))
    for pattern, name, error, why, do in RULES:
        if re.search(pattern, text):
            return Fault(name=name, error=error, what=f"the worker ended {while_doing}".rstrip(), why=why, do=do)
    return Fault(name="worker-died", error=TransientError, what=f"the worker ended {while_doing}".rstrip(),
                 why=last_telling_line(evidence.log) or (ENGINE_GONE if "Failed core proc" in text else
                                                         f"exit status {evidence.status}"),
                 do="see the worker's log")


def _own(sentence: str, error: type[ApplianceError]) -> Fault:
    return Fault(name="refused-by-worker", error=error, what=sentence, why="", do="")


def last_telling_line(log: Sequence[str]) -> str:
    """The last line that looks like an exception's message, without vLLM's prefixes; empty when there is none."""
    for line in reversed(log):
        bare = re.sub(r"^(\(\w+ pid=\d+\) )?((ERROR|CRITICAL) [\d-]+ [\d:]+ (\[[^\]]*\] )?)?", "", line).strip()
        if re.match(r"[\w.]*(Error|Exception|Exit)\b.{4,}", bare) and "Engine core initialization failed" not in bare:
            return bare[:300]
    return ""
