"""CPU identities for the host folders: the lines of /proc/cpuinfo and what CPUID and XGETBV say on such a machine."""

from __future__ import annotations

from dataclasses import dataclass, field

INTEL_VM = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ss "
    "ht syscall nx pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology nonstop_tsc cpuid "
    "tsc_known_freq pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 x2apic movbe popcnt "
    "tsc_deadline_timer aes xsave avx f16c rdrand hypervisor lahf_lm abm 3dnowprefetch invpcid_single "
    "ssbd ibrs ibpb stibp ibrs_enhanced fsgsbase tsc_adjust bmi1 avx2 smep bmi2 erms invpcid "
)
INTEL_METAL = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush dts acpi mmx fxsr "
    "sse sse2 ss ht tm pbe syscall nx pdpe1gb rdtscp lm constant_tsc art arch_perfmon pebs bts rep_good "
    "nopl xtopology nonstop_tsc cpuid aperfmperf tsc_known_freq pni pclmulqdq dtes64 monitor ds_cpl vmx "
    "est tm2 ssse3 sdbg fma cx16 xtpr pdcm pcid sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes "
    "xsave avx f16c rdrand lahf_lm abm 3dnowprefetch cpuid_fault epb ssbd ibrs ibpb stibp tpr_shadow "
    "flexpriority ept vpid ept_ad fsgsbase tsc_adjust bmi1 avx2 smep bmi2 erms invpcid "
)


@dataclass(frozen=True, kw_only=True)
class Cpu:
    vendor: str
    family: int
    model: int
    name: str
    stepping: int
    flags: str
    xgetbv: str | None
    cpuid: dict[str, dict[str, str]] = field(default_factory=dict)


EPYC_AVX2_VM = Cpu(
    vendor="AuthenticAMD", family=25, model=1, name="AMD EPYC", stepping=1,
    flags="fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse "
    "sse2 ht syscall nx mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology "
    "nonstop_tsc cpuid extd_apicid tsc_known_freq pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 "
    "x2apic movbe popcnt tsc_deadline_timer aes xsave avx f16c rdrand hypervisor lahf_lm cmp_legacy "
    "cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw topoext vmmcall fsgsbase tsc_adjust bmi1 "
    "avx2 smep bmi2 erms invpcid rdseed adx smap clflushopt clwb sha_ni xsaveopt xsavec xgetbv1 "
    "xsaves clzero xsaveerptr arat umip vaes vpclmulqdq rdpid fsrm",
    xgetbv="0x7",
    cpuid={"1.0": {"ecx": "0xfffa3203"}, "7.0": {"ebx": "0x219c07ab", "ecx": "0x400684", "edx": "0x10"},
           "7.1": {"eax": "0x0"}, "d.0": {"eax": "0x7"}},
)

# The hypervisor shows the AVX-512 bits of the hardware but saves only SSE and AVX state.
CASCADE_LAKE_VM = Cpu(
    vendor="GenuineIntel", family=6, model=85, name="Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", stepping=7,
    flags=INTEL_VM + "mpx avx512f avx512dq rdseed adx smap clflushopt clwb avx512cd avx512bw avx512vl "
    "xsaveopt xsavec xgetbv1 xsaves arat pku ospke avx512_vnni md_clear "
    "arch_capabilities",
    xgetbv="0x7",
    cpuid={"1.0": {"ecx": "0xfffa3203"}, "7.0": {"ebx": "0xd19f27eb", "ecx": "0x81a", "edx": "0xac000400"},
           "7.1": {"eax": "0x0"}, "d.0": {"eax": "0x7"}},
)

SAPPHIRE_RAPIDS_VM = Cpu(
    vendor="GenuineIntel", family=6, model=143, name="Intel(R) Xeon(R) Platinum 8488C", stepping=8,
    flags=INTEL_VM + "avx512f avx512dq rdseed adx smap avx512ifma clflushopt clwb avx512cd sha_ni "
    "avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves avx_vnni avx512_bf16 wbnoinvd ida "
    "arat avx512vbmi umip pku ospke waitpkg avx512_vbmi2 gfni vaes vpclmulqdq "
    "avx512_vnni avx512_bitalg tme avx512_vpopcntdq rdpid cldemote movdiri movdir64b "
    "md_clear serialize amx_bf16 avx512_fp16 amx_tile amx_int8 flush_l1d "
    "arch_capabilities",
    xgetbv="0x602e7",
    cpuid={"1.0": {"ecx": "0xfffa3203"}, "7.0": {"ebx": "0xf1bf07ab", "ecx": "0x1b415f6e", "edx": "0xbfc04410"},
           "7.1": {"eax": "0x1c30"}, "d.0": {"eax": "0x602e7"}},
)

ZEN4 = Cpu(
    vendor="AuthenticAMD", family=25, model=97, name="AMD Ryzen 7 7700 8-Core Processor", stepping=2,
    flags="fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse "
    "sse2 ht syscall nx mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good amd_lbr_v2 nopl "
    "nonstop_tsc cpuid extd_apicid aperfmperf rapl pni pclmulqdq monitor ssse3 fma cx16 sse4_1 "
    "sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm cmp_legacy svm extapic cr8_legacy abm "
    "sse4a misalignsse 3dnowprefetch osvw ibs skinit wdt tce topoext perfctr_core perfctr_nb bpext "
    "perfctr_llc mwaitx cpb cat_l3 cdp_l3 hw_pstate ssbd mba perfmon_v2 ibrs ibpb stibp "
    "ibrs_enhanced vmmcall fsgsbase bmi1 avx2 smep bmi2 erms invpcid cqm rdt_a avx512f avx512dq "
    "rdseed adx smap avx512ifma clflushopt clwb avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec "
    "xgetbv1 xsaves cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local avx512_bf16 clzero irperf "
    "xsaveerptr rdpru wbnoinvd cppc arat npt lbrv svm_lock nrip_save tsc_scale vmcb_clean "
    "flushbyasid decodeassists pausefilter pfthreshold avic v_vmsave_vmload vgif x2avic v_spec_ctrl "
    "vnmi avx512vbmi umip pku ospke avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg "
    "avx512_vpopcntdq rdpid overflow_recov succor smca fsrm flush_l1d",
    xgetbv="0x2e7",
    cpuid={"1.0": {"ecx": "0x7ef8320b"}, "7.0": {"ebx": "0xf1bf97a9", "ecx": "0x405fce", "edx": "0x10000010"},
           "7.1": {"eax": "0x20"}, "d.0": {"eax": "0x2e7"}},
)

_HYBRID = (
    "rdseed adx smap clflushopt clwb intel_pt sha_ni xsaveopt xsavec xgetbv1 xsaves split_lock_detect "
    "user_shstk avx_vnni dtherm ida arat pln pts hwp hwp_notify hwp_act_window hwp_epp hwp_pkg_req hfi "
    "vnmi umip pku ospke waitpkg gfni vaes vpclmulqdq tme rdpid movdiri movdir64b fsrm md_clear serialize "
    "pconfig arch_lbr ibt flush_l1d arch_capabilities"
)
_HYBRID_CPUID = {
    "1.0": {"ecx": "0x7ffafbbf"}, "7.0": {"ebx": "0x239c27eb", "ecx": "0x98c027ac", "edx": "0xfc1cc410"},
    "7.1": {"eax": "0x400810"}, "d.0": {"eax": "0x207"},
}

ARROW_LAKE = Cpu(
    vendor="GenuineIntel", family=6, model=198, name="Intel(R) Core(TM) Ultra 7 265K", stepping=2,
    flags=INTEL_METAL + _HYBRID, xgetbv="0x207", cpuid=_HYBRID_CPUID,
)

RAPTOR_LAKE = Cpu(
    vendor="GenuineIntel", family=6, model=183, name="13th Gen Intel(R) Core(TM) i5-13600K", stepping=1,
    flags=INTEL_METAL + _HYBRID, xgetbv="0x207", cpuid=_HYBRID_CPUID,
)

KABY_LAKE = Cpu(
    vendor="GenuineIntel", family=6, model=158, name="Intel(R) Core(TM) i7-7700 CPU @ 3.60GHz", stepping=9,
    flags=INTEL_METAL + "mpx rdseed adx smap clflushopt intel_pt xsaveopt xsavec xgetbv1 xsaves dtherm "
    "ida arat pln pts hwp hwp_notify hwp_act_window hwp_epp vnmi md_clear flush_l1d "
    "arch_capabilities",
    xgetbv="0x1f",
    cpuid={"1.0": {"ecx": "0x7ffafbbf"}, "7.0": {"ebx": "0x29c6fbf", "ecx": "0x0", "edx": "0xbc002e00"},
           "d.0": {"eax": "0x1f"}},
)

COFFEE_LAKE = Cpu(
    vendor="GenuineIntel", family=6, model=158, name="Intel(R) Core(TM) i7-9700K CPU @ 3.60GHz", stepping=12,
    flags=KABY_LAKE.flags, xgetbv="0x1f", cpuid=KABY_LAKE.cpuid,
)

CASCADE_LAKE = Cpu(
    vendor="GenuineIntel", family=6, model=85, name="Intel(R) Xeon(R) Gold 6226R CPU @ 2.90GHz", stepping=7,
    flags=INTEL_METAL + "cqm mpx rdt_a avx512f avx512dq rdseed adx smap clflushopt clwb intel_pt avx512cd "
    "avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves cqm_llc cqm_occup_llc "
    "cqm_mbm_total cqm_mbm_local dtherm ida arat pln pts pku ospke avx512_vnni "
    "md_clear flush_l1d arch_capabilities",
    xgetbv="0x2ff",
    cpuid={"1.0": {"ecx": "0x7ffefbff"}, "7.0": {"ebx": "0xd39ffffb", "ecx": "0x818", "edx": "0xbc000600"},
           "d.0": {"eax": "0x2ff"}},
)
