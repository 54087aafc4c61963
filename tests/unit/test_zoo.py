"""The plan on every host of tests/hosts, for three models; and the field's cases, each with the host that shows it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from appliance import budget
from appliance.budget import GIB, MIB, MIN_CONTEXT, phase_bytes
from appliance.decisions import BLOCK
from appliance.facts import HostFacts
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host
from appliance.refusal import early_refusal
from appliance.settings import Cpu, Settings
from tests.unit import golden_plans
from tests.unit.golden_plans import HOSTS, PLACES, PLANS

MODELS = golden_plans.models()
FOLDERS = golden_plans.hosts()
ZOO = {name: golden_plans.zoo(folder) for name, folder in FOLDERS.items()}
PREPARED = dataclasses.replace(PLACES, prepared="/store/prepared/model")


def planned(host: str | HostFacts, model: str = "smollm2", **settings: object) -> Plan:
    facts = read_host(HOSTS / host) if isinstance(host, str) else host
    return make_plan(facts, MODELS[model], Settings(**settings), PREPARED)  # type: ignore[arg-type]


def choice(plan: Plan, name: str) -> tuple[object, str, str]:
    return next((c.value, c.reason, c.evidence) for c in plan.choices if c.name == name)


def refusal(plan: Plan) -> tuple[int, str]:
    assert plan.refused
    return plan.refused.exit_code, f"{plan.refused.what}: {plan.refused.why}"


@pytest.mark.parametrize("name", FOLDERS)
def test_golden(name: str) -> None:
    assert golden_plans.zoo_text(ZOO[name]) == (PLANS / "hosts" / f"{name}.json").read_text(), \
        "run `make goldens` and review the diff"


def test_every_host_has_a_plan_and_every_plan_a_host() -> None:
    assert len(FOLDERS) >= 40
    assert {path.stem for path in (PLANS / "hosts").glob("*.json")} == set(FOLDERS)
    assert len(MODELS) == 3


@pytest.mark.parametrize("name", FOLDERS)
def test_no_plan_promises_more_than_there_is(name: str) -> None:
    host = read_host(FOLDERS[name])
    for model, plan in ZOO[name].items():
        if plan.refused:
            assert plan.refused.why
            assert plan.refused.do
            continue
        assert plan.usable_bytes is not None
        assert plan.ceiling_bytes is not None
        assert host.memory.ceiling_bytes is not None
        assert plan.peak_bytes <= plan.usable_bytes < plan.ceiling_bytes <= host.memory.ceiling_bytes
        assert MIN_CONTEXT <= plan.full.context <= MODELS[model].max_context
        assert 1 <= plan.full.threads <= len(host.topology.allowed)
        if plan.full.cpus is not None:
            assert set(plan.full.cpus) <= set(host.topology.allowed)
        if host.topology.quota:
            assert plan.full.threads <= max(1, host.topology.quota.cpus)


@pytest.mark.parametrize("name", [name for name, plans in ZOO.items() if not plans["smollm2"].refused])
def test_case_003_only_the_safe_route_sees_more_than_one_row(name: str) -> None:
    """No canary has passed on any of these hosts: torch's int4 kernel, in force or as a rung, sees one row at most."""
    for plan in ZOO[name].values():
        for rung in plan.rungs:
            assert (rung.quantization["prefill_dequant"], rung.quantization["dequant_threshold"]) == (True, 2)


def test_case_007_a_unit_of_6_gib_on_a_host_of_64() -> None:
    plan = planned("unit-6g-of-64", "llama-1b")
    assert plan.ceiling_bytes == 6 * GIB
    value = dict(zip(plan.full.argv, plan.full.argv[1:], strict=False))
    assert int(value["--kv-cache-memory-bytes"]) == plan.full.kv_bytes
    for phase in budget.PHASES:
        assert phase_bytes(plan.memory, phase) <= 6 * GIB * 9 // 10
    context, reason, _ = choice(plan, "context")
    assert context == plan.full.context < 131072
    assert "cut from 131072 tokens" in reason
    assert choice(plan, "with 1 GiB more")[0] == "context 131072"
    # 8B: not even 2048 tokens
    code, why = refusal(planned("unit-6g-of-64", "llama-8b"))
    assert code == 76
    assert "2048 tokens of context need" in why


def test_case_042_a_flag_is_not_a_tier() -> None:
    tiers = {name: ZOO[name]["smollm2"].tier for name in (
        "amx-masked-vm", "amx-no-os-state", "spr-amx", "spr-amx-refused", "avx512-no-os-state", "avx512-cpuid-masked",
        "avx512-sigill", "granite-rapids-256", "zen5-9950x", "zen2-nps4")}
    assert tiers == {
        "amx-masked-vm": "avx512_bf16", "amx-no-os-state": "avx512_bf16", "spr-amx": "amx", "spr-amx-refused": "avx512_bf16",
        "avx512-no-os-state": "avx2", "avx512-cpuid-masked": "avx2", "avx512-sigill": "avx2", "granite-rapids-256": "amx",
        "zen5-9950x": "avx512_bf16", "zen2-nps4": "avx2"}
    for name in ("kvm64-vm", "atom-j4125", "avx2-no-xsave"):
        assert refusal(ZOO[name]["smollm2"])[0] == 77


@pytest.mark.parametrize(("name", "threads"), [
    ("v2-quota", 4), ("v2-cpuset-and-quota", 4), ("kubernetes-nested", 3), ("docker-hybrid", 4), ("hybrid-cgroups", 1),
    ("v1-quota", 4), ("lxc-renumbered", 2), ("lxc-lxcfs", 4),
])
def test_case_044_threads_in_a_limited_unit(name: str, threads: int) -> None:
    assert ZOO[name]["smollm2"].full.threads == threads


@pytest.mark.parametrize(("name", "gib", "source"), [
    ("v2-parent-limit", 4, "/edge.slice/memory.max"), ("kubernetes-nested", 3, "kubepods-burstable-pod1.slice/memory.max"),
    ("namespace-outside", 4, "/sys/fs/cgroup/memory.max"), ("docker-hybrid", 2, "/sys/fs/cgroup/memory/memory.limit_in_bytes"), ("lxc-lxcfs", 3, "/proc/meminfo MemTotal"),
])
def test_case_046_the_limit_is_found_wherever_it_stands(name: str, gib: int, source: str) -> None:
    plan = ZOO[name]["smollm2"]
    value, _, evidence = choice(plan, "memory ceiling")
    assert (value, plan.ceiling_bytes) == (gib * GIB, gib * GIB)
    assert evidence.endswith(source)


def test_case_048_the_soft_limit_is_the_ceiling_where_there_is_no_swap() -> None:
    plan = ZOO["v2-high-below-max"]["llama-1b"]
    assert plan.ceiling_bytes == 3 * GIB
    assert plan.peak_bytes <= 3 * GIB * 9 // 10
    assert choice(plan, "memory ceiling")[2].endswith("memory.high")


@pytest.mark.parametrize(("name", "threads", "cpus"), [
    ("hybrid-8p12e", 8, "0-7"), ("hybrid-6p8e-smt", 6, "0-11"), ("no-smt-16", 16, None), ("vm-flat-8", 8, None),
    ("single-core", 1, None), ("alder-lake-8p8e", 8, "0-15"), ("meteor-lake-2p8e2l", 2, "0-3"), ("n100", 4, None),
    ("hybrid-only-efficiency", 8, None), ("haswell-4790", 4, None), ("zen3-5600g", 6, None), ("zen5-9950x", 16, None),
    ("ice-lake-vm", 4, None), ("zen4c-bergamo-128", 128, None), ("sierra-forest-96", 96, None),
    ("broadwell-two-sockets", 14, "0-13,28-41 | 14-27,42-55"),
    ("zen2-nps4", 16, "0-15,64-79 | 16-31,80-95 | 32-47,96-111 | 48-63,112-127"),
    ("granite-rapids-256", 42, "0-42 | 43-84 | 85-127 | 128-170 | 171-212 | 213-255"),
])
def test_case_049_threads_and_where_they_run(name: str, threads: int, cpus: str | None) -> None:
    plan = ZOO[name]["smollm2"]
    assert plan.full.threads == threads
    assert next((c.value for c in plan.choices if c.name == "cpus"), None) == cpus
    assert planned(name, cpu=Cpu(threads=3)).full.threads == 3


@pytest.mark.parametrize("name", [
    "offline-4-7", "offline-odd-cores", "sibling-offline", "no-topology", "memory-only-node", "node-holes", "lxc-renumbered",
    "smt-part-allowed", "zhaoxin",
])
def test_case_050_odd_topologies_are_planned_for(name: str) -> None:
    assert all(plan.rungs or plan.refused for plan in ZOO[name].values())
    assert ZOO[name]["smollm2"].refused is None


def test_memory_of_another_numa_node_is_not_counted_on() -> None:
    """vLLM refuses a cache that is larger than what is free on the node that it runs on."""
    plan = ZOO["memory-only-node"]["llama-8b"]
    assert plan.ceiling_bytes == 16 * GIB
    assert "NUMA node 0" in choice(plan, "memory ceiling")[2]
    assert ZOO["two-nodes"]["llama-8b"].full.kv_bytes < 8 * GIB


@pytest.mark.parametrize(("name", "says"), [
    ("userland-i386", "it is i386, the worker needs amd64"), ("armhf-on-aarch64", "its architecture is aarch64"),
    ("armv7", "its architecture is armv7l"), ("aarch64", "its architecture is aarch64"), ("musl", "torch's wheels need glibc, found musl"),
    ("kvm64-vm", "the CPU lacks avx, avx2, fma, f16c"), ("atom-j4125", "the CPU lacks avx, avx2, fma, f16c"),
])
def test_case_052_what_cannot_run_is_refused_in_one_line(name: str, says: str) -> None:
    host = read_host(HOSTS / name)
    found = early_refusal(host, Settings(), kernels=("native", "aten"))
    assert found
    assert (found.exit_code, found.why) == (77, says)
    assert "\n" not in found.error().line


KINDS = {  # heads, key/value heads, columns of a head, window, layers with a window (of 12)
    "gqa": (16, 4, 64, None, 0), "mha": (16, 16, 64, None, 0), "mqa": (16, 1, 64, None, 0),
    "explicit head": (16, 8, 128, None, 0), "window": (16, 8, 64, 4096, 12), "every second": (4, 2, 256, 4096, 6),
    "window beyond the context": (16, 8, 64, 65536, 12),
}


@pytest.mark.parametrize("kind", KINDS)
def test_case_073_the_cache_is_the_formula(kind: str) -> None:
    heads, kv_heads, head, window, windowed = KINDS[kind]
    model = dataclasses.replace(MODELS["smollm2"], layers=12, heads=heads, kv_heads=kv_heads, head_dim=head, sliding_window=window,
                                sliding_layers=windowed)
    context, batch = 32768, 512
    shape = budget.Shape(context=context, sequences=1, batch_tokens=batch, running=8, compile=False)
    a_token = kv_heads * head * 2 * 2
    held = min(context, window + batch) if window else context
    exact = a_token * ((12 - windowed) * context + windowed * held)
    found = budget.kv_request_bytes(model, shape, BLOCK)
    assert exact <= found <= exact * 1.01
    pool = 12 if windowed in (0, 12) else 6
    assert budget.kv_bytes(model, dataclasses.replace(shape, sequences=3), BLOCK) == 3 * found + pool * BLOCK * a_token


def test_case_073_groups_of_layers_are_filled_up_as_vllm_does() -> None:
    """Gemma 3's 26 layers, 22 with a window: groups of four, so 24 layers with a window are paid for."""
    model = dataclasses.replace(MODELS["smollm2"], layers=26, kv_heads=1, head_dim=256, sliding_window=512, sliding_layers=22)
    shape = budget.Shape(context=32768, sequences=1, batch_tokens=512, running=8, compile=False)
    blocks = 4 * 32768 // BLOCK + 24 * (1024 // BLOCK + 1)
    assert budget.kv_request_bytes(model, shape, BLOCK) == blocks * BLOCK * 256 * 4


@pytest.mark.parametrize(("model", "caches", "from_mib", "step_mib"), [("llama-1b", 1, 8192, 16), ("smollm2", 4, 3584, 4)])
def test_memory_gives_way_in_order(model: str, caches: int, from_mib: int, step_mib: int) -> None:
    """Under a falling ceiling: first the cache, then the context, then the batch, then it is refused."""
    host = read_host(HOSTS / "vm-flat-8")
    steps: list[tuple[int, int, int]] = []
    for mib in range(from_mib, 512, -step_mib):
        plan = planned(golden_plans.with_ceiling(host, mib * MIB), model)
        if plan.refused:
            break
        value = dict(zip(plan.full.argv, plan.full.argv[1:], strict=False))
        steps.append((int(value["--max-num-batched-tokens"]), plan.full.context, plan.full.kv_bytes))
    assert plan.refused
    assert steps == sorted(steps, reverse=True)  # the batch is the last to give way, the cache the first
    assert {context for batch, context, _ in steps if batch < 512} == {MIN_CONTEXT}
    assert {batch for batch, _, _ in steps} >= {512, 128}
    whole = MODELS[model].max_context
    assert len({kv for _, context, kv in steps if context == whole}) == caches


def test_what_one_gib_more_buys_is_what_is_planned_with_it() -> None:
    host = read_host(HOSTS / "vm-flat-8")
    less = planned(golden_plans.with_ceiling(host, 3 * GIB), "llama-1b")
    more = planned(golden_plans.with_ceiling(host, 4 * GIB), "llama-1b")
    assert choice(less, "with 1 GiB more")[0] == f"context {more.full.context}"
    assert "with 1 GiB more" not in {c.name for c in planned(golden_plans.with_ceiling(host, 64 * GIB)).choices}


def test_goldens_are_small() -> None:
    for file in (PLANS / "hosts").glob("*.json"):
        assert len(file.read_bytes()) < 4096, file.name
        assert set(json.loads(file.read_text())) == set(MODELS)


def test_folders_of_hosts_name_no_machine() -> None:
    for folder in FOLDERS.values():
        for file in folder.rglob("*"):
            if file.is_file():
                assert not any(word in str(file.relative_to(HOSTS)) for word in ("dmi", "machine-id", "hostname")), file


