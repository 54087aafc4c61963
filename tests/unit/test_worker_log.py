"""The worker's log is cut while the worker writes: bounded, its last half kept, no line lost to the agent."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.supervisor import worker
from appliance.supervisor.worker import WorkerCommand, WorkerTree

LIMIT = 64 * 1024


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerTree]:
    monkeypatch.setattr(worker, "LOG_BYTES", LIMIT)
    process = subprocess.Popen(["sleep", "60"])
    yield WorkerTree(process, WorkerCommand(python="", argv=(), env={}, log=tmp_path / "worker.log", cwd=tmp_path, runtime=tmp_path))
    process.kill()
    process.wait()


def test_the_last_half_of_a_log_that_is_cut_stays(tree: WorkerTree) -> None:
    log, kept = tree.command.log, tree.command.log.with_suffix(".log.1")
    written, read, cuts = 0, [], 0
    with open(log, "ab", buffering=0) as writer:  # as the worker's own descriptor: appending
        while cuts < 3:
            for _ in range(20):
                writer.write(b"%063d\n" % written)
                written += 1
            read += [int(line) for line in tree.new_log_lines()]
            if log.stat().st_size == 0:
                cuts += 1
                assert kept.stat().st_size == LIMIT // 2, "half of it, not the last few lines"
                assert [int(line) for line in kept.read_text().splitlines()][-1] == written - 1
            assert log.stat().st_size <= LIMIT + 20 * 64
    assert read == list(range(written))
