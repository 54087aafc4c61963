"""`applianctl bench` against a running agent with a fake worker."""

from __future__ import annotations

import json

from appliance import measured
from appliance.measured import BANDWIDTH, Record, Trial, figure
from appliance.tune import archive
from appliance.tune.requests import Streamed, percentile
from tests.process.conftest import Agent


def test_a_running_service_is_measured(agent: Agent) -> None:
    agent.serve()
    status = agent.ready()
    archive.save(agent.home / "state", Record(fingerprint=str(status["fingerprint"]), inputs={}, trials=(
        Trial(kind=BANDWIDTH, settings={"threads": 1}, figures={measured.GB_S: figure([10.0])}),)))
    done = agent.run("bench", "--tokens", "16", "--prompt", "64", "--streams", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["streams"], found["prompt tokens"], found["answer tokens"]) == (2, 64, 16)
    assert found["decode tok/s"] > 0
    assert found["prefill tok/s"] > 0
    assert 0 < found["first token p50 s"] <= found["first token p99 s"] < 30
    assert 0 <= found["between tokens p50 s"] <= found["between tokens p99 s"]
    assert found["share of roofline"] > 0
    assert found["roofline tok/s"] > found["decode tok/s"]
    text = agent.run("bench", "--tokens", "8", "--streams", "1").stdout
    assert "memory roofline" in text
    assert agent.status()["restarts"] == []


def test_without_a_service_there_is_nothing_to_measure(agent: Agent) -> None:
    done = agent.run("bench")
    assert (done.returncode, "not running" in done.stderr) == (69, True)


def test_figures_of_a_streamed_answer() -> None:
    answer = Streamed(pieces_s=(1.0, 1.5, 2.5), tokens=4, prompt_tokens=9)
    assert (answer.first_s, answer.decode_tok_s, answer.between_s) == (1.0, 2.0, [0.5, 1.0])
    assert [percentile([3, 1, 2], share) for share in (0.0, 0.5, 0.99)] == [1, 2, 3]
    assert percentile([], 0.5) == 0.0
