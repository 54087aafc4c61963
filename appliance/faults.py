"""PURE: what a worker's end means. `classify(evidence)` names the fault; `of_error(error)` does it for a refused step.

Evidence is what the agent saw: exit status or signal, the phase, the last lines of the worker's log, the growth of the
cgroup's oom_kill counter, and the agent's own verdict where it ended the worker itself. No I/O, no clock.

The order of `classify`, first that applies: the OOM counter; the agent's verdict; an end that we asked for; a signal
(of the process, or of the engine as the log reports it); the worker's own last word; the patterns of `RULES`; else
`worker-died`. The exit status alone proves nothing: when its engine dies, vLLM's API server ends with status 0.

A fault's kind is what `appliance.recovery` goes by:

    transient    a later try may succeed
    capability   this rung asks more than the node can do; another rung may cure it
    content      the model or the settings are wrong: the same start fails again
    node         something outside (a full disk) must change first; it may do so by itself
    operator     somebody ended the worker on purpose
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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

SIGHUP, SIGINT, SIGILL, SIGBUS, SIGKILL, SIGTERM = 1, 2, 4, 7, 9, 15
ASKED_TO_END = (SIGHUP, SIGINT, SIGTERM)

Kind = Literal["transient", "capability", "content", "node", "operator"]
Repair = Literal["", "cache", "weights"]

MEMORY = ("one-engine", "small-kv", "short-context", "small-batch")
COMPILER = ("no-compile", *MEMORY)
"""The compiler's peak is the first thing to go when memory runs out while it works."""
INSTRUCTIONS = ("lower-isa", "aten")
"""An illegal instruction: the native kernel has proved its instructions in the self-test, torch's code has not; so the
lower instruction set comes first, which covers both, and the other kernel second."""
STALLED = ("one-engine", "no-compile", "aten", "small-batch")
EVERY = ("one-engine", "aten", "no-compile", "small-kv", "short-context", "small-batch", "lower-isa")
"""Nobody knows why: whatever the plan has, in its order."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How a worker ended. `status`: as subprocess reports it (negative = signal); `oom_kills`: growth of the counter,
    None where it cannot be read; `answered`: it had answered before; `verdict`: one of `VERDICTS` when the agent ended
    the worker for that, `reason`: the verdict's own sentence."""

    status: int
    phase: str
    log: Sequence[str] = ()
    oom_kills: int | None = 0
    answered: bool = False
    verdict: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`name`: a stable word for metrics and rules; `error`: the class that carries the exit code; `cures`: rungs that
    may help, in this order; `patience`: how often it is retried on one rung before the next; `repair`: what should be
    checked and made again before the next start."""

    name: str
    kind: Kind
    error: type[ApplianceError]
    what: str
    why: str
    do: str
    cures: tuple[str, ...] = ()
    patience: int = 2
    repair: Repair = ""

    def exception(self) -> ApplianceError:
        return self.error(self.what, why=self.why, do=self.do)

    @property
    def sentence(self) -> str:
        """What and why, on one line; what to do is left to whoever knows what happens next."""
        return self.error(self.what, why=self.why).line


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a fault's name stands for, whatever the sentence."""

    kind: Kind
    error: type[ApplianceError]
    cures: tuple[str, ...] = ()
    patience: int = 2
    repair: Repair = ""


MEANINGS: dict[str, Meaning] = {
    "oom-kill": Meaning(kind="capability", error=DoesNotFit, cures=MEMORY, patience=0),
    "out-of-memory": Meaning(kind="capability", error=DoesNotFit, cures=MEMORY, patience=0),
    "memory-stall": Meaning(kind="capability", error=DoesNotFit, cures=MEMORY, patience=1),
    "unsupported-isa": Meaning(kind="capability", error=CpuNotSupported, cures=INSTRUCTIONS, patience=0),
    "compiler-broken": Meaning(kind="capability", error=ConfigError, cures=("no-compile",), patience=0),
    "hang": Meaning(kind="transient", error=TransientError, cures=STALLED, patience=1),
    "slow-start": Meaning(kind="transient", error=TransientError, cures=("no-compile", "small-batch"), patience=1),
    "crash": Meaning(kind="transient", error=TransientError, cures=EVERY),
    "crash-while-loading": Meaning(kind="transient", error=TransientError, cures=EVERY),
    "worker-died": Meaning(kind="transient", error=TransientError, cures=EVERY),
    "killed-unexplained": Meaning(kind="transient", error=DoesNotFit, cures=MEMORY),
    "port-taken": Meaning(kind="transient", error=TransientError),
    "corrupt-cache": Meaning(kind="transient", error=TransientError, cures=("no-compile",), repair="cache"),
    "unreadable-weights": Meaning(kind="content", error=StoreError, repair="weights"),
    "damaged-weights": Meaning(kind="content", error=ModelError, repair="weights"),
    "bad-model": Meaning(kind="content", error=ModelError, repair="weights"),
    "bad-arguments": Meaning(kind="content", error=ConfigError),
    "plugin-missing": Meaning(kind="content", error=ConfigError),
    "disk-full": Meaning(kind="node", error=StoreError),
    "killed": Meaning(kind="operator", error=TransientError),
}

VERDICTS: dict[str, tuple[str, str, str]] = {
    # verdict of the agent: what, why, do
    "hang": ("the worker hung", "it gave no answer and made no progress", "see the worker's log"),
    "slow-start": ("the worker did not become ready", "its start made no progress any more", "see the worker's log"),
    "memory-stall": ("the worker was slowed down to a stand-still", "it is held at its memory limit (memory.high)",
                     "raise MemoryHigh of the unit, or lower context"),
    "damaged-weights": ("damage was found in the stored weights", "bytes have changed",
                        "run `applianctl model verify`; check the disk"),
}

ENGINE_GONE = "its engine process ended without a word, as one that is killed does"
ENGINE_ENDED = re.compile(r"EngineDeadError|engine core exited unexpectedly|Failed core proc")
LOG_SIGNAL = re.compile(
    r"(?:died unexpectedly|Engine process \S+ ended) \(exit code: -(\d+)\)|Failed core proc\(s\): \{'[^']*': -(\d+)")
"""Of vLLM's executor, of our engine process (`vllm_plugin.engine`), and of vLLM while it starts."""
RULES: tuple[tuple[str, str, str, str], ...] = (
    # pattern in the log, fault, why, do
    (r"[Aa]ddress already in use",
     "port-taken", "another program took the port meanwhile", "stop it or choose another port"),
    (r"No space left on device|Insufficient space in /dev/shm|Disk quota exceeded",
     "disk-full", "a disk is full", "free space and start again"),
    (r"MemoryError|DefaultCPUAllocator: can't allocate memory|not enough memory|Cannot allocate memory|std::bad_alloc",
     "out-of-memory", "an allocation failed", "raise the memory ceiling, or lower context"),
    (r"Available memory on node .* is less than|No available memory for the cache blocks|larger than the available KV",
     "out-of-memory", "vLLM found less memory than planned", "stop other programs, or lower context"),
    (r"(?:OSError|IOError): \[Errno 5\]|Input/output error",
     "unreadable-weights", "a file could not be read: the disk reports errors", "check the disk"),
    (r"SafetensorError|InvalidHeaderDeserialization|not initialized from checkpoint|There is no module or parameter",
     "bad-model", "the stored model is not what vLLM needs", "run `applianctl model verify`"),
    (r"Unknown quantization method",
     "plugin-missing", "the cpu_int4 plugin did not load in the worker", "install the worker again"),
    (r"InvalidCxxCompiler|CppCompileError|No working C\+\+ compiler",
     "compiler-broken", "the C++ compiler does not work", "repair g++, or set compile to false"),
    (r"UnpicklingError|_pickle\.|EOFError: Ran out of input|torchinductor.*(?:file too short|invalid ELF header)"
     r"|JSONDecodeError.*(?:inductor|cache)|bad marshal data",
     "corrupt-cache", "a file of the compile cache is damaged", "see the worker's log"),
    (r"Illegal instruction",
     "unsupported-isa", "code for a CPU this is not", "report it with `applianctl probe --json`"),
    (r"error: (?:unrecognized arguments|argument |ambiguous option)|validation errors? for \w+Config",
     "bad-arguments", "vLLM does not take these arguments", "look at worker.extra_args and context"),
)
ERRORS = {cls.__name__: cls for cls in ApplianceError.__subclasses__()}


def fault(name: str, *, what: str, why: str, do: str, phase: str = "") -> Fault:
    """A fault of a known name; `phase` matters where the cure depends on it."""
    meaning = MEANINGS[name]
    cures = COMPILER if meaning.cures == MEMORY and "compil" in phase else meaning.cures
    return Fault(name=name, kind=meaning.kind, error=meaning.error, what=what, why=why, do=do, cures=cures,
                 patience=meaning.patience, repair=meaning.repair)


def classify(evidence: Evidence) -> Fault:
    """Name the end of a worker. Never raises; what no rule knows is `worker-died` with the last telling log line."""
    text = "\n".join(evidence.log)
    phase = evidence.phase
    died, ended = (f"the worker {verb} while {phase}" if phase else f"the worker {verb}" for verb in ("died", "ended"))
    if evidence.oom_kills:
        return fault("oom-kill", what=died, why="the kernel's OOM killer ended it",
                     do="raise the memory ceiling, or lower context", phase=phase)
    if evidence.verdict in VERDICTS:
        what, why, do = VERDICTS[evidence.verdict]
        return fault(evidence.verdict, what=f"{what} while {phase}" if phase else what, why=evidence.reason or why,
                     do=do, phase=phase)
    if signal := _signal(evidence.status, text):
        return _by_signal(signal, evidence, died)
    for line in reversed(evidence.log):
        if match := re.match(r"appliance worker: (.+)", line):
            return refusal(match[1], by_exit_code(evidence.status))
        if match := re.search(r"appliance\.errors\.(\w+): (.+)", line):  # raised by the plugin in the engine process
            return refusal(match[2], ERRORS.get(match[1], TransientError))
    for pattern, name, why, do in RULES:
        if re.search(pattern, text):
            return fault(name, what=ended, why=why, do=do, phase=phase)
    if evidence.status == 0 and "[shutdown] API server: shutdown triggered" in text and not ENGINE_ENDED.search(text):
        return fault("killed", what=ended, why="a signal asked it to, and not the agent's", do="start again")
    why = last_telling_line(evidence.log) or (
        ENGINE_GONE if ENGINE_ENDED.search(text) else f"exit status {evidence.status}")
    return fault("worker-died", what=ended, why=why, do="see the worker's log")


def _signal(status: int, text: str) -> int:
    """The signal that ended the worker or its engine; 0 when none did."""
    if status < 0:
        return -status
    match = LOG_SIGNAL.search(text)
    return int(match[1] or match[2]) if match else 0


def _by_signal(signal: int, evidence: Evidence, died: str) -> Fault:
    if signal == SIGKILL and evidence.oom_kills is None:
        # Nobody can say who did it. Most often it was memory; but a single one is not enough to serve less.
        return fault("killed-unexplained", what=died, why="killed by signal 9, most often for memory",
                     do="raise the memory ceiling, or lower context", phase=evidence.phase)
    if signal == SIGKILL:
        return fault("killed", what=died, why="killed by signal 9, and not for memory", do="start again")
    if signal in ASKED_TO_END:
        return fault("killed", what=died, why=f"ended by signal {signal}, and not by the agent", do="start again")
    if signal == SIGILL:
        return fault("unsupported-isa", what=died, why="illegal instruction (signal 4): code for a CPU this is not",
                     do="report it with `applianctl probe --json`")
    if signal == SIGBUS:
        return fault("unreadable-weights", what=died, why="signal 7: a mapped file of weights could not be read",
                     do="check the disk; run `applianctl model verify`")
    return fault("crash" if evidence.answered else "crash-while-loading", what=died, why=f"signal {signal}",
                 do="start again; see the worker's log")


def refusal(sentence: str, error: type[ApplianceError]) -> Fault:
    """A step that said itself why it ends: the worker's last word, by the error's class."""
    meaning = {
        ModelError: Meaning(kind="content", error=error, repair="weights"),
        ConfigError: Meaning(kind="content", error=error),
        StoreError: Meaning(kind="node", error=error),
        DoesNotFit: Meaning(kind="capability", error=error, cures=MEMORY, patience=0),
        CpuNotSupported: Meaning(kind="capability", error=error, cures=INSTRUCTIONS, patience=0),
    }.get(error, Meaning(kind="transient", error=error))
    return Fault(name="refused-by-worker", kind=meaning.kind, error=error, what=sentence, why="", do="",
                 cures=meaning.cures, patience=meaning.patience, repair=meaning.repair)


REFUSED: dict[int, tuple[str, Kind]] = {
    65: ("model-refused", "content"),
    73: ("store", "node"),
    76: ("does-not-fit", "content"),
    77: ("cpu-not-supported", "content"),
    78: ("configuration", "content"),
}
"""A step before the worker's start that was refused, by exit code. No rung helps: the plan itself says no."""


def of_error(error: ApplianceError) -> Fault:
    """The fault for a step before the worker's start (provision, probe, plan) that ended with this error."""
    name, kind = REFUSED.get(error.exit_code, ("preparing-failed", "transient"))
    return Fault(name=name, kind=kind, error=type(error), what=error.what, why=error.why, do=error.do)


def last_telling_line(log: Sequence[str]) -> str:
    """The last line that looks like an exception's message, without vLLM's prefixes; empty when there is none."""
    for line in reversed(log):
        bare = re.sub(r"^(\(\w+ pid=\d+\) )?((ERROR|CRITICAL) [\d-]+ [\d:]+ (\[[^\]]*\] )?)?", "", line).strip()
        consequence = re.search("Engine core initialization failed|EngineDeadError|^Error in .* generator", bare)
        if re.match(r"[\w.]*(Error|Exception|Exit)\b.{4,}", bare) and not consequence:
            return bare[:300]
    return ""
