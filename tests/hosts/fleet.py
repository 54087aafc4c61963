"""More hosts: one per kind of machine that the service meets, newest hardware and oldest, whole, masked, shared and cut up.

Called by make.py. Flags, CPUID and XCR0 follow what such machines show; sizes and cores are their makers'.
"""

from __future__ import annotations

from pathlib import Path

import cgroups
import fleet_cpus as fleet
from folder import DEBIAN, GIB, host, meminfo, node, ranges

SPR_TIERS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
NODE = "sys/devices/system/node"


def smt(cores: int, *, first: int = 0, sibling: int | None = None) -> list[tuple[int, ...]]:
    """Cores of two threads as Linux numbers them: the second threads after all first ones."""
    step = cores if sibling is None else sibling
    return [(first + core, first + core + step) for core in range(cores)]


def write_fleet(out: Path) -> None:
    intel(out)
    amd(out)
    small(out)
    clouds(out)
    containers(out)
    foreign(out)


def intel(out: Path) -> None:
    host(out, "haswell-4790", cpu=fleet.HASWELL, cores=smt(4), files={"proc/meminfo": meminfo(7.7, 6.9, 2)}, expect={
        "cpu": {"tier": "avx2", "hypervisor": False}, "topology": {"smt": True}, "count": {"cores": 4},
        "why": {"avx512": "the CPU lacks avx512f, avx512bw, avx512vl, avx512dq"}})
    two = [*smt(14, sibling=28), *smt(14, first=14, sibling=28)]
    host(out, "broadwell-two-sockets", cpu=fleet.BROADWELL_EP, cores=two, files={
        "proc/meminfo": meminfo(126, 120), **node(0, "0-13,28-41", 63), **node(1, "14-27,42-55", 63)}, expect={
            "cpu": {"tier": "avx2"}, "count": {"cores": 28},
            "topology": {"smt": True, "nodes": [{"node": 0}, {"node": 1, "memory_bytes": 63 * GIB}]}})
    host(out, "skylake-sp", cpu=fleet.SKYLAKE_SP, cores=smt(20), proven=("avx2", "avx512"), expect={
        "cpu": {"tier": "avx512"}, "count": {"cores": 20}, "why": {"avx512_vnni": "the CPU lacks avx512_vnni"}})
    host(out, "sapphire-rapids-metal", cpu=fleet.SAPPHIRE_RAPIDS, cores=smt(32), proven=SPR_TIERS,
         captured={"amx_permission": True}, files={"proc/meminfo": meminfo(251, 240)}, expect={
             "cpu": {"tier": "amx", "hypervisor": False}, "count": {"cores": 32}, "memory": {"ceiling_bytes": 251 * GIB}})
    # 256 cores, SMT off, sub-NUMA clusters: six nodes of 42 or 43 cores.
    bounds = [round(256 * part / 6) for part in range(7)]
    clusters: dict[str, str | None] = {}
    for number in range(6):
        clusters |= node(number, ranges(range(bounds[number], bounds[number + 1])), 128)
    host(out, "granite-rapids-256", cpu=fleet.GRANITE_RAPIDS, cores=[(cpu,) for cpu in range(256)], proven=SPR_TIERS,
         captured={"amx_permission": True}, files={"proc/meminfo": meminfo(768, 740), **clusters}, expect={
             "cpu": {"tier": "amx"}, "topology": {"smt": False}, "count": {"cores": 256},
             "memory": {"ceiling_bytes": 768 * GIB}})
    host(out, "sierra-forest-96", cpu=fleet.SIERRA_FOREST, cores=[(cpu,) for cpu in range(96)],
         files={"proc/meminfo": meminfo(251, 240)},
         expect={"cpu": {"tier": "avx2"}, "topology": {"smt": False}, "count": {"cores": 96, "efficiency": 0}})
    host(out, "alder-lake-8p8e", cpu=fleet.ALDER_LAKE,
         cores=[(cpu, cpu + 1) for cpu in range(0, 16, 2)] + [(cpu,) for cpu in range(16, 24)],
         files={"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-23", "proc/meminfo": meminfo(31, 28)},
         expect={"cpu": {"tier": "avx2"}, "topology": {"smt": True},
                 "count": {"cores": 16, "performance": 8, "efficiency": 8}})
    # Two performance cores, eight efficiency cores, and two more of a third kind that the kernel counts as efficiency.
    host(out, "meteor-lake-2p8e2l", cpu=fleet.METEOR_LAKE,
         cores=[(0, 1), (2, 3), *[(cpu,) for cpu in range(4, 14)]],
         files={"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-13", "proc/meminfo": meminfo(15.3, 12)},
         expect={"count": {"cores": 12, "performance": 2, "efficiency": 10}})
    # A service confined to efficiency cores: all that it may use are of one kind.
    host(out, "hybrid-only-efficiency", cpu=fleet.ALDER_LAKE,
         cores=[(cpu, cpu + 1) for cpu in range(0, 16, 2)] + [(cpu,) for cpu in range(16, 24)],
         files={"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-23"},
         captured={"affinity": list(range(16, 24))},
         expect={"topology": {"allowed": list(range(16, 24))}, "count": {"cores": 8, "performance": 0, "efficiency": 8}})


def amd(out: Path) -> None:
    nodes: dict[str, str | None] = {}
    for number in range(4):
        nodes |= node(number, f"{number * 16}-{number * 16 + 15},{64 + number * 16}-{64 + number * 16 + 15}", 63)
    host(out, "zen2-nps4", cpu=fleet.ZEN2_EPYC, cores=smt(64), files={"proc/meminfo": meminfo(252, 245), **nodes}, expect={
        "cpu": {"tier": "avx2", "vendor": "AuthenticAMD"}, "topology": {"smt": True}, "count": {"cores": 64}})
    host(out, "zen3-5600g", cpu=fleet.ZEN3, cores=smt(6), files={"proc/meminfo": meminfo(13.5, 11)}, expect={
        "cpu": {"tier": "avx2"}, "topology": {"smt": True}, "count": {"cores": 6}})
    host(out, "zen4c-bergamo-128", cpu=fleet.ZEN4_EPYC, cores=[(cpu,) for cpu in range(128)], proven=SPR_TIERS[:-1],
         files={"proc/meminfo": meminfo(377, 365)},
         expect={"cpu": {"tier": "avx512_bf16"}, "topology": {"smt": False}, "count": {"cores": 128}})
    host(out, "zen5-9950x", cpu=fleet.ZEN5, cores=smt(16), proven=SPR_TIERS[:-1], files={"proc/meminfo": meminfo(62, 58)},
         expect={"cpu": {"tier": "avx512_bf16"}, "topology": {"smt": True}, "count": {"cores": 16},
                 "why": {"amx": "the CPU lacks amx_tile, amx_bf16, amx_int8"}})


def small(out: Path) -> None:
    host(out, "n100", cpu=fleet.N100, cores=[(cpu,) for cpu in range(4)], files={"proc/meminfo": meminfo(7.6, 6.4, 1)},
         expect={"cpu": {"tier": "avx2"}, "topology": {"smt": False},
                 "count": {"cores": 4, "performance": 0, "efficiency": 0}})
    host(out, "atom-j4125", cpu=fleet.GOLDMONT_PLUS, cores=[(cpu,) for cpu in range(4)], proven=(),
         files={"proc/meminfo": meminfo(7.6, 6.8)}, expect={
             "cpu": {"tier": "scalar"}, "why": {"avx2": "the CPU lacks avx, avx2, fma, f16c"}})
    host(out, "half-gib", cpu=fleet.N100, cores=[(0,)], files={"proc/meminfo": meminfo(0.5, 0.35, 4)}, expect={
        "memory": {"ceiling_bytes": GIB // 2, "swap_total_bytes": 4 * GIB}, "count": {"cores": 1}})
    host(out, "zhaoxin", cpu=fleet.ZHAOXIN, cores=[(cpu,) for cpu in range(8)], expect={
        "cpu": {"tier": "avx2", "vendor": "Shanghai"}, "count": {"cores": 8}})


def clouds(out: Path) -> None:
    host(out, "ice-lake-vm", cpu=fleet.ICE_LAKE_VM, cores=[(0, 1), (2, 3), (4, 5), (6, 7)], proven=SPR_TIERS[:3],
         files={"proc/meminfo": meminfo(15.3, 14.6)}, expect={
             "cpu": {"tier": "avx512_vnni", "hypervisor": True}, "topology": {"smt": True}, "count": {"cores": 4}})
    host(out, "amx-masked-vm", cpu=fleet.SPR_VM_NO_AMX, cores=[(0, 1), (2, 3)], proven=SPR_TIERS[:-1], expect={
        "cpu": {"tier": "avx512_bf16"}, "why": {"amx": "the CPU lacks amx_tile, amx_bf16, amx_int8"}})
    # The flags are there, the hypervisor did not enable the tile state.
    host(out, "amx-no-os-state", cpu=fleet.SPR_VM_NO_TILES, cores=[(0, 1), (2, 3)], proven=SPR_TIERS[:-1],
         captured={"amx_permission": False}, expect={
             "cpu": {"tier": "avx512_bf16"},
             "why": {"amx": "the operating system does not enable the AMX tile state (XCR0 0x2e7)"}})
    host(out, "kvm64-vm", cpu=fleet.KVM64, cores=[(0,), (1,)], proven=(), expect={
        "cpu": {"tier": "scalar", "hypervisor": True}, "why": {"avx2": "the CPU lacks avx, avx2, fma, f16c"}})
    host(out, "wsl2", cpu=fleet.ZEN3_VM, cores=smt(6), files={
        "proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2", "proc/meminfo": meminfo(7.6, 7.1, 2)}, expect={
            "cpu": {"tier": "avx2", "hypervisor": True}, "software": {"kernel": "5.15.153.1-microsoft-standard-WSL2"}})
    host(out, "one-vcpu-2gib", cpu=fleet.SPR_VM_NO_AMX, cores=[(0,)], proven=SPR_TIERS[:-1],
         files={"proc/meminfo": meminfo(1.94, 1.7)}, expect={"count": {"cores": 1}, "topology": {"smt": False}})


def containers(out: Path) -> None:
    eight = [(cpu,) for cpu in range(8)]
    host(out, "unit-6g-of-64", cpu=fleet.ZEN3, cores=smt(6), files={
        **cgroups.service(memory_max=str(6 * GIB)), "proc/meminfo": meminfo(64, 60)}, expect={
            "memory": {"total_bytes": 64 * GIB, "ceiling_bytes": 6 * GIB}})
    # Four levels: the pod's limit is the tightest for memory, the slice's for CPU time.
    pod, inside = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice", "/cri-containerd-1.scope"
    host(out, "kubernetes-nested", cpu=fleet.ZEN4_EPYC, cores=eight, proven=SPR_TIERS[:-1], files=cgroups.v2(
        pod + inside, {
            pod + inside: {"memory.max": str(5 * GIB), "memory.high": "max", "cpu.max": "max 100000",
                           **cgroups.memory(used=GIB, file=GIB // 2)},
            pod: {"memory.max": str(3 * GIB), "memory.high": "max", "cpu.max": "500000 100000",
                  **cgroups.memory(used=GIB, file=GIB // 2)},
            "/kubepods.slice/kubepods-burstable.slice": {"memory.max": "max", "cpu.max": "350000 100000"},
            "/kubepods.slice": {"memory.max": str(14 * GIB), "cpu.max": "max 100000",
                                **cgroups.memory(used=8 * GIB, file=GIB)},
        }), expect={
            "memory": {"ceiling_bytes": 3 * GIB, "ceiling_source": f"/sys/fs/cgroup{pod}/memory.max", "used_bytes": GIB // 2},
            "topology": {"quota": {"cpus": 3.5}}})
    group = "/docker/9b1dd2f0c3a4"
    hybrid = cgroups.v1({"memory": group, "cpu,cpuacct": group, "cpuset": group}, {
        "memory": cgroups.v1_memory(limit=str(2 * GIB), used=GIB // 2, file=GIB // 4),
        "cpu,cpuacct": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, "cpuset": {"cpuset.cpus": "2,5-7"}},
        roots=dict.fromkeys(("memory", "cpu,cpuacct", "cpuset"), group))
    hybrid["proc/self/cgroup"] += f"\n0::{group}"
    hybrid["proc/self/mountinfo"] += f"\n60 31 0:40 {group} /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw"
    host(out, "docker-hybrid", cpu=fleet.SKYLAKE_SP, cores=eight, proven=("avx2", "avx512"), files=hybrid, expect={
        "memory": {"ceiling_bytes": 2 * GIB, "used_bytes": GIB // 4},
        "topology": {"allowed": [2, 5, 6, 7], "quota": None}, "count": {"cores": 4}})
    # lxcfs shows the container's limit as the machine's memory; the limit itself is outside of the namespace.
    host(out, "lxc-lxcfs", cpu=fleet.ZEN3, cores=eight, files={
        **cgroups.v2("/.lxc", {"/.lxc": {"memory.max": "max"}}), "proc/meminfo": meminfo(3, 2.6)}, captured={
            "affinity": [0, 1, 2, 3]}, expect={
        "memory": {"ceiling_bytes": 3 * GIB, "ceiling_source": "/proc/meminfo MemTotal"}, "count": {"cores": 4}})
    # Seen from another cgroup namespace, the own path leads out of the mount.
    host(out, "namespace-outside", cpu=fleet.ICE_LAKE_VM, cores=[(0, 1)], proven=SPR_TIERS[:3], files=cgroups.v2(
        "/../../system.slice/appliance.service", {"/": {"memory.max": str(4 * GIB), "memory.high": "max",
                                                         **cgroups.memory(used=GIB, file=0)}}), expect={
        "memory": {"ceiling_bytes": 4 * GIB, "used_bytes": GIB}})
    # Node numbers with a gap, a node without CPU list, one without memory.
    host(out, "node-holes", cpu=fleet.SKYLAKE_SP, cores=[(cpu,) for cpu in range(4)], proven=("avx2", "avx512"), files={
        **node(0, "0-3", 16), **node(8, "", 0), f"{NODE}/node16/meminfo": "Node 16 MemTotal:       4194304 kB"}, expect={
            "topology": {"nodes": [{"node": 0, "cpus": [0, 1, 2, 3]}, {"node": 8, "cpus": [], "memory_bytes": 0},
                                   {"node": 16, "cpus": []}]}})
    # The upper half of a socket is offline, the machine's locale is Chinese: nothing here depends on it.
    host(out, "offline-odd-cores", cpu=fleet.ZEN3, cores=smt(6), online=(0, 2, 4, 6, 8, 10),
         files={"etc/default/locale": "LANG=zh_CN.GB18030"}, expect={
             "topology": {"online": [0, 2, 4, 6, 8, 10]}, "count": {"cores": 3}})


def foreign(out: Path) -> None:
    arm = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\n" \
          "CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n"
    armhf = DEBIAN["var/lib/dpkg/status"].replace("amd64", "armhf")
    host(out, "armhf-on-aarch64", cpu=fleet.KVM64, cores=[(0,)], proven=(), files={
        "proc/cpuinfo": arm, "var/lib/dpkg/status": armhf}, captured={
            "architecture": "aarch64", "cpuid": {}, "xgetbv": None, "executable_mappings": None}, expect={
        "cpu": {"architecture": "aarch64", "tier": None}, "software": {"userland": "armhf"}})
    host(out, "armv7", cpu=fleet.KVM64, cores=[(0,)], proven=(), files={
        "proc/cpuinfo": arm.replace("architecture: 8", "architecture: 7"), "var/lib/dpkg/status": armhf}, captured={
            "architecture": "armv7l", "cpuid": {}, "xgetbv": None, "executable_mappings": None}, expect={
        "cpu": {"architecture": "armv7l", "tier": None}})
