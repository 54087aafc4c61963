"""CPU identities of the fleet: as cpus.py, for more machines."""

from __future__ import annotations

from dataclasses import replace

from cpus import _HYBRID, _HYBRID_CPUID, CASCADE_LAKE, INTEL_METAL, INTEL_VM, RAPTOR_LAKE, SAPPHIRE_RAPIDS_VM, ZEN4, Cpu

_AMD = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ht syscall nx "
    "mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good nopl nonstop_tsc cpuid extd_apicid aperfmperf rapl pni "
    "pclmulqdq monitor ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm cmp_legacy svm extapic "
    "cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs skinit wdt tce topoext perfctr_core perfctr_nb bpext "
    "perfctr_llc mwaitx cpb hw_pstate ssbd ibpb stibp vmmcall fsgsbase bmi1 avx2 smep bmi2 rdseed adx smap clflushopt "
    "clwb sha_ni xsaveopt xsavec xgetbv1 xsaves clzero irperf xsaveerptr rdpru wbnoinvd arat npt lbrv "
)
_AVX512 = "avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq "

HASWELL = Cpu(
    vendor="GenuineIntel", family=6, model=60, name="Intel(R) Core(TM) i7-4790 CPU @ 3.60GHz", stepping=3,
    flags=INTEL_METAL + "xsaveopt dtherm ida arat pln pts md_clear flush_l1d", xgetbv="0x7",
    cpuid={"1.0": {"ecx": "0x7ffafbff"}, "7.0": {"ebx": "0x27ab", "ecx": "0x0", "edx": "0x9c000600"}, "d.0": {"eax": "0x7"}},
)
BROADWELL_EP = Cpu(
    vendor="GenuineIntel", family=6, model=79, name="Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", stepping=1,
    flags=INTEL_METAL + "cqm rdt_a rdseed adx smap intel_pt xsaveopt cqm_llc dtherm ida arat pln pts md_clear flush_l1d",
    xgetbv="0x7",
    cpuid={"1.0": {"ecx": "0x7ffefbff"}, "7.0": {"ebx": "0x21cbfbb", "ecx": "0x0", "edx": "0x9c000400"}, "d.0": {"eax": "0x7"}},
)
SKYLAKE_SP = replace(
    CASCADE_LAKE, name="Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz", stepping=4,
    flags=CASCADE_LAKE.flags.replace(" avx512_vnni", ""),
    cpuid={**CASCADE_LAKE.cpuid, "7.0": {"ebx": "0xd39ffffb", "ecx": "0x18", "edx": "0xbc000600"}},
)
ICE_LAKE_VM = Cpu(
    vendor="GenuineIntel", family=6, model=106, name="Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", stepping=6,
    flags=INTEL_VM + _AVX512 + "rdseed adx smap clflushopt clwb sha_ni xsaveopt xsavec xgetbv1 xsaves wbnoinvd ida arat pku "
    "ospke gfni vaes vpclmulqdq tme rdpid md_clear flush_l1d arch_capabilities",
    xgetbv="0x2e7",
    cpuid={"1.0": {"ecx": "0xfffa3203"}, "7.0": {"ebx": "0xf1bf27ab", "ecx": "0x405f4e", "edx": "0xac000400"},
           "7.1": {"eax": "0x0"}, "d.0": {"eax": "0x2e7"}},
)
SAPPHIRE_RAPIDS = replace(
    SAPPHIRE_RAPIDS_VM, name="Intel(R) Xeon(R) Gold 6430", stepping=8,
    flags=SAPPHIRE_RAPIDS_VM.flags.replace(" hypervisor", ""),
)
GRANITE_RAPIDS = replace(
    SAPPHIRE_RAPIDS, model=173, name="Intel(R) Xeon(R) 6980P", stepping=1, flags=SAPPHIRE_RAPIDS.flags + " amx_fp16",
    cpuid={**SAPPHIRE_RAPIDS_VM.cpuid, "7.1": {"eax": "0x201c30"}},
)
_TILES = (" amx_bf16", " amx_tile", " amx_int8")
SPR_VM_NO_TILES = replace(SAPPHIRE_RAPIDS_VM, xgetbv="0x2e7")
SPR_VM_NO_AMX = replace(
    SPR_VM_NO_TILES,
    flags=SAPPHIRE_RAPIDS_VM.flags.replace(_TILES[0], "").replace(_TILES[1], "").replace(_TILES[2], ""),
    cpuid={**SAPPHIRE_RAPIDS_VM.cpuid, "7.0": {"ebx": "0xf1bf07ab", "ecx": "0x1b415f6e", "edx": "0xbc804410"},
           "d.0": {"eax": "0x2e7"}},
)
SIERRA_FOREST = Cpu(
    vendor="GenuineIntel", family=6, model=175, name="Intel(R) Xeon(R) 6740E", stepping=3,
    flags=INTEL_METAL + _HYBRID.replace("hfi ", ""), xgetbv="0x207", cpuid=_HYBRID_CPUID,
)
ALDER_LAKE = replace(RAPTOR_LAKE, model=151, name="12th Gen Intel(R) Core(TM) i9-12900K", stepping=2)
METEOR_LAKE = replace(RAPTOR_LAKE, model=170, name="Intel(R) Core(TM) Ultra 5 125U", stepping=4)
N100 = replace(RAPTOR_LAKE, model=190, name="Intel(R) N100", stepping=0, flags=INTEL_METAL + _HYBRID.replace("hfi ", ""))
GOLDMONT_PLUS = Cpu(
    vendor="GenuineIntel", family=6, model=122, name="Intel(R) Celeron(R) J4125 CPU @ 2.00GHz", stepping=8,
    flags="fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush dts acpi mmx fxsr sse sse2 ss ht "
    "tm pbe syscall nx pdpe1gb rdtscp lm constant_tsc art arch_perfmon pebs bts rep_good nopl xtopology nonstop_tsc cpuid "
    "aperfmperf tsc_known_freq pni pclmulqdq dtes64 monitor ds_cpl vmx est tm2 ssse3 sdbg cx16 xtpr pdcm sse4_1 sse4_2 "
    "x2apic movbe popcnt tsc_deadline_timer aes xsave rdrand lahf_lm 3dnowprefetch ibrs ibpb stibp fsgsbase tsc_adjust smep "
    "erms mpx rdseed smap clflushopt intel_pt sha_ni xsaveopt xsavec xgetbv1 xsaves dtherm ida arat pln pts umip rdpid",
    xgetbv="0x1b",
    cpuid={"1.0": {"ecx": "0x4ff8ebbf"}, "7.0": {"ebx": "0x2294e283", "ecx": "0x40400004", "edx": "0xac000400"}},
)
KVM64 = Cpu(
    vendor="GenuineIntel", family=15, model=6, name="Common KVM processor", stepping=1,
    flags="fpu de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ht syscall nx lm "
    "constant_tsc nopl xtopology cpuid tsc_known_freq pni cx16 x2apic hypervisor", xgetbv="0x0",
    cpuid={"1.0": {"ecx": "0x80202001"}},
)
ZEN2_EPYC = Cpu(
    vendor="AuthenticAMD", family=23, model=49, name="AMD EPYC 7702 64-Core Processor", stepping=0,
    flags=_AMD + "umip rdpid overflow_recov succor smca", xgetbv="0x207",
    cpuid={"1.0": {"ecx": "0x7ed8320b"}, "7.0": {"ebx": "0x219c91a9", "ecx": "0x400004", "edx": "0x0"}, "d.0": {"eax": "0x207"}},
)
ZEN3 = Cpu(
    vendor="AuthenticAMD", family=25, model=80, name="AMD Ryzen 5 5600G with Radeon Graphics", stepping=0,
    flags=_AMD + "erms invpcid cqm rdt_a umip pku ospke vaes vpclmulqdq rdpid overflow_recov succor smca fsrm", xgetbv="0x207",
    cpuid={"1.0": {"ecx": "0x7ef8320b"}, "7.0": {"ebx": "0x219c97a9", "ecx": "0x40068c", "edx": "0x10"}, "d.0": {"eax": "0x207"}},
)
ZEN3_VM = replace(ZEN3, flags=ZEN3.flags.replace(" lahf_lm", " hypervisor lahf_lm"))
ZEN4_EPYC = replace(ZEN4, model=160, name="AMD EPYC 9754 128-Core Processor")
ZEN5 = replace(
    ZEN4, family=26, model=68, name="AMD Ryzen 9 9950X 16-Core Processor", stepping=0,
    flags=ZEN4.flags + " avx_vnni avx512_vp2intersect movdiri movdir64b",
    cpuid={**ZEN4.cpuid, "7.1": {"eax": "0x30"}},
)
ZHAOXIN = Cpu(
    vendor="  Shanghai  ", family=7, model=91, name="ZHAOXIN KaiXian KX-7000/8 C8", stepping=2,
    flags=_AMD.replace("svm extapic ", "vmx est "), xgetbv="0x7",
    cpuid={"1.0": {"ecx": "0x7ffafbff"}, "7.0": {"ebx": "0x219c07ab", "ecx": "0x4", "edx": "0x0"}},
)
