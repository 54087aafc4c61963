"""Writes the host folders beside it: `python tests/hosts/make.py [FOLDER]`. Review the diff of what it changed.

Each host is one call: a CPU, its cores as tuples of threads, files that differ from the usual, what captured.json
says, and what must come out. `expect` is compared with the facts as a subset; `count` counts the cores and their
kinds, `why` and `proven` name the reason and the proof of a tier. A machine captured in the field is simply one more
folder with an expect.json; it needs no entry here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cgroups
import cpus
from fleet import write_fleet
from folder import DEBIAN, GIB, host, meminfo, node

SPR_TIERS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
VM2 = [(0,), (1,)]
VM4 = [(0,), (1,), (2,), (3,)]
VM8 = [(cpu,) for cpu in range(8)]


def write_all(out: Path) -> None:
    instruction_sets(out)
    core_kinds(out)
    nodes_and_offline(out)
    memory_limits(out)
    cpu_limits(out)
    odd_userlands(out)
    write_fleet(out)


def instruction_sets(out: Path) -> None:
    spr = [(0, 4), (1, 5), (2, 6), (3, 7)]
    host(out, "avx2-vm", cpu=cpus.EPYC_AVX2_VM, cores=[(0,), (1,)], expect={
        "cpu": {"tier": "avx2", "hypervisor": True, "vendor": "AuthenticAMD", "model_name": "AMD EPYC"},
        "topology": {"smt": False, "allowed": [0, 1], "quota": None}, "count": {"cores": 2},
        "why": {"avx512": "the CPU lacks avx512f, avx512bw, avx512vl, avx512dq"},
        "software": {"compiler": "/usr/bin/g++", "libc": "glibc 2.36", "userland": "amd64", "kernel": "6.1.0-28-amd64",
                     "libnuma": "/usr/lib/x86_64-linux-gnu/libnuma.so.1", "python_headers": "/usr/include/python3.11"},
    })
    host(out, "avx512-no-os-state", cpu=cpus.CASCADE_LAKE_VM, cores=VM2, expect={
        "cpu": {"tier": "avx2"},
        "why": {"avx512": "the operating system does not enable the AVX-512 state (XCR0 0x7)"},
    })
    host(out, "avx512-sigill", cpu=cpus.CASCADE_LAKE_VM, cores=VM2, captured={
        "xgetbv": "0xe7", "proof": {"avx2": True, "avx512": False, "avx512_vnni": False},
        "reasons": dict.fromkeys(("avx512", "avx512_vnni"), "the proof child was killed by SIGILL"),
    }, expect={"cpu": {"tier": "avx2"}, "why": {"avx512": "the proof child was killed by SIGILL"},
               "proven": {"avx2": True, "avx512": False, "avx512_vnni": False, "avx512_bf16": None}})
    host(out, "avx512-cpuid-masked", cpu=cpus.CASCADE_LAKE_VM, cores=VM2, captured={
        "xgetbv": "0xe7", "cpuid": {"7.0": {"ebx": "0x219c07ab", "ecx": "0x0", "edx": "0x0"}},
    }, expect={"cpu": {"tier": "avx2"},
               "why": {"avx512": "CPUID does not confirm avx512f, avx512bw, avx512vl, avx512dq"}})
    no_xsave = cpus.Cpu(
        vendor="GenuineIntel", family=6, model=60, name="Intel Core Processor (Haswell, no TSX)", stepping=1,
        flags=cpus.INTEL_VM.replace(" xsave ", " "), xgetbv=None,
    )
    host(out, "avx2-no-xsave", cpu=no_xsave, cores=[(0,), (1,)], proven=(), expect={
        "cpu": {"tier": "scalar"}, "why": {"avx2": "the operating system does not use XSAVE"}})
    host(out, "spr-amx", cpu=cpus.SAPPHIRE_RAPIDS_VM, cores=spr, proven=SPR_TIERS,
         captured={"amx_permission": True}, expect={
             "cpu": {"tier": "amx", "hypervisor": True}, "topology": {"smt": True}, "count": {"cores": 4},
             "why": {"amx": ""}})
    host(out, "spr-amx-refused", cpu=cpus.SAPPHIRE_RAPIDS_VM, cores=spr, proven=SPR_TIERS[:-1],
         captured={"amx_permission": False}, expect={
             "cpu": {"tier": "avx512_bf16"}, "why": {"amx": "the kernel refuses the AMX tile permission"}})
    host(out, "zen4", cpu=cpus.ZEN4, cores=[(cpu, cpu + 8) for cpu in range(8)], proven=SPR_TIERS[:-1], expect={
        "cpu": {"tier": "avx512_bf16", "hypervisor": False}, "topology": {"smt": True}, "count": {"cores": 8},
        "why": {"amx": "the CPU lacks amx_tile, amx_bf16, amx_int8"}})
    host(out, "mappings-denied", cpu=cpus.COFFEE_LAKE, cores=VM8, proven=(), captured={
        "cpuid": {}, "xgetbv": None, "executable_mappings": False,
    }, expect={"cpu": {"tier": "scalar"}, "software": {"executable_mappings": False},
               "why": {"avx2": "XCR0 could not be read: executable memory mappings are denied"}})


def core_kinds(out: Path) -> None:
    host(out, "hybrid-8p12e", cpu=cpus.ARROW_LAKE, cores=[(cpu,) for cpu in range(20)],
         files={"sys/devices/cpu_core/cpus": "0-7", "sys/devices/cpu_atom/cpus": "8-19"}, expect={
             "cpu": {"tier": "avx2"}, "topology": {"smt": False},
             "count": {"cores": 20, "performance": 8, "efficiency": 12}})
    host(out, "hybrid-6p8e-smt", cpu=cpus.RAPTOR_LAKE,
         cores=[(cpu, cpu + 1) for cpu in range(0, 12, 2)] + [(cpu,) for cpu in range(12, 20)],
         files={"sys/devices/cpu_core/cpus": "0-11", "sys/devices/cpu_atom/cpus": "12-19"}, expect={
             "topology": {"smt": True}, "count": {"cores": 14, "performance": 6, "efficiency": 8}})
    host(out, "hybrid-capacity", cpu=cpus.RAPTOR_LAKE, cores=VM8,
         files={f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": "1024" if cpu < 4 else "595" for cpu in range(8)},
         expect={"count": {"cores": 8, "performance": 4, "efficiency": 4}})
    host(out, "smt-desktop", cpu=cpus.KABY_LAKE, cores=[(cpu, cpu + 4) for cpu in range(4)],
         files={"proc/meminfo": meminfo(15.5, 12, 2)}, expect={
             "topology": {"smt": True,
                          "cores": [{"cpus": [cpu, cpu + 4], "kind": None, "node": 0} for cpu in range(4)]},
             "memory": {"swap_total_bytes": 2 * GIB}})
    host(out, "smt-part-allowed", cpu=cpus.KABY_LAKE, cores=[(cpu, cpu + 4) for cpu in range(4)],
         captured={"affinity": [0, 4, 5]}, expect={
             "topology": {"smt": True, "allowed": [0, 4, 5], "cores": [{"cpus": [0, 4]}, {"cpus": [5]}]}})
    host(out, "no-smt-16", cpu=cpus.CASCADE_LAKE, cores=[(cpu,) for cpu in range(16)],
         proven=("avx2", "avx512", "avx512_vnni"), expect={
             "cpu": {"tier": "avx512_vnni"}, "topology": {"smt": False}, "count": {"cores": 16}})
    host(out, "vm-flat-8", cpu=cpus.EPYC_AVX2_VM, cores=VM8, expect={
        "topology": {"smt": False}, "count": {"cores": 8, "performance": 0, "efficiency": 0}})
    host(out, "single-core", cpu=cpus.EPYC_AVX2_VM, cores=[(0,)], files={"proc/meminfo": meminfo(2, 1.5)}, expect={
        "topology": {"online": [0], "smt": False}, "count": {"cores": 1}, "memory": {"ceiling_bytes": 2 * GIB}})


def nodes_and_offline(out: Path) -> None:
    host(out, "offline-4-7", cpu=cpus.COFFEE_LAKE, cores=VM8, online=(0, 1, 2, 3), expect={
        "topology": {"online": [0, 1, 2, 3], "allowed": [0, 1, 2, 3], "smt": False}, "count": {"cores": 4}})
    # SMT switched off at run time; /proc/self/status goes on naming the offline threads.
    host(out, "sibling-offline", cpu=cpus.KABY_LAKE, cores=[(cpu, cpu + 4) for cpu in range(4)], online=(0, 1, 2, 3),
         files={"proc/self/status": "Name:\tapplianctl\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n"},
         captured={"affinity": None},
         expect={"topology": {"smt": False, "allowed": [0, 1, 2, 3]}, "count": {"cores": 4}})
    # lxcfs numbers the container's CPUs from 0 in `online`; the affinity mask has the real ones.
    host(out, "lxc-renumbered", cpu=cpus.EPYC_AVX2_VM, cores=VM8,
         files={"sys/devices/system/cpu/online": "0-1"}, captured={"affinity": [2, 5]},
         expect={"topology": {"allowed": [2, 5]}, "count": {"cores": 2}})
    host(out, "two-nodes", cpu=cpus.CASCADE_LAKE, cores=VM8, proven=("avx2", "avx512", "avx512_vnni"),
         files={**node(0, "0-3", 8), **node(1, "4-7", 8)}, expect={
             "topology": {"nodes": [{"node": 0, "cpus": [0, 1, 2, 3], "memory_bytes": 8 * GIB},
                                    {"node": 1, "cpus": [4, 5, 6, 7], "memory_bytes": 8 * GIB}],
                          "cores": [{"cpus": [cpu], "node": cpu // 4} for cpu in range(8)]}})
    host(out, "memory-only-node", cpu=cpus.CASCADE_LAKE, cores=VM4, proven=("avx2", "avx512", "avx512_vnni"),
         files={**node(0, "0-3", 16), **node(1, "", 64), "proc/meminfo": meminfo(80, 70)}, expect={
             "topology": {"nodes": [{"node": 0, "cpus": [0, 1, 2, 3]},
                                    {"node": 1, "cpus": [], "memory_bytes": 64 * GIB}]},
             "memory": {"ceiling_bytes": 80 * GIB}})
    bare = {f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": None for cpu in range(4)}
    host(out, "no-topology", cpu=cpus.EPYC_AVX2_VM, cores=VM4, files={
        **bare, "sys/devices/system/cpu/online": None, "usr/bin/lscpu": None,
        "sys/devices/system/node/node0/cpulist": None, "sys/devices/system/node/node0/meminfo": None,
    }, captured={"affinity": None}, expect={
        "topology": {"online": [0, 1, 2, 3], "allowed": [0, 1, 2, 3], "smt": None, "nodes": [],
                     "cores": [{"cpus": [cpu], "kind": None, "node": None} for cpu in range(4)]},
        "software": {"lscpu": None}})


def memory_limits(out: Path) -> None:
    parent = {"memory.max": str(4 * GIB), "memory.high": "max", **cgroups.memory(used=GIB, file=GIB // 2)}
    own = {"memory.max": "max", "memory.high": "max", "cpu.max": "max 100000"}
    host(out, "v2-parent-limit", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files=cgroups.v2(
        "/edge.slice/appliance.service", {"/edge.slice/appliance.service": own, "/edge.slice": parent},
    ), expect={"memory": {
        "ceiling_bytes": 4 * GIB, "ceiling_source": "/sys/fs/cgroup/edge.slice/memory.max", "used_bytes": GIB // 2,
        "limits": [{"bytes": 4 * GIB, "soft": False}]}})
    crowded = {"memory.max": str(8 * GIB), "memory.high": "max", **cgroups.memory(used=7 * GIB, file=0)}
    alone = {"memory.max": str(6 * GIB), "memory.high": "max", **cgroups.memory(used=GIB // 4, file=0)}
    host(out, "v2-parent-full", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files=cgroups.v2(
        "/edge.slice/appliance.service", {"/edge.slice/appliance.service": alone, "/edge.slice": crowded},
    ), expect={"memory": {  # the ceiling is the own 6 GiB, but its siblings leave 1 GiB below the parent's 8
        "ceiling_bytes": 6 * GIB, "ceiling_source": "/sys/fs/cgroup/edge.slice/appliance.service/memory.max",
        "used_bytes": 5 * GIB}})
    host(out, "v2-page-cache", cpu=cpus.EPYC_AVX2_VM, cores=VM2,
         files={**cgroups.service(memory_current=str(13 * GIB)), "proc/meminfo": meminfo(16, 14.5)}, expect={
             "memory": {"limits": [], "ceiling_bytes": 16 * GIB, "ceiling_source": "/proc/meminfo MemTotal",
                        "used_bytes": 3 * GIB // 2}})
    full = cgroups.memory(used=8 * GIB - 4096, file=7 * GIB)
    host(out, "v2-cache-at-limit", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files=cgroups.service(
        memory_max=str(8 * GIB), memory_current=full["memory.current"], memory_stat=full["memory.stat"],
    ), expect={"memory": {"ceiling_bytes": 8 * GIB, "used_bytes": GIB - 4096}})
    host(out, "v2-high-below-max", cpu=cpus.EPYC_AVX2_VM, cores=VM2,
         files=cgroups.service(memory_max=str(8 * GIB), memory_high=str(3 * GIB)), expect={
             "memory": {"ceiling_bytes": 3 * GIB, "swap_total_bytes": 0,
                        "ceiling_source": "/sys/fs/cgroup/system.slice/appliance.service/memory.high",
                        "limits": [{"bytes": 8 * GIB, "soft": False}, {"bytes": 3 * GIB, "soft": True}]}})
    host(out, "no-meminfo", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files={"proc/meminfo": None}, expect={
        "memory": {"total_bytes": None, "available_bytes": None, "swap_total_bytes": None, "ceiling_bytes": None,
                   "ceiling_source": "unknown", "used_bytes": None}})
    host(out, "no-meminfo-limited", cpu=cpus.EPYC_AVX2_VM, cores=VM2,
         files={**cgroups.service(memory_max=str(2 * GIB)), "proc/meminfo": None},
         expect={"memory": {"total_bytes": None, "ceiling_bytes": 2 * GIB, "used_bytes": GIB // 4}})
    host(out, "container-v2", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files=cgroups.v2("/", {"/": {
        "memory.max": str(4 * GIB), "memory.high": "max", "cpu.max": "200000 100000", "cpuset.cpus.effective": "0-1",
        **cgroups.memory(used=GIB, file=GIB // 2),
    }}, mount="700 690 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate"), expect={
        "memory": {"ceiling_bytes": 4 * GIB, "ceiling_source": "/sys/fs/cgroup/memory.max", "used_bytes": GIB // 2},
        "topology": {"quota": {"cpus": 2.0, "source": "/sys/fs/cgroup/cpu.max"}}})
    group = "/docker/3f2a9c41d0b7"
    host(out, "container-v1", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files=cgroups.v1(
        {"memory": group, "cpu,cpuacct": group, "cpuset": group},
        {"memory": cgroups.v1_memory(limit=str(4 * GIB), used=3 * GIB, file=2 * GIB, hierarchical=str(2 * GIB)),
         "cpu,cpuacct": {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"},
         "cpuset": {"cpuset.cpus": "0-1"}},
        roots=dict.fromkeys(("memory", "cpu,cpuacct", "cpuset"), group),
    ), expect={
        "memory": {"ceiling_bytes": 2 * GIB, "used_bytes": GIB,
                   "ceiling_source": "/sys/fs/cgroup/memory/memory.stat hierarchical_memory_limit"},
        "topology": {"quota": {"cpus": 1.5, "source": "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"}}})


def cpu_limits(out: Path) -> None:
    service = "/system.slice/appliance.service"
    host(out, "v1-quota", cpu=cpus.COFFEE_LAKE, cores=VM8, files=cgroups.v1(
        {"memory": service, "cpu,cpuacct": service, "cpuset": "/"},
        {f"memory{service}": cgroups.v1_memory(limit=cgroups.V1_NO_LIMIT, used=GIB, file=GIB // 2),
         "memory/system.slice": cgroups.v1_memory(limit=str(6 * GIB), used=2 * GIB, file=GIB),
         f"cpu,cpuacct{service}": {"cpu.cfs_quota_us": "600000", "cpu.cfs_period_us": "100000"},
         "cpu,cpuacct/system.slice": {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"},
         "cpu,cpuacct": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, "cpuset": {"cpuset.cpus": "0-7"}},
    ), expect={
        "topology": {"quota": {"cpus": 4.0, "source": "/sys/fs/cgroup/cpu,cpuacct/system.slice/cpu.cfs_quota_us"}},
        "memory": {"ceiling_bytes": 6 * GIB, "used_bytes": GIB}})
    host(out, "v2-quota", cpu=cpus.COFFEE_LAKE, cores=VM8, files=cgroups.service(cpu_max="400000 100000"), expect={
        "topology": {"quota": {"cpus": 4.0, "source": f"/sys/fs/cgroup{service}/cpu.max"}}, "count": {"cores": 8}})
    host(out, "v2-cpuset-and-quota", cpu=cpus.COFFEE_LAKE, cores=VM8, files={
        **cgroups.service(cpu_max="600000 100000", **{"cpuset_cpus.effective": "0-3"}),
        "sys/fs/cgroup/system.slice/cpuset.cpus.effective": "0-5", "sys/fs/cgroup/cpuset.cpus.effective": "0-7",
    }, expect={"topology": {"allowed": [0, 1, 2, 3], "quota": {"cpus": 6.0}}, "count": {"cores": 4}})
    loose = cgroups.v1_memory(limit=str(GIB), used=GIB // 2, file=0)
    host(out, "v1-not-hierarchical", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files=cgroups.v1({"memory": service}, {
        f"memory{service}": cgroups.v1_memory(limit=str(3 * GIB), used=GIB, file=0),
        "memory/system.slice": {**loose, "memory.use_hierarchy": "0"}, "memory": {"memory.use_hierarchy": "0"},
    }), expect={"memory": {"ceiling_bytes": 3 * GIB, "limits": [{"bytes": 3 * GIB}]}})
    hybrid = cgroups.v1({"memory": "/", "cpu": "/", "cpuset": "/"}, {
        "memory": cgroups.v1_memory(limit=cgroups.V1_NO_LIMIT, used=GIB, file=0), "cpuset": {"cpuset.cpus": "0-3"}})
    hybrid["proc/self/cgroup"] = f"2:memory:/\n1:cpuset:/\n0::{service}"
    hybrid["proc/self/mountinfo"] += "\n60 31 0:40 / /sys/fs/cgroup/unified rw shared:20 - cgroup2 cgroup2 rw"
    hybrid[f"sys/fs/cgroup/unified{service}/cpu.max"] = "max 100000"
    hybrid["sys/fs/cgroup/unified/system.slice/cpu.max"] = "50000 100000"
    host(out, "hybrid-cgroups", cpu=cpus.EPYC_AVX2_VM, cores=VM4, files=hybrid, expect={
        "topology": {"quota": {"cpus": 0.5, "source": "/sys/fs/cgroup/unified/system.slice/cpu.max"}},
        "memory": {"limits": [], "ceiling_source": "/proc/meminfo MemTotal"}})


def odd_userlands(out: Path) -> None:
    i386 = DEBIAN["var/lib/dpkg/status"].replace("amd64", "i386")
    host(out, "userland-i386", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files={"var/lib/dpkg/status": i386}, proven=(),
         captured={"cpuid": {}, "xgetbv": None, "executable_mappings": None},
         expect={"cpu": {"architecture": "x86_64", "tier": "scalar"}, "software": {"userland": "i386"}})
    host(out, "musl", cpu=cpus.EPYC_AVX2_VM, cores=VM2, files={
        **dict.fromkeys(DEBIAN), "lib/ld-musl-x86_64.so.1": "", "proc/sys/kernel/osrelease": "6.6.58-0-virt",
    }, expect={"software": {"libc": "musl", "compiler": None, "libnuma": None, "libgomp": None, "userland": None}})
    arm = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32\n"
    host(out, "aarch64", cpu=cpus.EPYC_AVX2_VM, cores=[(0,)], files={"proc/cpuinfo": arm}, proven=(), captured={
        "architecture": "aarch64", "cpuid": {}, "xgetbv": None, "executable_mappings": None,
    }, expect={"cpu": {"architecture": "aarch64", "tier": None, "tiers": [], "vendor": None}})


if __name__ == "__main__":
    write_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
