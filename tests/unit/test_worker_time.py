"""What the worker's tree computes is seen wherever it computes: in its engine, in children of it, in those that ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.supervisor.worker import WorkerCommand, WorkerTree, end_session

BURN = "import time; end = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"
ENGINES = {
    "itself": BURN.format(seconds=60),
    "a long compiler": f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN.format(seconds=60)!r}])",
    "many short compilers": f"import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', {BURN.format(seconds=0.1)!r}])",
}


@pytest.fixture
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkerTree]:
    """An API process that sleeps, and an engine that runs the parameter's code."""
    leader = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {request.param!r}])"
    process = subprocess.Popen([sys.executable, "-c", leader], start_new_session=True)
    yield WorkerTree(process, WorkerCommand(python="", argv=(), env={}, log=tmp_path / "log", cwd=tmp_path, runtime=tmp_path))
    end_session(process.pid)
    process.wait()


def computed_s(tree: WorkerTree, seconds: float) -> float:
    """CPU seconds of the engine within `seconds`, after its start, looked at as the agent does: once a second."""
    time.sleep(1)
    first = last = tree.cpu_seconds()[1]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(1)
        last = max(last, tree.cpu_seconds()[1])
    return last - first


@pytest.mark.parametrize("tree", ENGINES.values(), ids=ENGINES, indirect=True)
def test_an_engine_that_computes_or_lets_compute_is_seen(tree: WorkerTree) -> None:
    assert computed_s(tree, 4) > 0.5


@pytest.mark.parametrize("tree", ["import time; time.sleep(60)"], ids=["idle"], indirect=True)
def test_an_engine_that_does_nothing_is_seen_too(tree: WorkerTree) -> None:
    assert computed_s(tree, 4) < 0.05
