"""CPU identity and the usable instruction-set tier. Pure: text and evidence in, CpuFacts out.

A tier is usable when three witnesses agree, in this order of trust:
- flags: /proc/cpuinfo lists them on every CPU, and CPUID (where it was asked) has the bits;
- operating system: XCR0 enables the register state, and for AMX the kernel grants the tile permission;
- proof: a child process executed the instructions and they returned the right value.
The host's tier is the highest usable one below which every tier is usable too. An unknown never counts as yes.
"""

from __future__ import annotations

from appliance.facts import TIER_FLAGS, TIERS, CpuFacts, TierFact
from appliance.probe.evidence import Evidence

CPUID_BITS: dict[str, tuple[tuple[int, int], str, int]] = {
    "avx": ((1, 0), "ecx", 28),
    "fma": ((1, 0), "ecx", 12),
    "f16c": ((1, 0), "ecx", 29),
    "avx2": ((7, 0), "ebx", 5),
    "avx512f": ((7, 0), "ebx", 16),
    "avx512dq": ((7, 0), "ebx", 17),
    "avx512bw": ((7, 0), "ebx", 30),
    "avx512vl": ((7, 0), "ebx", 31),
    "avx512_vnni": ((7, 0), "ecx", 11),
    "avx512_bf16": ((7, 1), "eax", 5),
    "amx_bf16": ((7, 0), "edx", 22),
    "amx_tile": ((7, 0), "edx", 24),
    "amx_int8": ((7, 0), "edx", 25),
}
"""cpuinfo flag -> (leaf, subleaf), register, bit (Intel SDM volume 2A, CPUID)."""

XCR0_NEEDED: dict[str, tuple[int, str]] = {
    "avx2": (0x6, "SSE and AVX"),
    "avx512": (0xE6, "AVX-512"),
    "avx512_vnni": (0xE6, "AVX-512"),
    "avx512_bf16": (0xE6, "AVX-512"),
    "amx": (0x60000, "AMX tile"),
}
"""Tier -> XCR0 bits that must all be set (Intel SDM volume 1, 13.3), and the name of that state."""


def parse_cpuinfo(text: str | None) -> tuple[str | None, str | None, frozenset[str] | None]:
    """(vendor, model name, flags common to all CPUs) of /proc/cpuinfo; None for what it does not say."""
    vendor = model = None
    flags: frozenset[str] | None = None
    for line in (text or "").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "vendor_id":
            vendor = vendor or value or None
        elif key == "model name":
            model = model or value or None
        elif key == "flags":
            flags = frozenset(value.split()) if flags is None else flags & frozenset(value.split())
    return vendor, model, flags


def read_cpu(cpuinfo: str | None, evidence: Evidence) -> CpuFacts:
    """`cpuinfo` is the text of /proc/cpuinfo, None when there is none."""
    vendor, model, flags = parse_cpuinfo(cpuinfo)
    architecture = evidence.architecture or ("x86_64" if flags and "lm" in flags else None)
    tiers = assess(flags, evidence) if architecture == "x86_64" else ()
    return CpuFacts(
        architecture=architecture,
        vendor=vendor,
        model_name=model,
        flags=flags or frozenset(),
        hypervisor="hypervisor" in (flags or ()),
        tiers=tiers,
        tier=highest(tiers),
    )


def highest(tiers: tuple[TierFact, ...]) -> str | None:
    """The last tier before the first one that is not usable."""
    best = None
    for tier in tiers:
        if not tier.usable:
            break
        best = tier.name
    return best


def worth_proving(cpuinfo: str | None, evidence: Evidence) -> tuple[str, ...]:
    """Tiers that flags and operating system both allow: only their instructions may be tried."""
    flags = parse_cpuinfo(cpuinfo)[2]
    return tuple(
        tier for tier in TIERS[1:] if _flags(tier, flags, evidence)[0] and _os_enabled(tier, flags, evidence)[0]
    )


def assess(flags: frozenset[str] | None, evidence: Evidence) -> tuple[TierFact, ...]:
    """One fact per tier, in the order of TIERS. The scalar tier is what this program itself runs on."""
    facts = [TierFact(name="scalar", flags=True, os_enabled=True, proven=True)]
    for tier in TIERS[1:]:
        has_flags, why_flags = _flags(tier, flags, evidence)
        os_enabled, why_os = _os_enabled(tier, flags, evidence)
        proven, why_proof = _proof(tier, evidence)
        if has_flags is False or os_enabled is False:
            proven, why_proof = None, ""  # never tried
        fact = TierFact(
            name=tier, flags=has_flags, os_enabled=os_enabled, proven=proven, reason=why_flags or why_os or why_proof
        )
        facts.append(fact)
    return tuple(facts)


def _flags(tier: str, flags: frozenset[str] | None, evidence: Evidence) -> tuple[bool | None, str]:
    if flags is None:
        return None, "CPU flags unknown: /proc/cpuinfo has none"
    missing = [flag for flag in TIER_FLAGS[tier] if flag not in flags]
    if missing:
        return False, f"the CPU lacks {', '.join(missing)}"
    masked = [flag for flag in TIER_FLAGS[tier] if _cpuid(flag, evidence) is False]
    if masked:
        return False, f"CPUID does not confirm {', '.join(masked)}"
    return True, ""


def _cpuid(flag: str, evidence: Evidence) -> bool | None:
    leaf, register, bit = CPUID_BITS[flag]
    value = evidence.cpuid.get(leaf, {}).get(register)
    return None if value is None else bool(value >> bit & 1)


def _os_enabled(tier: str, flags: frozenset[str] | None, evidence: Evidence) -> tuple[bool | None, str]:
    needed, state = XCR0_NEEDED[tier]
    if flags is not None and "xsave" not in flags:
        return False, "the operating system does not use XSAVE"
    if evidence.xcr0 is None:
        return None, f"XCR0 could not be read{_denied(evidence)}"
    if evidence.xcr0 & needed != needed:
        return False, f"the operating system does not enable the {state} state (XCR0 {evidence.xcr0:#x})"
    if tier == "amx" and evidence.amx_permission is not True:
        if evidence.amx_permission is None:
            return None, "AMX tile permission unknown"
        return False, "the kernel refuses the AMX tile permission"
    return True, ""


def _proof(tier: str, evidence: Evidence) -> tuple[bool | None, str]:
    proven = evidence.proof.get(tier)
    if proven:
        return True, ""
    reason = evidence.reasons.get(tier, "")
    if proven is False:
        return False, reason or "the proof child failed"
    return None, reason or f"no proof by execution{_denied(evidence)}"


def _denied(evidence: Evidence) -> str:
    return ": executable memory mappings are denied" if evidence.executable_mappings is False else ""
