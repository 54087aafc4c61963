"""The planner: golden plans, the safety rules over everything, and each choice with its reason."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from appliance import budget
from appliance.budget import GIB, MIB, Shape, kv_bytes_per_token, peak
from appliance.directories import MAX_SOCKET_DIRECTORY
from appliance.errors import ConfigError
from appliance.facts import Core, CpuQuota, HostFacts, KernelTrial, ModelFacts, NumaNode, TopologyFacts
from appliance.launch import Places
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host
from appliance.settings import Cpu, Memory, Settings, Tls, Worker
from tests.unit import golden_plans
from tests.unit.golden_plans import HOSTS, PLACES, PLANS, with_ceiling

MODELS = golden_plans.models()
SMOLLM2, LLAMA_1B = MODELS["smollm2"], MODELS["llama-1b"]
HOST = with_ceiling(read_host(HOSTS / golden_plans.HOST), 16 * GIB)
FOLDERS = sorted(path for path in HOSTS.iterdir() if (path / "expect.json").exists())


def planned(model: ModelFacts = SMOLLM2, host: HostFacts = HOST, **settings: object) -> Plan:
    return make_plan(host, model, Settings(**settings), PLACES)  # type: ignore[arg-type]


def choice(plan: Plan, name: str) -> tuple[object, str]:
    return next((c.value, c.reason) for c in plan.choices if c.name == name)


@pytest.mark.parametrize(("case", "plan"), list(golden_plans.cases()), ids=lambda v: v if isinstance(v, str) else "")
def test_golden(case: str, plan: Plan) -> None:
    assert golden_plans.text(plan) == (PLANS / f"{case}.json").read_text(), "run `make goldens` and review the diff"


def test_below_the_minimum_it_refuses_with_numbers() -> None:
    plan = planned(host=with_ceiling(HOST, 1 * GIB))
    assert plan.rungs == ()
    assert plan.refused is not None
    assert plan.refused.exit_code == 76
    assert "2048 tokens of context need" in plan.refused.why
    assert "GiB" in plan.refused.do
    # and the number it names is enough
    needed = float(plan.refused.do.split("ceiling to ")[1].split(" GiB")[0])
    assert planned(host=with_ceiling(HOST, int((needed + 0.01) * GIB))).refused is None


SETTINGS = [
    Settings(),
    Settings(memory=Memory(ceiling=2 * GIB)),
    Settings(cpu=Cpu(threads=3)),
    Settings(cpu=Cpu(cpus=(0,))),
    Settings(context=512, max_running=1),
    Settings(compile=False),
    Settings(kernel="aten"),
    Settings(max_running=64),
    Settings(worker=Worker(env={"A": "b"}, extra_args=("--seed", "1"))),
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_no_host_and_no_setting_makes_an_unsafe_rung(folder: Path) -> None:
    captured = read_host(folder)
    seen = 0
    for settings, model, host in itertools.product(SETTINGS, MODELS.values(), (captured, with_ceiling(captured, 16 * GIB))):
        plan = make_plan(host, model, settings, PLACES)
        for rung in plan.rungs:
            seen += 1
            assert rung.quantization["prefill_dequant"] is True
            assert rung.quantization["dequant_threshold"] <= 2
            overrides = json.loads(rung.argv[rung.argv.index("--hf-overrides") + 1])
            assert overrides["quantization_config"] == rung.quantization
            assert rung.env["ATEN_CPU_CAPABILITY"] in ("default", "avx2", "avx512")
            assert rung.env["OMP_NUM_THREADS"] == str(rung.threads)
            assert "--kv-cache-memory-bytes" in rung.argv
        for line in plan.choices:
            assert line.reason
            assert line.evidence
        assert plan.rungs or plan.refused
    if make_plan(with_ceiling(captured, 16 * GIB), SMOLLM2, Settings(), PLACES).refused is None:
        assert seen


def test_an_unsafe_checkpoint_is_overruled() -> None:
    unsafe = dataclasses.replace(SMOLLM2, quantization={**SMOLLM2.quantization, "prefill_dequant": False, "dequant_threshold": 99})
    for rung in planned(unsafe).rungs:
        assert (rung.quantization["prefill_dequant"], rung.quantization["dequant_threshold"]) == (True, 2)


def test_case_005_float16_is_planned_as_bfloat16_and_refused_on_request() -> None:
    plan = planned(dataclasses.replace(SMOLLM2, dtype="float16"))
    assert plan.full.argv[plan.full.argv.index("--dtype") + 1] == "bfloat16"
    assert "the model declares float16" in choice(plan, "dtype")[1]
    refused = planned(dtype="float16").refused
    assert refused is not None
    assert (refused.exit_code, refused.what) == (78, "dtype float16 is refused")


def test_case_021_worker_env_may_not_hide_the_plugin() -> None:
    refused = planned(worker=Worker(env={"VLLM_PLUGINS": "other"})).refused
    assert refused is not None
    assert isinstance(refused.error(), ConfigError)
    assert "cpu_int4" in refused.why
    assert planned(worker=Worker(env={"VLLM_PLUGINS": "other,cpu_int4"})).full.env["VLLM_PLUGINS"] == "other,cpu_int4"
    assert planned(worker=Worker(env={"VLLM_CPU_KVCACHE_SPACE": "4"})).refused is not None


@pytest.mark.parametrize("word", [
    "--hf-overrides", "--hf_overrides={}", "--hf-overrides.quantization_config.dequant_threshold", "--hf-over", "--host=0.0.0.0",
    "--no-enforce-eager", "--max-num-seqs", "-q", "-O0", "-cc.mode", "-tp", "--tensor-parallel-size", "--config", "--api-key",
    "--compilation-config.mode", "--data-parallel-size", "--m", "--kv-cache-memory-bytes",
])
def test_no_extra_argument_overrules_the_plan(word: str) -> None:
    refused = planned(worker=Worker(extra_args=(word, "64"))).refused
    assert refused is not None
    assert refused.exit_code == 78
    assert word in refused.why


@pytest.mark.parametrize("env", [
    {"OMP_NUM_THREADS": "99"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, {"HF_HUB_OFFLINE": ""}, {"HF_HUB_OFFLINE": "0"},
    {"NOTIFY_SOCKET": "/x"}, {"VLLM_API_KEY": "k"}, {"ANY": ""},
])
def test_no_variable_undoes_the_plan(env: dict[str, str]) -> None:
    refused = planned(worker=Worker(env=env)).refused
    assert refused is not None
    assert refused.exit_code == 78


def test_torchs_dispatch_level_may_be_lowered_never_raised() -> None:
    raised = planned(worker=Worker(env={"ATEN_CPU_CAPABILITY": "avx512"}))
    assert [r.env["ATEN_CPU_CAPABILITY"] for r in raised.rungs if r.id in ("full", "lower-isa")] == ["avx2", "default"]
    lowered = planned(worker=Worker(env={"ATEN_CPU_CAPABILITY": "default"}))
    assert {r.env["ATEN_CPU_CAPABILITY"] for r in lowered.rungs} == {"default"}


def topology(cores: tuple[Core, ...], *, smt: bool = False, quota: CpuQuota | None = None) -> HostFacts:
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    nodes = tuple(NumaNode(node=n, cpus=(), memory_bytes=None) for n in sorted({core.node or 0 for core in cores}))
    return dataclasses.replace(HOST, topology=TopologyFacts(online=cpus, allowed=cpus, cores=cores, smt=smt, nodes=nodes, quota=quota))


def flat(count: int, *, kind: str | None = None, node: int = 0, first: int = 0, threads: int = 1) -> tuple[Core, ...]:
    return tuple(Core(cpus=tuple(first + c * threads + t for t in range(threads)), kind=kind, node=node) for c in range(count))


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        (flat(8, kind="performance") + flat(12, kind="efficiency", first=8), 8),
        (flat(6, kind="performance", threads=2) + flat(8, kind="efficiency", first=12), 6),
        (flat(16), 16),
        (flat(8), 8),
        (flat(1), 1),
        (flat(8, threads=2), 8),
        (flat(12, node=0) + flat(16, node=1, first=12), 16),
    ],
    ids=["8P12E", "6P8E", "16-no-smt", "vm-8", "single", "smt-8", "two-nodes"],
)
def test_case_049_threads(cores: tuple[Core, ...], threads: int) -> None:
    assert planned(host=topology(cores)).full.threads == threads
    assert planned(host=topology(cores), cpu=Cpu(threads=3)).full.threads == 3


@pytest.mark.parametrize(("cpus", "threads"), [(4.0, 4), (3.9, 3), (0.5, 1), (100.0, 8)])
def test_case_044_the_quota_bounds_the_threads(cpus: float, threads: int) -> None:
    plan = planned(host=topology(flat(8), quota=CpuQuota(cpus=cpus, source="/sys/fs/cgroup/a/cpu.max")))
    assert plan.full.threads == threads
    if threads < 8:
        assert "quota" in choice(plan, "threads")[1]


def test_case_044_cpuset_and_quota_the_smaller_wins() -> None:
    assert planned(host=topology(flat(4), quota=CpuQuota(cpus=6, source="x"))).full.threads == 4
    assert planned(host=topology(flat(6), quota=CpuQuota(cpus=4, source="x"))).full.threads == 4


def test_hybrid_and_numa_hosts_confine_the_worker() -> None:
    hybrid = planned(host=topology(flat(2, kind="performance", threads=2) + flat(4, kind="efficiency", first=4)))
    assert hybrid.full.cpus == (0, 1, 2, 3)
    assert hybrid.full.env["APPLIANCE_WORKER_CPUS"] == "0,1,2,3"
    assert "APPLIANCE_WORKER_CPUS" not in planned(host=topology(flat(4))).full.env


def test_case_033_kept_layers_count_in_the_estimate() -> None:
    more = dataclasses.replace(SMOLLM2, kept_bytes=SMOLLM2.kept_bytes + 500 * MIB)
    assert planned(more).peak_bytes == planned().peak_bytes + 500 * MIB


def test_less_memory_never_plans_more() -> None:
    before = 0
    for ceiling in range(1 * GIB, 12 * GIB, 256 * MIB):
        for model in MODELS.values():
            plan = planned(model, host=with_ceiling(HOST, ceiling))
            if plan.refused is None:
                assert plan.usable_bytes is not None
                assert plan.peak_bytes <= plan.usable_bytes < ceiling
                assert peak(plan.memory) == (plan.peak_phase, plan.peak_bytes)
        smol = planned(host=with_ceiling(HOST, ceiling))
        context = smol.full.context if smol.refused is None else 0
        assert context >= before
        before = context


def test_a_soft_limit_and_busy_memory_count() -> None:
    busy = dataclasses.replace(HOST, memory=dataclasses.replace(HOST.memory, available_bytes=3 * GIB))
    assert planned(host=busy).usable_bytes == 3 * GIB - 128 * MIB
    held = dataclasses.replace(HOST, memory=dataclasses.replace(HOST.memory, used_bytes=12 * GIB))
    assert planned(host=held).usable_bytes == 4 * GIB - 128 * MIB
    assert planned(host=held, memory=Memory(reserve=GIB)).usable_bytes == 3 * GIB


def test_memory_reserve_and_ceiling_settings() -> None:
    plan = planned(memory=Memory(ceiling=4 * GIB, reserve=1 * GIB))
    assert plan.usable_bytes == 3 * GIB
    assert choice(plan, "memory ceiling")[0] == 4 * GIB
    assert planned(memory=Memory(ceiling=400 * GIB)).ceiling_bytes == 16 * GIB


def test_context_is_cut_openly() -> None:
    plan = planned(MODELS["llama-1b"], host=with_ceiling(HOST, 3 * GIB))
    value, reason = choice(plan, "context")
    assert value == plan.full.context < MODELS["llama-1b"].max_context
    assert f"cut from {MODELS['llama-1b'].max_context} tokens" in reason


def test_a_model_of_two_rotations_keeps_to_the_short_one_unless_asked() -> None:
    model = dataclasses.replace(SMOLLM2, short_context=4096)
    assert choice(planned(model), "context") == (4096, "its rotation changes above that; 8192 at most where `context` asks for it")
    assert choice(planned(model, context=8000), "context") == (8000, "set by the operator")


def test_a_wanted_context_is_kept_or_refused_never_cut() -> None:
    assert planned(context=4096).full.context == 4096
    assert planned(context=1 << 20).full.context == SMOLLM2.max_context
    refused = planned(MODELS["llama-1b"], host=with_ceiling(HOST, 3 * GIB), context=8192).refused
    assert refused is None or refused.exit_code == 76


def test_kv_bytes_per_token_is_the_models_own() -> None:
    assert kv_bytes_per_token(SMOLLM2) == 2 * 30 * 3 * 64 * 2


def test_without_a_compiler_it_runs_eager_and_says_so() -> None:
    host = dataclasses.replace(HOST, software=dataclasses.replace(HOST.software, compiler=None))
    plan = planned(host=host, kernel="aten")
    assert "--enforce-eager" in plan.full.argv
    assert "g++" in choice(plan, "compile")[1]
    # fused layers need none, and do not ask for one
    assert "CXX" not in planned(host=host).full.env
    assert planned(host=host).full.argv == planned().full.argv


def test_plain_decoders_on_the_native_kernel_are_fused_others_compiled() -> None:
    assert choice(planned(), "compile")[0] is False
    assert choice(planned(), "residual stream")[0] == "fp32"
    assert planned().full.quantization["wide_residual"] is False
    assert choice(planned(compile=True), "compile")[0] is True
    assert planned(compile=True).full.quantization["wide_residual"] is True
    other = dataclasses.replace(SMOLLM2, architecture="Gemma2ForCausalLM")
    assert choice(planned(other), "compile")[0] is True
    assert choice(planned(kernel="aten"), "compile")[0] is True


def test_the_kernel_is_native_where_the_worker_has_it() -> None:
    assert planned().full.quantization["kernel"] == "native"
    assert {rung.id: rung.quantization["kernel"] for rung in planned().rungs}["aten"] == "aten"
    old = make_plan(HOST, SMOLLM2, Settings(), PLACES, kernels=("aten", "portable"))
    assert {rung.quantization["kernel"] for rung in old.rungs} == {"aten"}
    assert choice(old, "compile")[0] is True
    refused = make_plan(HOST, SMOLLM2, Settings(kernel="native"), PLACES, kernels=("aten", "portable")).refused
    assert refused is not None
    assert refused.exit_code == 78


def test_mapped_weights_are_not_packed_at_load() -> None:
    mapped = make_plan(HOST, SMOLLM2, Settings(), dataclasses.replace(PLACES, prepared="/store/prepared/x"))
    assert "packing the largest layer" in {line.item for line in planned().memory}
    assert "packing the largest layer" not in {line.item for line in mapped.memory}


def test_the_worker_writes_only_below_its_places() -> None:
    places = Places(model="/m", cache="/c", tmp="/t", socket="/s/w", sockets="/s")
    env = make_plan(HOST, SMOLLM2, Settings(), places).full.env
    for name, value in env.items():
        if value.startswith("/") and name != "CXX":
            assert value.split("/")[1] in ("m", "c", "t", "s"), name
    assert len("/run/appliance/") < MAX_SOCKET_DIRECTORY


@pytest.mark.parametrize("settings", [
    Settings(), Settings(max_running=3, max_queued=500), Settings(max_running=4096),
    Settings(api_key_file="/etc/key", tls=Tls(cert="/c.pem", key="/k.pem")),
])
def test_the_worker_listens_on_its_socket_only_and_keeps_a_seat_for_the_probe(settings: Settings) -> None:
    plan = make_plan(HOST, SMOLLM2, settings, PLACES)
    for rung in plan.rungs:
        value = dict(itertools.pairwise(rung.argv))
        assert value["--uds"] == PLACES.socket
        assert not {"--host", "--port", "--ssl-certfile", "--ssl-keyfile", "--api-key"} & set(rung.argv)
        assert "VLLM_API_KEY" not in rung.env
        assert int(value["--max-num-seqs"]) == rung.running + 1 <= int(value["--max-num-batched-tokens"])
        assert int(rung.env["VLLM_MAX_N_SEQUENCES"]) == rung.running
        assert int(value["--max-num-queued-reqs"]) > 1000 + rung.running


def test_native_rungs_map_the_prepared_weights_and_no_other_does() -> None:
    places = Places(model="/m", cache="/c", tmp="/t", socket="/s/w", sockets="/s", prepared="/store/prepared/x")
    for rung in make_plan(HOST, SMOLLM2, Settings(), places).rungs:
        native = rung.quantization["kernel"] == "native"
        assert rung.env.get("APPLIANCE_PREPARED") == ("/store/prepared/x" if native else None), rung.id
        assert rung.env["APPLIANCE_PLANNED_KERNEL"] == ("aten" if rung.id == "aten" else "native")


def test_the_aten_rung_has_room_to_pack_its_weights_or_is_not_there() -> None:
    """`full` maps the weights; torch's kernel packs them in memory, which takes a multiple of the largest layer."""
    without, smaller, whole = set(), set(), set()
    for mib in range(1500, 4500, 50):
        places = dataclasses.replace(PLACES, prepared="/store/prepared/x")
        plan = make_plan(with_ceiling(HOST, mib << 20), LLAMA_1B, Settings(), places)
        if plan.refused:
            continue
        rung = next((rung for rung in plan.rungs if rung.id == "aten"), None)
        (without if rung is None else smaller if rung.kv_bytes < plan.full.kv_bytes else whole).add(mib)
        if rung is not None:
            batch = int(rung.argv[rung.argv.index("--max-num-batched-tokens") + 1])
            shape = Shape(context=rung.context, sequences=1, batch_tokens=batch, running=rung.running, compile=False)
            lines = budget.items(LLAMA_1B, shape, block=32, gemm_bytes=4, mapped=False)
            lines = [dataclasses.replace(line, bytes=rung.kv_bytes) if line.item == "key/value cache" else line for line in lines]
            assert budget.peak(lines)[1] <= (plan.usable_bytes or 0)
    assert without
    assert whole
    assert max(without) < min(whole)


def test_a_higher_ceiling_is_not_praised_where_a_numa_node_is_the_bound() -> None:
    bound = 0
    for name in ("two-nodes", "memory-only-node", "node-holes", "broadwell-two-sockets"):
        for model in golden_plans.models().values():
            plan = make_plan(read_host(HOSTS / name), model, Settings(), PLACES)
            chosen = {choice.name: choice for choice in plan.choices}
            if not plan.refused and chosen["memory ceiling"].evidence.startswith("NUMA node"):
                bound += 1
                assert "with 1 GiB more" not in chosen
    assert bound


def test_the_lowered_rung_lowers_the_native_kernel_as_well() -> None:
    rungs = {rung.id: rung for rung in make_plan(HOST, SMOLLM2, Settings(), PLACES).rungs}
    lowered = rungs["lower-isa"].env
    assert lowered["APPLIANCE_KERNEL"] == {"avx2": "avx2", "default": "scalar"}[lowered["ATEN_CPU_CAPABILITY"]]
    assert "APPLIANCE_KERNEL" not in rungs["full"].env


def test_an_instruction_set_may_be_forced() -> None:
    plan = make_plan(HOST, SMOLLM2, Settings(kernel="scalar"), PLACES)
    assert plan.rungs[0].env["APPLIANCE_KERNEL"] == "scalar"
    assert plan.rungs[0].quantization["kernel"] == "native"
    assert make_plan(HOST, SMOLLM2, Settings(kernel="scalar"), PLACES, kernels=("aten",)).refused is not None


@pytest.mark.parametrize(("trial", "kernel", "variant", "words"), [
    (None, "native", "the CPU's best", "each start tries it"),
    (KernelTrial(variant="avx2", left_out=()), "native", "avx2", "each start tries it"),
    (KernelTrial(variant="avx2", left_out=("native avx-vnni: died by SIGILL",)), "native", "avx2", "left out: native avx-vnni: died by SIGILL"),
    (KernelTrial(variant=None, left_out=("native avx2: wrong results",)), "aten", None, "left out: native avx2: wrong results"),
])
def test_what_the_self_test_found_is_in_the_plan(trial: KernelTrial | None, kernel: str, variant: str | None, words: str) -> None:
    plan = make_plan(HOST, SMOLLM2, Settings(), PLACES, trial=trial)
    choices = {choice.name: choice for choice in plan.choices}
    assert plan.rungs[0].quantization["kernel"] == kernel
    assert (choices["kernel variant"].value if variant else None) == variant
    assert words in choices["kernel variant" if variant else "kernel, one row"].reason


def test_the_ladder_only_steps_down() -> None:
    plan = planned(MODELS["llama-1b"])
    full = plan.full
    assert full.id == "full"
    assert len({r.id for r in plan.rungs}) == len(plan.rungs)
    for rung in plan.rungs[1:]:
        assert rung.changes
        assert rung.kv_bytes <= full.kv_bytes
        assert rung.context <= full.context
        assert rung.argv != full.argv or rung.env != full.env
