"""What this process's torch can do: the facts that kernels refuse by.

Asked of torch itself, once, when layers are loaded; nothing here reads the CPU or the system. The packed layout and the
fast GEMM type follow `ATEN_CPU_CAPABILITY`, so both are asked of torch and never of CPUID.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_TORCH = "2.13"
"""The torch release whose packer and matmul these kernels were written against (packaging/worker.lock)."""

LIBRARY_ROWS = 64
"""Rows from which an AMX host uses the library GEMM, where nothing else was measured."""
GEMM_VARIABLE, ROWS_VARIABLE = "APPLIANCE_GEMM", "APPLIANCE_LIBRARY_ROWS"
"""The plan's word, where it was measured: `fp32` although the CPU has bf16; LIBRARY_ROWS on an AMX host."""

PACK_OP = "_convert_weight_to_int4pack_for_cpu"
MM_OP = "_weight_int4pack_mm_for_cpu"


@dataclass(frozen=True, kw_only=True)
class TorchHost:
    torch_version: str
    capability: str
    """`DEFAULT`, `AVX2` or `AVX512`: what ATen dispatches to."""
    gemm: torch.dtype
    """The GEMM type that is fast here: bf16 with AVX512-BF16 or AMX, else fp32."""
    library_rows: int
    """Rows from which the native kernel leaves a multiplication to the library GEMM; sys.maxsize: never."""
    amx: bool
    """Whether the library GEMM multiplies bf16 in AMX tiles, which no other route comes near to for many rows."""
    int4_refusal: str | None
    """Why torch's own int4 kernel cannot be used, or None."""


def read_torch_host(aten: Any = None, torch_version: str | None = None, *,
                    env: Mapping[str, str] = os.environ) -> TorchHost:
    """The facts of this process. `aten` and `torch_version` stand in for `torch.ops.aten` and torch's version."""
    capability, features = str(torch.backends.cpu.get_cpu_capability()), dict(torch.cpu.get_capabilities())
    aten = torch.ops.aten if aten is None else aten
    version = torch_version or str(torch.__version__)
    return TorchHost(
        torch_version=version,
        capability=capability,
        gemm=torch.float32 if env.get(GEMM_VARIABLE) == "fp32" else gemm_dtype(capability, features),
        library_rows=library_rows(has_amx(capability, features), env.get(ROWS_VARIABLE, "")),
        amx=has_amx(capability, features),
        int4_refusal=int4_refusal(aten, version),
    )


def gemm_dtype(capability: str, features: dict[str, Any]) -> torch.dtype:
    """bf16 only where the CPU multiplies bf16 and ATen was not held back to a lower instruction set.

    Without such instructions torch's bf16 GEMM is 4 to 7 times slower than its fp32 one.
    """
    native = features.get("avx512_bf16") or features.get("amx_bf16") or features.get("amx_tile")
    return torch.bfloat16 if native and capability.startswith("AVX512") else torch.float32


def has_amx(capability: str, features: dict[str, Any]) -> bool:
    """AMX with bf16, and ATen not held back to a lower instruction set."""
    return bool(features.get("amx_tile") and features.get("amx_bf16", True)) and capability.startswith("AVX512")


def library_rows(amx: bool, measured: str) -> int:
    """Only AMX makes the library GEMM worth a thought; there the plan's word counts, 0 meaning never."""
    if not amx:
        return sys.maxsize
    return (int(measured) or sys.maxsize) if measured.isdigit() else LIBRARY_ROWS


def int4_refusal(aten: Any, torch_version: str) -> str | None:
    """Try torch's packer on one small weight. The matmul is only looked up: forced capabilities may not run it."""
    found = f"found torch {torch_version}, supported is {SUPPORTED_TORCH}"
    for name in (PACK_OP, MM_OP):
        if not hasattr(aten, name):
            return f"torch has no operator {name} ({found})"
    try:
        packed = getattr(aten, PACK_OP)(torch.zeros(16, 32, dtype=torch.int32), 1)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"torch's {PACK_OP} does not take int32 codes: {cause} ({found})"
    if packed.dtype != torch.uint8 or packed.numel() != 256:
        return f"torch's {PACK_OP} returns {packed.dtype} x {packed.numel()}, expected uint8 x 256 ({found})"
    return None
