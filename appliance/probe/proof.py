"""The program of the proof child: asks the CPU itself, and executes one instruction class per tier.

    python -I -S proof.py cpuid           CPUID leaves, XCR0 and the AMX tile permission
    python -I -S proof.py TIER [TIER...]  runs machine code of each tier in a fork of its own

It prints one JSON object with the keys of `captured.json` (read by `appliance.probe.evidence`). The code is a few
bytes in an anonymous executable mapping: no compiler, no torch. A tier is proven when its function returns the value
that the instructions must compute, and disproven when it returns another or dies by a signal of the CPU.

Rules: runs as a file, so it imports the standard library only and nothing of this package; never runs an instruction
in its own process but CPUID and XGETBV; where an executable mapping is denied it says so and proves nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

CODE: dict[str, str] = {
    # f(leaf, subleaf, out): push rbx; mov r8,rdx; mov eax,edi; mov ecx,esi; cpuid; store eax,ebx,ecx,edx; pop rbx
    "cpuid": "534989d089f889f10fa241890041895804418948084189500c5bc3",
    # xor ecx,ecx; xgetbv; shl rdx,32; or rax,rdx
    "xgetbv": "31c90f01d048c1e2204809d0c3",
    # vmovd; vpbroadcastd ymm; vcvtdq2ps; vfmadd213ps (x*x+x); vcvtps2ph; vcvtph2ps; vcvtps2dq; vpaddd ymm;
    # vextracti128; vmovd; vzeroupper
    "avx2": "c5f96ec7c4e27d58c0c5fc5bc0c4e27da8c0c4e37d1dc000c4e27d13c0c5fd5bc0c5fdfec0c4e37d39c001c5f97ec0c5f877c3",
    # vpbroadcastd zmm16,edi (F); vpaddd zmm; vpaddw zmm (BW); vandps zmm (DQ); vextracti64x2 (DQ);
    # vpaddd ymm17 (VL); vmovd; vzeroupper
    "avx512": "62e27d487cc762a17d40fec062a17d40fdc062a17c4054c062a3fd4839c10362a17520fec962e17d087ec8c5f877c3",
    # vpbroadcastd zmm1,edi; vpxord zmm0; vpdpbusd zmm0,zmm1,zmm1; vextracti32x4 xmm0,zmm0,3; vmovd; vzeroupper
    "avx512_vnni": "62f27d487ccf62f17d48efc062f2754850c162f37d4839c003c5f97ec0c5f877c3",
    # the same with vdpbf16ps
    "avx512_bf16": "62f27d487ccf62f17d48efc062f2764852c162f37d4839c003c5f97ec0c5f877c3",
    # f(value, -, tile config + scratch): ldtilecfg; tileloadd tmm1, tmm2; tilezero; tdpbssd; tilestored; tilezero;
    # tdpbf16ps; tilestored; tilerelease; the sum of both products
    "amx": "897a40c4e2784902b804000000c4e27b4b4c0240c4e27b4b540240c4e27b49c0c4e26b5ec1c4e27a4b440244"
    "c4e27b49c0c4e26a5cc1c4e27a4b440248c4e27849c08b4244034248c3",
}

CHECK: dict[str, tuple[int, int]] = {
    "avx2": (3, 24),  # 2 * (3 * 3 + 3)
    "avx512": (3, 24),  # doubled three times
    "avx512_vnni": (0x01020304, 30),  # 1 + 4 + 9 + 16
    "avx512_bf16": (0x3F803F80, 0x40000000),  # 1.0 * 1.0 + 1.0 * 1.0 = 2.0f
    "amx": (0x3F803F80, 0x40000000 + 40706),  # that, and 2 * (63 * 63 + 128 * 128)
}
"""Tier -> (argument, the value its function must return)."""

# Palette 1; tiles 0 to 2 hold one row of four bytes.
TILE_CONFIG = struct.pack("<B15x8H16x16B", 1, *(4, 4, 4, 0, 0, 0, 0, 0), *([1] * 3 + [0] * 13))

LEAVES = ((0, 0), (1, 0), (7, 0), (7, 1), (0xD, 0))
AMX_TILE_BIT, OSXSAVE_BIT = 24, 27
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
CPU_SIGNALS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP)
SCRATCH = 2048
"""Offset of the data area in the mapping, after the code."""


class MachineCode:
    """One executable page that holds one function `f(edi, esi, rdx = scratch) -> rax`. Raises OSError if denied."""

    def __init__(self, name: str) -> None:
        self.page = mmap.mmap(
            -1,
            mmap.PAGESIZE,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC,
        )
        # Only now: where libffi needs an executable mapping itself, importing ctypes fails with MemoryError.
        import ctypes

        code = bytes.fromhex(CODE[name])
        self.page[: len(code)] = code
        self.page[SCRATCH : SCRATCH + len(TILE_CONFIG)] = TILE_CONFIG
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
        prototype = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
        self.function: Callable[[int, int, int], int] = prototype(address)
        self.data = address + SCRATCH

    def call(self, first: int, second: int = 0) -> int:
        return self.function(first, second, self.data)

    def scratch(self, size: int) -> bytes:
        return self.page[SCRATCH : SCRATCH + size]


def ask_cpu() -> dict[str, Any]:
    """CPUID leaves as `{"7.0": {"eax": "0x...", ...}}`, XCR0 and the answer to the AMX permission request."""
    ask = MachineCode("cpuid")
    leaves: dict[str, dict[str, int]] = {}
    highest = 0
    for leaf, subleaf in LEAVES:
        if leaf > highest and leaf != 0:
            continue  # an unsupported leaf answers with the data of another one
        ask.call(leaf, subleaf)
        registers = struct.unpack("<4I", ask.scratch(16))
        leaves[f"{leaf:x}.{subleaf}"] = dict(zip(("eax", "ebx", "ecx", "edx"), registers, strict=True))
        if leaf == 0:
            highest = registers[0]
    xgetbv = MachineCode("xgetbv").call(0) if leaves.get("1.0", {}).get("ecx", 0) >> OSXSAVE_BIT & 1 else 0
    amx = bool(leaves.get("7.0", {}).get("edx", 0) >> AMX_TILE_BIT & 1)
    return {
        "cpuid": {leaf: {name: hex(value) for name, value in regs.items()} for leaf, regs in leaves.items()},
        "xgetbv": hex(xgetbv),
        "amx_permission": request_tiles() if amx else None,
    }


def request_tiles() -> bool:
    """Ask the kernel for AMX tile data for this process and the ones it starts."""
    import ctypes

    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def prove(tier: str) -> tuple[bool | None, str]:
    """Run the code of one tier in a fork: (proven, reason). None where nothing was shown either way."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            if tier == "amx" and not request_tiles():
                os._exit(3)
            argument, expected = CHECK[tier]
            status = 0 if MachineCode(tier).call(argument) & 0xFFFFFFFF == expected else 1
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return verdict(code)


def verdict(code: int) -> tuple[bool | None, str]:
    """What the exit code of a tier's fork (negative: the signal that ended it) shows."""
    if code == 0:
        return True, ""
    if code == 1:
        return False, "its instructions return a wrong value"
    if code == 3:
        return False, "the kernel refuses the AMX tile permission"
    if code < 0:
        name = signal.Signals(-code).name
        return (False if -code in CPU_SIGNALS else None), f"the proof child was killed by {name}"
    return None, "the proof child could not run"


def answer(questions: list[str]) -> dict[str, Any]:
    """The whole answer as a JSON object; `executable_mappings` False (and nothing else) where they are denied."""
    if os.uname().machine != "x86_64" or struct.calcsize("P") != 8:
        return {"executable_mappings": None}  # the code above is for 64-bit x86 processes
    try:
        result: dict[str, Any] = ask_cpu() if "cpuid" in questions else {}
    except (OSError, MemoryError):
        return {"executable_mappings": False}
    proofs = {tier: prove(tier) for tier in questions if tier in CHECK}
    if proofs:
        result["proof"] = {tier: proven for tier, (proven, _) in proofs.items()}
        result["reasons"] = {tier: reason for tier, (_, reason) in proofs.items() if reason}
    return {"executable_mappings": True, **result}


if __name__ == "__main__":
    # A limit of one byte also keeps the kernel from starting a core dump program for an expected SIGILL. Where core
    # files are forbidden already, a limit cannot be raised from nothing.
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    print(json.dumps(answer(sys.argv[1:])))
