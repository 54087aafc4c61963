"""What the files of a host cannot tell: CPUID, XCR0, AMX permission, the instruction proof, affinity.

On the live host a child process answers (`appliance.probe.proof`); for a captured host the same keys stand in
`captured.json` in its root folder. A missing key is unknown. This module only gathers; `appliance.probe.cpu` decides.

    {"architecture": "x86_64", "cpuid": {"7.0": {"eax": "0x0", ...}}, "xgetbv": "0x7", "amx_permission": null,
     "proof": {"avx2": true}, "reasons": {"avx512": "..."}, "executable_mappings": true, "affinity": [0, 1],
     "disk": {"store_path": "...", "store_free_bytes": 0, "shm_total_bytes": 0, "shm_free_bytes": 0},
     "software": {"compiler": "/usr/bin/g++", "versions": {"torch": "2.13.0"}}}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.errors import UsageError

CHILD_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    architecture: str | None = None
    """As `uname -m` says it."""
    cpuid: Mapping[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)
    """(leaf, subleaf) -> register -> value."""
    xcr0: int | None = None
    """The state components that the operating system enabled (XGETBV 0)."""
    amx_permission: bool | None = None
    proof: Mapping[str, bool | None] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    executable_mappings: bool | None = None
    affinity: tuple[int, ...] | None = None
    disk: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    """What the machine itself found by its environment: wins over what the files of the folder say."""


def parse_evidence(text: str) -> Evidence:
    """Read a child's answer or a `captured.json`. Raises ValueError when it is not such an object."""
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    try:
        leaves = {
            (int(leaf, 16), int(subleaf)): {name: _number(value) for name, value in registers.items()}
            for (leaf, _, subleaf), registers in ((k.partition("."), v) for k, v in raw.get("cpuid", {}).items())
        }
        affinity = raw.get("affinity")
        return Evidence(
            architecture=raw.get("architecture"),
            cpuid=leaves,
            xcr0=None if raw.get("xgetbv") is None else _number(raw["xgetbv"]),
            amx_permission=raw.get("amx_permission"),
            proof=dict(raw.get("proof", {})),
            reasons=dict(raw.get("reasons", {})),
            executable_mappings=raw.get("executable_mappings"),
            affinity=None if affinity is None else tuple(sorted(map(int, affinity))),
            disk=dict(raw.get("disk", {})),
            software=dict(raw.get("software", {})),
        )
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None


def read_captured(root: Path) -> Evidence:
    """The evidence of a captured host; all unknown when it has no `captured.json`."""
    path = root / "captured.json"
    try:
        return parse_evidence(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Evidence()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}", why=str(error), do="correct or remove that file") from None


def ask_live(worth_proving: Callable[[Evidence], Iterable[str]]) -> Evidence:
    """Evidence of this machine. `worth_proving` names the tiers whose flags and OS state say yes: only their
    instructions are executed. One child asks CPUID, a second one (if need be) runs the proofs."""
    known = _child(("cpuid",))
    tiers = tuple(worth_proving(known))
    if tiers:
        proofs = _child(tiers)
        known = replace(known, proof=proofs.proof, reasons=proofs.reasons)
    return replace(known, architecture=os.uname().machine, affinity=tuple(sorted(os.sched_getaffinity(0))))


def _child(questions: tuple[str, ...]) -> Evidence:
    """Run the proof program. A child that cannot start, hangs or answers nonsense leaves everything unknown."""
    # -I -S: no site-packages, no environment, so that it starts in 15 ms and nothing of the user's runs in it.
    program = Path(__file__).with_name("proof.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(program), *questions],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=CHILD_TIMEOUT_S, check=False,
        )
        return parse_evidence(done.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return Evidence()


def _number(value: int | str) -> int:
    return int(value, 0) if isinstance(value, str) else int(value)
