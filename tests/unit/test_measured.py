"""What was measured: its text, when it is stale, and what follows from it for a plan. Trials as data."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance import measured, tuning
from appliance.budget import GIB
from appliance.errors import ConfigError, StoreError
from appliance.facts import Core, CpuQuota, KernelTrial, NumaNode, TopologyFacts
from appliance.measured import BANDWIDTH, CANARY, SERVED, WEIGHTS, Record, Trial, figure
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host
from appliance.settings import Cpu, Settings
from appliance.threads import candidates, choose_threads
from appliance.tune import archive, charts, orders
from appliance.tune.subject import Subject
from tests.unit import golden_plans
from tests.unit.golden_plans import HOSTS, PLACES, with_ceiling

MODEL = golden_plans.models()["smollm2"]
HOST = with_ceiling(read_host(HOSTS / "no-smt-16"), 16 * GIB)


def trial(kind: str, settings: dict[str, Any], *, failure: str = "", at: float = 1.0, disturbed: float = 0.0,
          **figures: float) -> Trial:
    names = {"tok": "tok/s", "prompt": "prompt tok/s", "gb": "GB/s", "four": "4 streams tok/s", "r8": "8 rows tok/s", "r64": "64 rows tok/s"}
    return Trial(kind=kind, settings=settings, model="" if kind in (BANDWIDTH, CANARY) else MODEL.digest, failure=failure, at=at,
                 figures={names[name]: figure([value * 0.99, value, value * 1.01]) for name, value in figures.items()},
                 notes={"disturbed": disturbed} if disturbed else {})


def threads(count: int, tok: float, prompt: float = 100.0, **more: Any) -> Trial:
    cpus = {"cpus": more.pop("cpus")} if "cpus" in more else {}
    return trial(WEIGHTS, {"threads": count, "kernel": "native", "variant": "", "route": "own", **cpus}, tok=tok, prompt=prompt, **more)


def record(*trials: Trial, stale: tuple[str, ...] = ()) -> Record:
    return Record(fingerprint="f" * 12, inputs={"kernel": "6.1.0"}, trials=trials, stale=stale)


def planned(found: Record | None, host: Any = HOST, kernel_trial: KernelTrial | None = None, **settings: Any) -> Plan:
    return make_plan(host, MODEL, Settings(**settings), PLACES, measured=found, trial=kernel_trial)


def chosen(plan: Plan, name: str) -> Any:
    return next((choice for choice in plan.choices if choice.name == name), None)


# ---- values ---------------------------------------------------------------------------------------------------------


def test_a_record_survives_its_text() -> None:
    whole = record(threads(6, 41.2), trial(CANARY, {"threads": 2}, failure="SIGILL: unsafe here"), threads(4, 3, disturbed=0.4))
    assert measured.read(measured.write(whole)) == whole


def _other_users(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


DAMAGE: dict[str, tuple[Any, str]] = {
    "truncated": (lambda path: path.write_text(measured.write(record(threads(6, 41.2)))[:-9]), "is damaged, or another release wrote it"),
    "empty": (lambda path: path.write_text(""), "is damaged, or another release wrote it"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe"), "is damaged, or another release wrote it"),
    "newer": (lambda path: path.write_text('{"schema": 2}'), "is damaged, or another release wrote it"),
    "huge": (lambda path: path.write_text(measured.write(record()) + " " * archive.MOST_BYTES), "is damaged, or another release wrote it"),
    "folder": (lambda path: path.mkdir(), "cannot be read: Is a directory"),
    "pipe": (lambda path: os.mkfifo(path), "cannot be read: it is no regular file"),
    "loop": (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
    "closed": (_other_users, "cannot be read: Permission denied"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_named_and_measured_anew(damage: str, tmp_path: Path) -> None:
    make, why = DAMAGE[damage]
    folder = tmp_path / "measured"
    folder.mkdir()
    file = folder / f"{HOST.fingerprint}.json"
    make(file)
    with as_the_owner(folder) if damage == "closed" and os.geteuid() == 0 else contextlib.nullcontext():
        measured_anew(tmp_path, file, why)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another account")
def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    with as_the_owner(folder):
        folder.chmod(0o555)
        with pytest.raises(StoreError) as caught, archive.only_one(tmp_path):
            raise AssertionError
    assert caught.value.line == f"cannot measure: {folder} is not writable; check owner and mount of {folder}"


@contextlib.contextmanager
def as_the_owner(folder: Path) -> Iterator[None]:
    """Root may read and write everything: be another account, whose folder this is."""
    os.chown(folder, 54321, 54321)
    for parent in list(folder.parents)[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(54321)
    try:
        yield
    finally:
        os.seteuid(0)


def measured_anew(state: Path, file: Path, why: str) -> None:
    found = archive.load(state, HOST)
    assert found is not None
    assert (found.damaged, found.stale, found.trials) == (f"{file} {why}", (f"{file} {why}",), ())
    choice = chosen(planned(found), "measurements")
    assert (choice.value, choice.reason, choice.evidence) == ("damaged", f"{file} {why}", "rules of thumb until `applianctl tune` has run")
    fresh = archive.current(state, HOST)
    assert (fresh.damaged, fresh.stale) == ("", ())
    archive.save(state, fresh.having(threads(6, 41.2)))
    again = archive.load(state, HOST)
    assert again is not None
    assert (again.damaged, len(again.trials)) == ("", 1)
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "closed"])
def test_what_is_damaged_beside_the_record_holds_nobody_up(damage: str, tmp_path: Path) -> None:
    """Earlier records, served ones, the operator's wish, a draft of a run that was cut off, the lock."""
    make, why = DAMAGE[damage]
    figures = {"threads": 1}
    name = measured.decision(MODEL.digest, figures)
    for place in ("measured/earlier/e.json", f"measured/served/{name}.json", f"measured/.{HOST.fingerprint}.draft", "measured/applied"):
        if place.startswith("measured/.") and damage == "folder":
            continue
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
    if damage == "pipe":
        os.mkfifo(tmp_path / "measured/.lock")
    with archive.only_one(tmp_path):
        archive.applied(tmp_path)
    served = archive.kept(tmp_path, HOST, digest=MODEL.digest, figures=figures)
    assert served is not None
    assert served.damaged == f"{tmp_path}/measured/served/{name}.json {why}"
    assert archive.before(tmp_path, record()) is None
    assert not [path for path in archive.names(tmp_path) if path.name.startswith(".")], "a draft is no record"
    archive.save(tmp_path, archive.current(tmp_path, HOST))
    for number in range(archive.KEPT + 3):
        archive.keep(tmp_path, record(), digest=MODEL.digest, figures={"threads": number + 2})
    with pytest.raises(StoreError, match=r"earlier/e\.json"):
        archive.named(tmp_path, "e")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"schema": 2}', '{"schema": 1, "trials": 7}', "{" * 9999])
def test_a_text_that_is_no_record_is_none(text: str) -> None:
    assert measured.read(text) is None


@pytest.mark.parametrize(("place", "value"), [
    *(("settings", {"threads": value}) for value in (None, "6", [6], {}, 6.0, True)), ("settings", {}), ("settings", {"threads": 6, "block": [1]}),
    ("settings", {"threads": 6, "compile": 1}), ("settings", {"threads": 6, "odd": []}), ("notes", {"disturbed": "much"}), ("at", 10**400),
    *(("figures", {"tok/s": {"median": 2, "low": 1, "high": 3, "repeats": 3, **odd}}) for odd in (
        {"median": float("nan")}, {"median": 4}, {"low": -1}, {"high": float("inf")}, {"high": 10**400}, {"repeats": float("inf")}, {"repeats": None})),
], ids=repr)
def test_figures_that_nobody_measured_are_damage(place: str, value: object) -> None:
    tree = json.loads(measured.write(record(threads(6, 41.2))))
    assert measured.read(json.dumps(tree)) is not None
    tree["trials"][0][place] = value
    assert measured.read(json.dumps(tree)) is None


def test_a_later_trial_of_the_same_replaces_the_earlier() -> None:
    twice = record(threads(6, 40), threads(8, 30)).having(threads(6, 41))
    assert [t.median("tok/s") for t in twice.trials] == [30, 41]


@pytest.mark.parametrize(("values", "want"), [([3.0, 1.0, 2.0], (2.0, 1.0, 3.0, 3)), ([4.0, 2.0], (3.0, 2.0, 4.0, 2)), ([5.0], (5.0, 5.0, 5.0, 1))])
def test_a_figure(values: list[float], want: tuple[float, float, float, int]) -> None:
    assert dataclasses.astuple(figure(values)) == want


INPUTS = {
    "CPU": lambda h: dataclasses.replace(h, cpu=dataclasses.replace(h.cpu, model_name="another")),
    "kernel": lambda h: dataclasses.replace(h, software=dataclasses.replace(h.software, kernel="9.9")),
    "CPU quota": lambda h: dataclasses.replace(h, topology=dataclasses.replace(h.topology, quota=CpuQuota(cpus=3.5, source="cpu.max"))),
    "CPUs": lambda h: dataclasses.replace(h, topology=dataclasses.replace(h.topology, allowed=(0, 1, 2))),
    "memory limit": lambda h: dataclasses.replace(h, memory=dataclasses.replace(h.memory, limits=(*h.memory.limits, measured_limit()))),
    "version of torch": lambda h: dataclasses.replace(h, software=dataclasses.replace(h.software, versions={"torch": "9.9"})),
}


def measured_limit() -> Any:
    from appliance.facts import MemoryLimit

    return MemoryLimit(bytes=GIB, source="memory.max", soft=False)


@pytest.mark.parametrize("name", INPUTS)
def test_what_figures_depend_on_makes_them_stale(name: str) -> None:
    before, now = (measured.inputs(host, microcode="0x1") for host in (HOST, INPUTS[name](HOST)))
    assert measured.changes(before, now) == (f"{name} was {before.get(name, 'none')}, is {now[name]}",)


def test_microcode_makes_them_stale_and_free_memory_does_not() -> None:
    before = measured.inputs(HOST, microcode="0x1")
    assert measured.changes(before, measured.inputs(HOST, microcode="0x2")) == ("microcode was 0x1, is 0x2",)
    less = dataclasses.replace(HOST, memory=dataclasses.replace(HOST.memory, available_bytes=1, used_bytes=1))
    assert measured.changes(before, measured.inputs(less, microcode="0x1")) == ()


UPGRADES = [  # name, figure before and after, what differs in the host, lost
    ("as fast", 40, 39, {"kernel": "6.2.0"}, ""),
    ("slower", 40, 30, {"kernel": "6.2.0"}, "slower since kernel was 6.1.0, is 6.2.0: weights, threads 6, route own: 40.4 -> 30.3 tok/s, 25 % slower"),
    ("fewer CPUs are no upgrade", 40, 20, {"kernel": "6.2.0", "CPUs": "0-1"}, ""),
    ("nothing changed", 40, 20, {}, ""),
    ("disturbed", 40, 0, {"kernel": "6.2.0"}, ""),
]


@pytest.mark.parametrize(("name", "then", "now", "changed", "lost"), UPGRADES, ids=[case[0] for case in UPGRADES])
def test_what_an_upgrade_has_lost_is_said(tmp_path: Path, name: str, then: float, now: float, changed: dict[str, str], lost: str) -> None:
    earlier = record(threads(6, then))
    archive.save(tmp_path, earlier)
    after = dataclasses.replace(record(threads(6, now) if now else threads(6, 20, disturbed=0.5)), inputs={**earlier.inputs, **changed})
    archive.save(tmp_path, after)
    assert archive.lost(tmp_path, after, loss_pct=10.0) == lost
    assert archive.lost(tmp_path, after, loss_pct=30.0) == ""


# ---- threads --------------------------------------------------------------------------------------------------------

THREADS = [  # name, trials, expected count
    ("nothing measured: the rule", [], 16),
    ("one figure compares nothing", [threads(4, 50)], 16),
    ("the fastest", [threads(8, 33), threads(6, 41.2), threads(4, 30), threads(16, 20)], 6),
    ("within noise the fewest threads", [threads(16, 41.5), threads(8, 41.0), threads(4, 30)], 8),
    ("within noise the faster prompt", [threads(16, 41.5, 900), threads(8, 41.0, 500), threads(4, 30, 300)], 16),
    ("prompts not measured: of equals the most threads", [threads(16, 41.5, 0), threads(8, 41.0, 0), threads(4, 30, 0)], 16),
    ("a disturbed figure decides nothing", [threads(4, 99, disturbed=0.5), threads(6, 41), threads(8, 33)], 6),
    ("a failed one decides nothing", [threads(16, 99, failure="it said nothing for 60 s"), threads(6, 41), threads(8, 33)], 6),
    ("all failed: the rule", [threads(16, 0, failure="it said nothing for 60 s"), threads(8, 0, failure="it said nothing for 60 s")], 16),
]


@pytest.mark.parametrize(("name", "trials", "count"), THREADS, ids=[case[0] for case in THREADS])
def test_threads_by_measurement(name: str, trials: list[Trial], count: int) -> None:
    plan = planned(record(*trials))
    assert plan.full.threads == count
    assert plan.full.env["OMP_NUM_THREADS"] == str(count)


def test_the_plan_cites_what_was_measured() -> None:
    choice = chosen(planned(record(threads(8, 33), threads(6, 41.2))), "threads")
    assert choice.evidence == "measured: 6 threads 41.2 tok/s, 8 threads 33.0 tok/s"
    assert choice.reason == "fastest of those measured; the rule of thumb says 16"


def test_stale_figures_decide_nothing_and_are_named() -> None:
    plan = planned(record(threads(8, 33), threads(6, 41.2), stale=("kernel was 6.1, is 6.2",)))
    assert plan.full.threads == 16
    assert chosen(plan, "measurements").reason == "kernel was 6.1, is 6.2"
    assert not any("measured" in choice.evidence for choice in plan.choices)


def test_figures_of_another_model_decide_nothing() -> None:
    other = tuple(dataclasses.replace(t, model="0" * 64) for t in (threads(8, 33), threads(6, 41.2)))
    assert planned(record(*other)).full.threads == 16


def test_the_operator_and_the_quota_win() -> None:
    found = record(threads(8, 33), threads(6, 41.2), threads(2, 20))
    assert planned(found, cpu=Cpu(threads=3)).full.threads == 3
    quota = dataclasses.replace(HOST.topology, quota=CpuQuota(cpus=4, source="cpu.max"))
    trials = tuning.thread_trials(record(threads(8, 33), threads(6, 41.2), threads(2, 20), threads(4, 25)), MODEL.digest, "native")
    assert choose_threads(quota, Settings(), trials).count == 4


def test_whole_workers_outweigh_their_linears() -> None:
    base = {"batch_tokens": 512, "block": 32, "compile": False, "kernel": "native"}
    served = [trial(SERVED, {**base, "threads": count}, tok=tok, prompt=100, four=50) for count, tok in ((6, 30.0), (8, 36.0))]
    plan = planned(record(threads(8, 33), threads(6, 41.2), *served))
    assert (plan.full.threads, chosen(plan, "threads").evidence) == (8, "measured: 6 threads 30.0 tok/s, 8 threads 36.0 tok/s")


TOPOLOGIES = [  # name, cores as (cpus, kind, node), quota, candidates
    ("flat", [((i,), None, 0) for i in range(8)], None, [(8, None), (7, None), (6, None), (4, None), (2, None), (1, None)]),
    ("SMT", [((i, i + 4), None, 0) for i in range(4)], None, [(4, None), (3, None), (2, None), (1, None), (8, None)]),
    ("quota", [((i,), None, 0) for i in range(8)], 4.0, [(4, None), (3, None), (2, None), (1, None)]),
    ("hybrid", [((0, 1), "performance", 0), ((2, 3), "performance", 0), ((4,), "efficiency", 0), ((5,), "efficiency", 0)], None,
     [(2, (0, 1, 2, 3)), (1, (0, 1, 2, 3)), (4, (0, 1, 2, 3)), (4, None)]),
    ("two nodes", [((0,), None, 0), ((1,), None, 0), ((2,), None, 1), ((3,), None, 1)], None, [(2, (0, 1)), (1, (0, 1)), (4, None)]),
    ("one core", [((0,), None, 0)], None, [(1, None)]),
]


def topology(cores: list[Any], quota: float | None) -> TopologyFacts:
    cpus = tuple(sorted(cpu for core in cores for cpu in core[0]))
    nodes = sorted({core[2] for core in cores})
    return TopologyFacts(online=cpus, allowed=cpus, cores=tuple(Core(cpus=c, kind=kind, node=node) for c, kind, node in cores),
                         smt=any(len(core[0]) > 1 for core in cores), nodes=tuple(NumaNode(node=n, cpus=cpus, memory_bytes=GIB) for n in nodes),
                         quota=CpuQuota(cpus=quota, source="cpu.max") if quota else None)


@pytest.mark.parametrize(("name", "cores", "quota", "want"), TOPOLOGIES, ids=[case[0] for case in TOPOLOGIES])
def test_candidates(name: str, cores: list[Any], quota: float | None, want: list[Any]) -> None:
    assert list(candidates(topology(cores, quota))) == want


def test_a_measured_placement_confines_the_worker_and_another_does_not() -> None:
    hybrid = topology(TOPOLOGIES[3][1], None)
    on_p, everywhere = threads(2, 40, cpus="0-3"), threads(4, 30)
    assert choose_threads(hybrid, Settings(), (on_p, everywhere)).cpus == (0, 1, 2, 3)
    assert choose_threads(hybrid, Settings(), (on_p, threads(4, 60))).cpus is None
    assert choose_threads(hybrid, Settings(), (on_p, threads(4, 60))).count == 4


# ---- the rest of the plan -------------------------------------------------------------------------------------------


def variant(name: str, tok: float, prompt: float = 100, **more: Any) -> Trial:
    return trial(WEIGHTS, {"threads": 16, "kernel": "native", "variant": name, "route": "own"}, tok=tok, prompt=prompt, **more)


def noisy(what: Trial, name: str, high: float) -> Trial:
    """The trial whose best repeat of a figure was so high."""
    return dataclasses.replace(what, figures={**what.figures, name: dataclasses.replace(what.figures[name], high=high)})


VARIANTS = [  # name, trials, self-test's left out, forced variant ("" = the kernel's own choice)
    ("the preferred is as fast", [variant("avx512-vnni", 40), variant("avx512", 40.5), variant("avx2", 30)], (), ""),
    ("a lower one is faster", [variant("avx512-vnni", 30), variant("avx2", 40)], (), "avx2"),
    ("as fast at one row, faster at prompts", [variant("avx512-vnni", 40, 50), variant("avx2", 40, 100)], (), "avx2"),
    ("one that died", [variant("avx512-vnni", 0, failure="SIGILL: unsafe here"), variant("avx512", 50), variant("avx2", 40)], (), ""),
    ("one that its self-test left out", [variant("avx512-vnni", 30), variant("avx512", 30), variant("avx2", 40)], ("avx2: wrong results",), ""),
    ("one alone", [variant("avx2", 40)], (), ""),
    ("faster within the spread, slower at prompts", [noisy(variant("avx512-vnni", 36, 250), "tok/s", 40), variant("avx2", 39, 100)], (), ""),
]


@pytest.mark.parametrize(("name", "trials", "left_out", "want"), VARIANTS, ids=[case[0] for case in VARIANTS])
def test_instruction_sets(name: str, trials: list[Trial], left_out: tuple[str, ...], want: str) -> None:
    plan = planned(record(*trials), kernel_trial=KernelTrial(variant="avx512-vnni", left_out=left_out))
    assert plan.full.env.get("APPLIANCE_KERNEL", "") == want
    assert "APPLIANCE_KERNEL" not in planned(record(*trials, stale=("x",))).full.env
    assert planned(record(*trials), kernel="avx512").full.env["APPLIANCE_KERNEL"] == "avx512"


def worker(tok: float, prompt: float = 100, four: float = 100, **settings: Any) -> Trial:
    base = {"threads": 16, "batch_tokens": 512, "block": 32, "compile": False, "kernel": "native"}
    return trial(SERVED, {**base, **settings}, tok=tok, prompt=prompt, four=four)


def test_batch_and_block_leave_their_defaults_only_for_something_clearly_faster() -> None:
    near = record(worker(40), worker(40.5, batch_tokens=1024), worker(41, block=64))
    plan = planned(near)
    assert (flag(plan, "--max-num-batched-tokens"), flag(plan, "--block-size")) == ("512", "32")
    assert chosen(plan, "batch tokens").evidence.startswith("measured: 512: 40.0 tok/s")
    far = record(worker(40), worker(40, 200, batch_tokens=1024), worker(50, block=64))
    plan = planned(far)
    assert (flag(plan, "--max-num-batched-tokens"), flag(plan, "--block-size")) == ("1024", "64")
    assert plan.full.kv_bytes % 64 == 0


def test_a_default_whose_best_repeat_is_as_fast_stays() -> None:
    """As measured beside other programs: a median of 31.3 tok/s whose best repeat was 39."""
    found = record(noisy(worker(31.3, 234, 90), "tok/s", 39), worker(36.5, 230, 90, batch_tokens=1024))
    assert flag(planned(found), "--max-num-batched-tokens") == "512"


def flag(plan: Plan, name: str) -> str:
    return plan.full.argv[plan.full.argv.index(name) + 1]


def test_a_measured_batch_never_costs_context() -> None:
    far = record(worker(40), worker(40, 400, batch_tokens=2048))
    for ceiling in (2, 3, 4, 16):
        host = with_ceiling(HOST, ceiling * GIB)
        with_it, without = planned(far, host), planned(None, host)
        if without.refused is None:
            assert with_it.full.context == without.full.context


def test_compiling_is_left_where_it_was_measured_to_be_slower() -> None:
    gemma = golden_plans.load_model(next((golden_plans.PLANS / "models").glob("*.json")))
    model = dataclasses.replace(gemma, architecture="Gemma2ForCausalLM", digest=MODEL.digest)

    def plan(*trials: Trial, **settings: Any) -> Plan:
        return make_plan(HOST, model, Settings(**settings), PLACES, measured=record(*trials))

    slower, faster = (record_of_compiling(on=on, off=off) for on, off in ((20, 40), (40, 20)))
    assert "--enforce-eager" not in plan().full.argv
    assert "--enforce-eager" in plan(*slower).full.argv
    assert chosen(plan(*slower), "compile").evidence == "measured: off: 40.0 tok/s, prompts 100 tok/s, on: 20.0 tok/s, prompts 100 tok/s"
    assert "--enforce-eager" not in plan(*faster).full.argv
    assert "--enforce-eager" not in plan(*slower, compile=True).full.argv  # the operator's word wins
    assert "--enforce-eager" in plan(*faster, compile=False).full.argv


def record_of_compiling(*, on: float, off: float) -> tuple[Trial, ...]:
    return worker(on, compile=True), worker(off, compile=False)


def gemm_route(route: str, kernel: str = "native", **figures: float) -> Trial:
    return trial(WEIGHTS, {"threads": 16, "kernel": kernel, "variant": "", "route": route}, **figures)


AMX = with_ceiling(read_host(HOSTS / "spr-amx"), 16 * GIB)
TYPES = [  # name, bf16 and fp32 prompt figures, the variable
    ("nothing measured", (), None), ("bf16 is faster", (300, 100), None), ("as fast", (100, 102), None), ("fp32 is faster", (100, 180), "fp32"),
]


@pytest.mark.parametrize(("name", "speeds", "want"), TYPES, ids=[case[0] for case in TYPES])
def test_the_type_of_the_library_gemm(name: str, speeds: tuple[float, ...], want: str | None) -> None:
    found = record(*(gemm_route(route, "aten", prompt=speed) for route, speed in zip(("bf16", "fp32"), speeds, strict=False)))
    plan = planned(found, AMX, kernel="aten")
    assert plan.full.env.get("APPLIANCE_GEMM") == want
    assert chosen(plan, "kernel, many rows").value.startswith(f"dequantize to {want or 'bf16'} ")
    assert "APPLIANCE_GEMM" not in planned(found, with_ceiling(read_host(HOSTS / "avx2-vm"), 16 * GIB), kernel="aten").full.env


OVERTAKES = [  # name, own, library, rows
    ("from the start", {"r8": 100, "r64": 200, "prompt": 300}, {"r8": 200, "r64": 400, "prompt": 900}, "8"),
    ("for many rows", {"r8": 100, "r64": 200, "prompt": 300}, {"r8": 50, "r64": 400, "prompt": 900}, "64"),
    ("not clearly", {"r8": 100, "r64": 200, "prompt": 300}, {"r8": 50, "r64": 204, "prompt": 900}, "256"),
    ("never", {"r8": 100, "r64": 200, "prompt": 300}, {"r8": 500, "r64": 400, "prompt": 290}, "0"),
]


@pytest.mark.parametrize(("name", "own", "library", "rows"), OVERTAKES, ids=[case[0] for case in OVERTAKES])
def test_rows_from_which_an_amx_host_takes_the_library(name: str, own: dict[str, float], library: dict[str, float], rows: str) -> None:
    found = record(gemm_route("own", **own), gemm_route("bf16", **library))
    plan = planned(found, AMX)
    assert plan.full.env["APPLIANCE_LIBRARY_ROWS"] == rows
    assert ("library GEMM in bf16" in chosen(plan, "kernel, many rows").reason) == (rows != "0")
    assert "APPLIANCE_LIBRARY_ROWS" not in planned(found).full.env  # no AMX here
    assert "APPLIANCE_LIBRARY_ROWS" not in planned(record(gemm_route("own", **own)), AMX).full.env
    assert "from 64 rows on" in chosen(planned(None, AMX), "kernel, many rows").reason


ROUTES = [  # name, host, kernel, canary, full, routes of each order
    ("the native kernel has its own way", HOST, "native", False, False, []),
    ("unless everything is wanted", HOST, "native", False, True, [("own", "fp32")]),
    ("or tiles may beat it", AMX, "native", False, False, [("own", "bf16", "fp32")]),
    ("torch's kernel without bf16", HOST, "aten", False, False, []),
    ("with bf16", AMX, "aten", False, False, [("own", "bf16", "fp32")]),
    ("and a canary: what may die goes alone", AMX, "aten", True, False, [("own", "bf16", "fp32"), ("int4",)]),
]


@pytest.mark.parametrize(("name", "host", "kernel", "canary", "full", "want"), ROUTES, ids=[case[0] for case in ROUTES])
def test_ways_for_many_rows_are_tried_where_the_plan_goes_by_them(name: str, host: Any, kernel: str, canary: bool, full: bool, want: list[Any]) -> None:
    what = Subject(host=host, here=host, model=dataclasses.replace(MODEL, kept=()), settings=Settings(), kernels=("native", "aten"), kernel=kernel, stored=Path("/x"), prepared=None, trial=None)
    found = list(orders.routes(what, canary=canary, full=full, budget_s=0.1))
    assert [tuple(order["routes"]) for order, _ in found] == want
    rows = {row for order, _ in found for row in order["rows"]}
    assert not found or {1, 256} <= rows  # `own` replaces the trial of threads, which has these


def aten(route: str, **figures: float) -> Trial:
    return trial(WEIGHTS, {"threads": 16, "kernel": "aten", "variant": "", "route": route}, **figures)


def fewer_threads(what: Trial) -> Trial:
    return dataclasses.replace(what, settings={**what.settings, "threads": 8})


CANARIES = [  # name, trials, threshold
    ("nothing known", [], 2),
    ("faster, but no canary", [aten("own", tok=40, r8=20, prompt=90), aten("int4", tok=40, r8=200, prompt=80)], 2),
    ("canary died", [trial(CANARY, {}, failure="SIGILL: unsafe here"), aten("own", tok=40, r8=20), aten("int4", tok=40, r8=200)], 2),
    ("canary passed, faster up to 64 rows", [trial(CANARY, {}), aten("own", tok=40, r8=20, r64=100, prompt=300),
                                              aten("int4", tok=40, r8=200, r64=150, prompt=200)], 65),
    ("faster than with fewer threads proves nothing", [trial(CANARY, {}), fewer_threads(aten("own", tok=20, r8=10)), aten("own", tok=40, r8=20),
                                                       aten("int4", tok=40, r8=15)], 2),
    ("canary passed, but slower", [trial(CANARY, {}), aten("own", tok=40, r8=20), aten("int4", tok=40, r8=10)], 2),
]


@pytest.mark.parametrize(("name", "trials", "want"), CANARIES, ids=[case[0] for case in CANARIES])
def test_case_003_only_a_canary_lifts_the_safety_rule(name: str, trials: list[Trial], want: int) -> None:
    plan = planned(record(*trials), kernel="aten")
    assert plan.full.quantization["dequant_threshold"] == want
    assert {rung.quantization["dequant_threshold"] for rung in plan.rungs[1:]} == {2}
    assert planned(record(*trials, stale=("x",)), kernel="aten").full.quantization["dequant_threshold"] == 2
    assert {rung.quantization["dequant_threshold"] for rung in planned(record(*trials)).rungs} == {2}


def test_charts_say_how_near_the_memory_is() -> None:
    reads = [trial(BANDWIDTH, {"threads": count}, gb=gb) for count, gb in ((1, 10), (2, 20), (4, 20.2))]
    found = record(*reads, threads(2, 100, 1000), threads(4, 101, 900))
    size = charts.bytes_per_token(MODEL)
    points = charts.roofline(found, MODEL)
    assert [point.rows for point in points] == [1, 256]
    assert points[0].share == pytest.approx(101 * size / 20e9)
    said = list(charts.lines(found, MODEL))
    assert any("2 threads" in line and "20.0 GB/s" in line for line in said)
    assert chosen(planned(found), "read bandwidth").value == "20.0 GB/s"
    assert json.loads(json.dumps(said)) == said


def test_a_record_without_figures_draws_nothing() -> None:
    assert list(charts.lines(record(), MODEL)) == []
    assert charts.roofline(record(threads(2, 100)), MODEL) == []


def test_a_png_is_drawn_or_says_what_is_missing(tmp_path: Path) -> None:
    reads = [trial(BANDWIDTH, {"threads": count}, gb=gb) for count, gb in ((1, 10), (2, 20))]
    found, file = record(*reads, threads(1, 60, 500), threads(2, 100, 1000)), tmp_path / "tune.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib is not installed"):
            charts.write_png(found, MODEL, file)
    else:
        charts.write_png(found, MODEL, file)
        assert file.read_bytes().startswith(b"\x89PNG")


# ---- what figures decide, by name -----------------------------------------------------------------------------------

AMX_ROWS = (gemm_route("own", r8=100, r64=200, prompt=300), gemm_route("bf16", r8=200, r64=400, prompt=900))
DECIDED = [  # name, trials, more of the plan, what was decided otherwise than by rules
    ("nothing measured", (), {}, {}),
    ("the rule is right", (threads(16, 40), threads(8, 30)), {}, {}),
    ("fewer threads", (threads(16, 30), threads(8, 40)), {}, {"threads": 8}),
    ("the operator's word", (threads(16, 30), threads(8, 40)), {"cpu": Cpu(threads=16)}, {}),
    ("batch and block", (worker(40), worker(40, 200, batch_tokens=1024), worker(50, block=64)), {}, {"batch tokens": 1024, "block": 64}),
    ("an instruction set", (variant("avx512-vnni", 30), variant("avx2", 40)), {}, {"variant": "avx2"}),
    ("rows for tiles", AMX_ROWS, {"host": AMX}, {"library rows": "8"}),
    ("a type", (gemm_route("bf16", "aten", prompt=100), gemm_route("fp32", "aten", prompt=180)), {"host": AMX, "kernel": "aten"}, {"gemm": "fp32"}),
]


@pytest.mark.parametrize(("name", "trials", "more", "want"), DECIDED, ids=[case[0] for case in DECIDED])
def test_what_figures_decide_otherwise_than_rules(name: str, trials: tuple[Trial, ...], more: dict[str, Any], want: dict[str, Any]) -> None:
    tuned = planned(record(*trials), **more).tuned
    assert tuned == want
    assert json.loads(json.dumps(tuned)) == tuned
    assert planned(record(*trials, stale=("x",)), **more).tuned == {}
    assert measured.decision(MODEL.digest, tuned) not in ("", measured.decision("another model", tuned))


def test_the_record_behind_a_decision_is_kept(tmp_path: Path) -> None:
    inputs = measured.inputs(HOST, microcode=None)
    fewer = dataclasses.replace(record(threads(16, 30), threads(8, 40)), inputs=inputs)
    tuned = planned(fewer).tuned
    archive.keep(tmp_path, fewer, digest=MODEL.digest, figures=tuned)
    archive.keep(tmp_path, record(), digest=MODEL.digest, figures={})
    found = archive.kept(tmp_path, HOST, digest=MODEL.digest, figures=tuned, root=Path("/nonexistent"))
    assert found == fewer
    assert planned(found).tuned == tuned
    assert archive.kept(tmp_path, HOST, digest="another", figures=tuned) is None
    assert archive.kept(tmp_path, HOST, digest=MODEL.digest, figures={}) is None
    assert len(list((tmp_path / "measured" / "served").iterdir())) == 1
    changed = archive.kept(tmp_path, INPUTS["kernel"](HOST), digest=MODEL.digest, figures=tuned, root=Path("/nonexistent"))
    assert changed is not None
    assert changed.stale
    for number in range(archive.KEPT + 5):
        archive.keep(tmp_path, fewer, digest=MODEL.digest, figures={"threads": number})
    assert len(list((tmp_path / "measured" / "served").iterdir())) == archive.KEPT


def test_what_the_operator_asked_for_is_remembered_until_it_has_passed(tmp_path: Path) -> None:
    assert archive.applied(tmp_path) == ""
    archive.apply(tmp_path, digest="m", figures={"threads": 1})
    assert archive.applied(tmp_path) == measured.decision("m", {"threads": 1})
    assert archive.names(tmp_path) == []
    archive.settled(tmp_path)
    archive.settled(tmp_path)
    assert archive.applied(tmp_path) == ""
