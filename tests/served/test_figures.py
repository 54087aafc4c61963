"""False measurements on trial with real vLLM: they make the worker slow, or let it die, and what was before serves again.

`make test-chaos`. The record is edited, for true figures would not choose this; it is staged as `tune --apply` stages one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from appliance import client, measured, node
from appliance.cli.application import Application
from appliance.directories import AGENT_SOCKET, sockets
from appliance.measured import PREFILL_TOK_S, SERVED, STREAMS_TOK_S, TOK_S, WEIGHTS, Record, Trial, figure
from appliance.supervisor.worker import members
from appliance.tune import archive
from appliance.tune.subject import Subject, read_subject
from tests.process.clients import ask
from tests.served.conftest import WORKER, Served, environment, serve

pytestmark = [pytest.mark.served, pytest.mark.heavy]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = serve(tmp_path_factory.mktemp("figures") / "home", settings="trial_s: 5\nprobe_s: 3\n")
    yield service
    if service.process.poll() is None:
        service.stop()


def slow(subject: Subject) -> list[Trial]:
    """The slowest instruction set, as if it were the fastest."""
    return [trial(WEIGHTS, subject, {"threads": 2, "kernel": "native", "variant": variant, "route": "own"}, speed)
            for variant, speed in ((subject.variants[0], 10.0), ("scalar", 100.0))]


def dying(subject: Subject) -> list[Trial]:
    """A block that vLLM's attention on CPUs does not know."""
    return [trial(SERVED, subject, {"threads": 2, "batch_tokens": 512, "block": block, "compile": False, "kernel": "native"}, speed)
            for block, speed in ((32, 10.0), (48, 100.0))]


def trial(kind: str, subject: Subject, settings: Mapping[str, Any], speed: float) -> Trial:
    figures = {name: figure([speed * 0.99, speed, speed * 1.01]) for name in (TOK_S, PREFILL_TOK_S, STREAMS_TOK_S)}
    return Trial(kind=kind, model=subject.model.digest, settings=settings, figures=figures, at=time.time())


def environment_of(service: Served) -> str:
    return Path(f"/proc/{service.status()['worker_pid']}/environ").read_text()


CASES = [(slow, {"variant": "scalar"}, "% slower"), (dying, {"block": 48}, "")]


@pytest.mark.parametrize(("lie", "wanted", "says"), CASES, ids=["slow", "dying"])
def test_figures_that_are_false_give_way_to_those_before(served: Served, lie: Any, wanted: dict[str, Any], says: str) -> None:
    before = served.until(lambda s: bool(s["ready"] and s["trial"] is None and s["decode_tokens_per_s"]), timeout=300)
    app = Application(env=environment(served.home))
    subject = read_subject(app.parsed, app.directories, str(WORKER), env=os.environ)
    truth = archive.load(app.directories.state, subject.host)
    record = truth or Record(fingerprint=subject.host.fingerprint, inputs=measured.inputs(subject.host, microcode=archive.microcode(Path("/"))))
    places = node.places(app.directories, model_path=subject.stored, fingerprint=subject.host.fingerprint, prepared=subject.prepared)
    for one in lie(subject):
        record = record.having(one)
    figures = subject.plan(record, places).tuned
    assert wanted.items() <= figures.items()
    archive.save(app.directories.state, record)
    archive.apply(app.directories.state, digest=subject.model.digest, figures=figures)
    began = time.monotonic()
    client.command(sockets(served.home / "run") / AGENT_SOCKET, "reload")
    on_trial = served.until(lambda s: bool(s["trial"]), timeout=120)
    assert "on trial: measured " in on_trial["trial"]["sentence"]
    after = served.until(lambda s: bool(s["ready"] and s["trial"] is None and s["figures_given_up"]), timeout=400)
    print(f"\n{after['figures_given_up']}; back after {time.monotonic() - began:.0f} s")
    assert says in after["figures_given_up"]
    assert after["rolled_back"] is None, "what is served is what is wanted"
    assert (after["figures"], after["context"], after["rung"]) == (before["figures"], before["context"], "full")
    assert "APPLIANCE_KERNEL=scalar" not in environment_of(served)
    assert members(before["worker_pid"]) == []
    assert ask(served.port, tokens=8, stream=False, limit_s=60) == "answered"
    archive.save(app.directories.state, truth or Record(fingerprint=record.fingerprint, inputs=record.inputs))


def test_what_was_given_up_is_in_the_history(served: Served) -> None:
    events = [line.split()[2] for line in served.applianctl("history").stdout.splitlines()]
    assert events.count("rolled-back") == len(CASES)
    assert served.applianctl("chat", "The capital of France is").stdout
