"""Several engines: how many, on which CPUs, with what memory; and that none of them can hide behind another."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from appliance.budget import GIB, MIB, phase_bytes
from appliance.facts import Core, CpuQuota, HostFacts, ModelFacts, NumaNode, TopologyFacts
from appliance.launch import Places, env_refusal, extra_args_refusal
from appliance.measured import SERVED, TOK_S, Record, Trial, figure
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host
from appliance.settings import Cpu, Memory, Settings, overlay, parse
from appliance.supervisor.health import Answer, Busy, parse_counters
from appliance.supervisor.several import EngineWatch
from tests.unit import golden_plans
from tests.unit.golden_plans import PLACES

MODELS = golden_plans.models()
HOST = golden_plans.with_ceiling(read_host(golden_plans.HOSTS / golden_plans.HOST), 64 * GIB)
PREPARED = dataclasses.replace(PLACES, prepared="/store/prepared/model")


def nodes(*cores: int, memory_gib: float = 32, quota: float | None = None, empty: int = 0) -> HostFacts:
    """A host with so many cores on each of its NUMA nodes, and `empty` nodes of cores without memory."""
    made: list[Core] = []
    numa: list[NumaNode] = []
    for node, count in enumerate(cores):
        cpus = tuple(range(len(made), len(made) + count))
        made += [Core(cpus=(cpu,), kind=None, node=node) for cpu in cpus]
        numa.append(NumaNode(node=node, cpus=cpus, memory_bytes=0 if node >= len(cores) - empty else int(memory_gib * GIB)))
    allowed = tuple(range(len(made)))
    limit = None if quota is None else CpuQuota(cpus=quota, source="cpu.max")
    return dataclasses.replace(HOST, topology=TopologyFacts(online=allowed, allowed=allowed, cores=tuple(made), smt=False,
                                                            nodes=tuple(numa), quota=limit))


def planned(host: HostFacts, model: str | ModelFacts = "smollm2", *, places: Places = PREPARED, measured: Record | None = None,
            memory: Memory | None = None, context: int | None = None, max_running: int | None = None, **cpu: Any) -> Plan:
    settings = Settings(cpu=Cpu(**cpu), memory=memory or Memory(), context=context, max_running=max_running)
    return make_plan(host, model if isinstance(model, ModelFacts) else MODELS[model], settings, places, measured=measured)


def choice(plan: Plan, name: str) -> tuple[Any, str]:
    return next(((c.value, c.reason) for c in plan.choices if c.name == name), (None, ""))


def arg(plan: Plan, flag: str, rung: int = 0) -> str | None:
    argv = plan.rungs[rung].argv
    return argv[argv.index(flag) + 1] if flag in argv else None


ONE = "one engine"


@pytest.mark.parametrize(("host", "cpu", "engines", "threads", "says"), [
    (nodes(8), {}, ONE, 8, ""),
    (nodes(8, 8), {}, ["0-7", "8-15"], 8, "one for each NUMA node"),
    (nodes(8, 8, 8, 8), {}, ["0-7", "8-15", "16-23", "24-31"], 8, "one for each NUMA node"),
    (nodes(10, 9), {}, ["0-9", "10-18"], 9, "one for each NUMA node"),
    (nodes(16, 12), {}, ONE, 16, "NUMA node 1 left out"),
    (nodes(8, 8, 4), {}, ["0-7", "8-15"], 8, "NUMA node 2 left out"),
    (nodes(8, 8, empty=1), {}, ONE, 8, ""),
    (nodes(8, 0), {}, ONE, 8, ""),
    (nodes(8, 8, quota=8), {}, ONE, 8, "quota pays for one engine"),
    (nodes(8, 8, quota=15.5), {}, ONE, 8, "quota pays for one engine"),
    (nodes(8, 8, 8, 8, quota=20), {}, ["0-7", "8-15"], 8, "pays for no more"),
    (nodes(8, 8), {"engines": 1}, ONE, 8, "set by the operator"),
    (nodes(8, 8), {"threads": 6}, ONE, 6, "set by the operator"),
    (nodes(8, 8), {"cpus": (0, 1, 8)}, ONE, 3, "set by the operator"),
    (nodes(8, 8), {"engines": 2, "threads": 6}, ["0-7", "8-15"], 6, "set by the operator"),
    (nodes(8, 8), {"engines": 2, "cpus": (0, 1, 2, 3)}, ["0-1", "2-3"], 2, "set by the operator"),
    (nodes(8, 8), {"engines": 4}, ["0-3", "4-7", "8-11", "12-15"], 4, "set by the operator"),
    (nodes(8, 8), {"engines": 3}, ["0-3", "4-7", "8-15"], 4, "set by the operator"),
    (nodes(8, 1), {"engines": 4}, ["0-1", "2-3", "4-5", "6-7"], 2, "set by the operator"),
    (nodes(2), {"engines": 2}, ["0", "1"], 1, "set by the operator"),
    (nodes(8, 8, quota=6), {"engines": 2}, ["0-7", "8-15"], 3, "set by the operator"),
])
def test_how_many_and_where(host: HostFacts, cpu: dict[str, Any], engines: list[str] | str, threads: int, says: str) -> None:
    plan = planned(host, **cpu)
    full = plan.full
    assert full.threads == threads
    assert says in choice(plan, "engines")[1]
    assert full.env["OMP_NUM_THREADS"] == str(threads)
    if isinstance(engines, str):
        assert (full.engines, arg(plan, "--data-parallel-size"), full.env.get("APPLIANCE_ENGINE_CPUS")) == ((), None, None)
        assert "one-engine" not in [rung.id for rung in plan.rungs]
        return
    assert choice(plan, "cpus")[0] == " | ".join(engines)
    assert choice(plan, "engines")[0] == len(engines) == len(full.engines)
    assert arg(plan, "--data-parallel-size") == str(len(engines))
    assert arg(plan, "--distributed-executor-backend") == "uni", "or vLLM starts a process more for each"
    assert full.env["APPLIANCE_ENGINE_CPUS"].split("|") == [",".join(map(str, cpus)) for cpus in full.engines]
    assert sorted(cpu for cpus in full.engines for cpu in cpus) == list(full.cpus or ())
    assert len(set(full.cpus or ())) == len(full.cpus or ()), "no CPU belongs to two engines"


@pytest.mark.parametrize(("host", "model", "wanted", "why"), [
    (nodes(2), MODELS["smollm2"], 3, "2 can be used"),
    (nodes(4, 4, empty=1), MODELS["smollm2"], 5, "4 can be used"),
    (nodes(8, 8), dataclasses.replace(MODELS["smollm2"], experts=8), 2, "experts"),
])
def test_an_impossible_number_is_refused(host: HostFacts, model: ModelFacts, wanted: int, why: str) -> None:
    refused = planned(host, model, engines=wanted).refused
    assert refused is not None
    assert (refused.exit_code, why in refused.why) == (78, True)


def test_a_model_with_experts_has_one_engine() -> None:
    plan = planned(nodes(8, 8), dataclasses.replace(MODELS["smollm2"], experts=8))
    assert plan.full.engines == ()
    assert "experts" in choice(plan, "engines")[1]


def test_one_engine_over_all_nodes_where_that_was_measured_to_be_the_fastest() -> None:
    model = MODELS["smollm2"]

    def trial(threads: int, cpus: str, speed: float) -> Trial:
        return Trial(kind=SERVED, model=model.digest, figures={TOK_S: figure([speed])},
                     settings={"threads": threads, "kernel": "native", **({"cpus": cpus} if cpus else {})})

    def record(*trials: Trial) -> Record:
        return Record(fingerprint="x", inputs={}, trials=trials)

    over_all = dataclasses.replace(trial(16, "", 30.0), kind="weights", settings={"threads": 16, "kernel": "native", "route": "own"})
    on_one = dataclasses.replace(trial(8, "0-7", 20.0), kind="weights",
                                 settings={"threads": 8, "cpus": "0-7", "kernel": "native", "route": "own"})
    wide = planned(nodes(8, 8), measured=record(over_all, on_one))
    assert (wide.full.threads, wide.full.engines) == (16, ())
    assert "over all NUMA nodes" in choice(wide, "engines")[1]
    narrow = planned(nodes(8, 8), measured=record(over_all, dataclasses.replace(on_one, figures={TOK_S: figure([40.0])})))
    assert (narrow.full.threads, len(narrow.full.engines)) == (8, 2)


def test_every_engine_has_its_weights_its_cache_and_its_buffers() -> None:
    one, two = planned(nodes(8, 8), "llama-1b", engines=1), planned(nodes(8, 8), "llama-1b")
    lines = {name: {line.item.partition(",")[0]: line.bytes for line in plan.memory if line.phases}
             for name, plan in (("one", one), ("two", two))}
    for item in ("weights: 4-bit linears", "weights: embedding table and head", "key/value cache", "activations of one batch", "logits"):
        assert lines["two"][item] == 2 * lines["one"][item], item
    assert lines["two"]["api server process"] == lines["one"]["api server process"]
    assert 100 * MIB < lines["two"]["engine process"] - lines["one"]["engine process"] < 300 * MIB
    weights = MODELS["llama-1b"].linear_bytes + MODELS["llama-1b"].table_bytes + MODELS["llama-1b"].kept_bytes
    cached = [next(line.bytes for line in plan.memory if not line.phases) for plan in (one, two)]
    assert cached[1] - cached[0] == weights, "what is copied is read from files first"
    assert two.full.env["APPLIANCE_COPIED"] == "1"
    assert "APPLIANCE_COPIED" not in two.rungs[1].env
    assert two.full.running == 2 * one.full.running
    assert arg(two, "--max-num-seqs") == arg(one, "--max-num-seqs"), "seats are each engine's"


def test_engines_on_one_node_share_the_mapped_weights() -> None:
    plan = planned(nodes(8), engines=2)
    assert choice(plan, "weights")[0] == "shared"
    assert "APPLIANCE_COPIED" not in plan.full.env
    assert next(line.bytes for line in plan.memory if line.item == "weights: 4-bit linears") == MODELS["smollm2"].linear_bytes


def test_weights_that_are_packed_in_memory_are_every_engines_own() -> None:
    plan = planned(nodes(8), places=PLACES, engines=2)
    assert next(line.bytes for line in plan.memory if line.item == "weights: 4-bit linears, 2 x") == 2 * MODELS["smollm2"].linear_bytes


@pytest.mark.parametrize("gib", [2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_no_node_and_no_ceiling_is_planned_over(gib: float, model: str) -> None:
    plan = planned(nodes(8, 8, memory_gib=gib), model)
    if plan.refused is not None:
        assert planned(nodes(8, 8, memory_gib=gib), model, engines=1).refused is not None
        return
    assert plan.peak_bytes <= (plan.usable_bytes or 0)
    alone = planned(nodes(8, 8, memory_gib=gib), model, engines=1)
    assert plan.full.context == alone.full.context, "several engines never cost context"
    if plan.full.engines:
        shares = [phase_bytes([line for line in plan.memory if "api" not in line.item], phase) / 2 for phase in ("load", "warm-up", "serve")]
        assert max(shares) <= gib * GIB * 0.9


def test_the_operators_number_is_kept_or_refused_never_lowered() -> None:
    small, memory = nodes(8, 8, memory_gib=8), Memory(ceiling=14 * GIB)
    lowered = planned(small, "llama-8b", memory=memory)
    assert lowered.full.engines == ()
    assert "would leave a context" in choice(lowered, "engines")[1]
    kept = planned(small, "llama-8b", memory=memory, engines=2)
    assert len(kept.full.engines) == 2
    assert kept.full.context < lowered.full.context
    refused = planned(nodes(8, 8, memory_gib=4), "llama-8b", engines=2).refused
    assert refused is not None
    assert refused.exit_code == 76
    assert "with 2 engines" in refused.what
    assert "on its NUMA node" in refused.why


def test_engines_that_only_what_others_hold_stands_against_are_tried_again() -> None:
    """As for one engine: 75 where they fit as soon as others let go, 76 where they never do."""
    def refusal(used_gib: float, node_gib: float = 32) -> Any:
        host = nodes(8, 8, memory_gib=node_gib)
        memory = dataclasses.replace(host.memory, available_bytes=int((64 - used_gib) * GIB), used_bytes=int(used_gib * GIB))
        return planned(dataclasses.replace(host, memory=memory), "llama-8b", engines=2).refused

    assert refusal(1) is None
    for_now, for_good = refusal(62), refusal(62, node_gib=4)
    assert (for_now.exit_code, "does not fit with 2 engines now" in for_now.what) == (75, True)
    assert "stop other programs, set cpu.engines to auto" in for_now.do
    assert (for_good.exit_code, "now" in for_good.what) == (76, False)


def test_the_rung_below_is_one_engine_on_the_first_ones_node() -> None:
    plan = planned(nodes(8, 8))
    full, one = plan.rungs[:2]
    assert one.id == "one-engine"
    assert (one.engines, one.cpus, one.threads) == ((), full.engines[0], full.threads)
    assert "--data-parallel-size" not in one.argv
    assert (one.context, one.kv_bytes, one.running * 2) == (full.context, full.kv_bytes, full.running)
    memory = {rung.id: rung for rung in plan.rungs}
    for name in ("small-kv", "short-context", "small-batch"):
        assert memory[name].engines == (), "built on it: memory that ran out does not come back with the other engine"
    for name in ("aten", "lower-isa"):
        assert memory[name].engines == full.engines


@pytest.mark.parametrize(("asked", "each", "all_"), [(None, 9, 16), (5, 4, 5), (1, 2, 1), (32, 17, 32)])
def test_the_requests_at_once_are_shared_out(asked: int | None, each: int, all_: int) -> None:
    plan = planned(nodes(4, 4), max_running=asked)
    assert arg(plan, "--max-num-seqs") == str(each), "its share and the probe's seat"
    assert plan.full.running == all_


@pytest.mark.parametrize(("text", "engines"), [("auto", None), ("1", 1), ("2", 2)])
def test_the_setting(text: str, engines: int | None) -> None:
    assert parse(f"cpu: {{engines: {text}}}").settings.cpu.engines == engines
    assert overlay(parse(""), env={"APPLIANCE_CPU_ENGINES": text}, flags={}).settings.cpu.engines == engines


@pytest.mark.parametrize("word", ["--data-parallel-size", "--data-parallel-size-local=2", "-dp", "--distributed-executor-backend",
                                  "--data-parallel-hybrid-lb", "--data_parallel_rank"])
def test_extra_arguments_do_not_choose_engines(word: str) -> None:
    assert extra_args_refusal([word]) is not None


@pytest.mark.parametrize("name", ["APPLIANCE_ENGINE_CPUS", "VLLM_DP_SIZE", "CPU_VISIBLE_MEMORY_NODES"])
def test_variables_do_not_choose_engines(name: str) -> None:
    assert env_refusal({name: "2"}) is not None


# ---- watching several engines ---------------------------------------------------------------------------------------


class Engines:
    """Engines that answer when they are let; `cpu`: seconds each has taken."""

    def __init__(self, count: int) -> None:
        self.cpu = dict.fromkeys(range(count), 0.0)
        self.open = dict.fromkeys(range(count), True)
        self.says: dict[int, Answer | Busy | str] = {engine: Answer(text="x", tokens=1, seconds=0.1 * (engine + 1)) for engine in range(count)}
        self.watch = EngineWatch(count, lambda: self.cpu)

    def answer(self, engine: int) -> Answer | Busy | str:
        while not self.open[engine]:
            time.sleep(0.005)
        return self.says[engine]


def asked(engines: Engines, *, owing: int) -> Callable[[], None]:
    from appliance.supervisor.background import Background

    call = Background(lambda: engines.watch.ask(engines.answer, time.sleep), name="probe")
    deadline = time.monotonic() + 5
    while len(engines.watch._owing) != owing and time.monotonic() < deadline:
        time.sleep(0.005)

    def finish() -> None:
        engines.open = dict.fromkeys(engines.open, True)
        while not call.done:
            time.sleep(0.005)

    return finish


def test_all_are_asked_and_the_slowest_counts() -> None:
    engines = Engines(3)
    found = engines.watch.ask(engines.answer, time.sleep)
    assert isinstance(found, Answer)
    assert found.seconds == pytest.approx(0.3)
    assert engines.watch.signs(7.0, 8.0) == (7.0, 8.0)


@pytest.mark.parametrize(("said", "expected"), [
    ({1: "no answer within 5 s"}, "engine 1: no answer within 5 s"),
    ({0: Busy(sentence="full")}, Busy(sentence="full")),
    ({0: Busy(sentence="full"), 1: "the connection failed"}, "engine 1: the connection failed"),
])
def test_one_without_an_answer_is_none(said: Mapping[int, Any], expected: object) -> None:
    engines = Engines(2)
    engines.says.update(said)
    assert engines.watch.ask(engines.answer, time.sleep) == expected


def test_an_engine_that_hangs_is_not_covered_by_one_that_works() -> None:
    engines = Engines(2)
    engines.watch.look(100.0, least=0.03)
    engines.watch.compare({0: (1.0,), 1: (1.0,)}, at=100.0)
    engines.open[1] = False
    finish = asked(engines, owing=1)
    engines.cpu = {0: 50.0, 1: 0.0}
    engines.watch.look(150.0, least=0.03)
    engines.watch.compare({0: (99.0,), 1: (1.0,)}, at=150.0)
    assert engines.watch.signs(150.0, 150.0) == (100.0, 100.0), "the other one's tokens and CPU time are not its own"
    engines.cpu = {0: 50.0, 1: 3.0}
    engines.watch.look(160.0, least=0.03)
    assert engines.watch.signs(160.0, 160.0) == (100.0, 160.0), "a long step: it computes"
    finish()
    assert engines.watch.signs(170.0, 171.0) == (170.0, 171.0)


def test_an_idle_engine_that_has_answered_is_not_taken_for_one_that_stands_still() -> None:
    engines = Engines(2)
    engines.watch.look(100.0, least=0.03)
    engines.open[1] = False
    finish = asked(engines, owing=1)
    engines.cpu = {0: 0.0, 1: 40.0}
    engines.watch.look(140.0, least=0.03)
    assert engines.watch.signs(0.0, 140.0)[1] == 140.0
    finish()


def test_an_engine_whose_process_is_not_known_is_judged_by_all_of_them() -> None:
    engines = Engines(2)
    engines.cpu = {0: 1.0}
    engines.open[1] = False
    finish = asked(engines, owing=1)
    engines.watch.look(50.0, least=0.03)
    assert engines.watch.signs(50.0, 50.0)[1] == 50.0
    finish()


def test_counters_by_engine() -> None:
    found = parse_counters('vllm:generation_tokens_total{engine="0",model_name="m"} 5.0\n'
                           'vllm:generation_tokens_total{engine="1",model_name="m"} 7.0\n'
                           'vllm:prompt_tokens_total{engine="1",model_name="m"} 2.0\n')
    assert found.generated == 12.0
    assert found.engines[0] != found.engines[1]
    assert sorted(found.engines) == [0, 1]
    assert sum(found.engines[1]) == 9.0
    assert json.loads(json.dumps(found.marks)) == [12.0, 2.0, 0.0, 0.0, 0.0]
