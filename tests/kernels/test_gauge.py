"""The measuring child's gauges on small shapes: they measure what they say, and a wrong result is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.errors import ConfigError, TransientError
from appliance.gauge import canary, clock, memory, weights
from appliance.kernels.library import load

LAYERS = [{"n": 64, "k": 128, "group": 32, "bits": 4, "count": 3, "head": False}, {"n": 160, "k": 128, "group": 32, "bits": 4, "count": 1, "head": True}]


def figures(measure: Any, **order: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    measure({"budget_s": 0.01, **order}, events.append)
    assert [e["settings"] for e in events if e["event"] == "figure"] == [
        e["settings"] for e in events if e["event"] == "trying" and "rows" in e["settings"]] or measure is memory.measure
    return [event for event in events if event["event"] == "figure"]


def test_memory() -> None:
    found = figures(memory.measure, threads=[1, 2], mib=8)
    assert [one["settings"] for one in found] == [{"threads": 1}, {"threads": 2}]
    assert all(0.1 < value < 10000 for one in found for value in one["figures"]["GB/s"])


@pytest.mark.parametrize(("kernel", "routes"), [("aten", ["own", "fp32", "bf16", "int4"]), ("native", ["own", "fp32", "bf16"])])
def test_weights(kernel: str, routes: list[str]) -> None:
    if kernel == "native" and load().library is None:
        pytest.skip("the library is not built")
    found = figures(weights.measure, threads=[1], rows=[1, 8, 32], kernel=kernel, variants=[""], routes=routes, layers=LAYERS, mib=8, prepared="")
    assert [(one["settings"]["rows"], one["settings"]["route"]) for one in found] == [(rows, route) for rows in (1, 8, 32) for route in routes]
    assert all(value > 0 for one in found for value in one["figures"]["tok/s"])


def test_a_head_sees_all_rows_of_a_step_and_one_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, set[tuple[int, int]]] = {}
    rows = 0

    def multiply(x: torch.Tensor, step: weights.Step, out: torch.Tensor) -> None:
        seen.setdefault(rows, set()).add((x.shape[0], step.layer.n))

    monkeypatch.setattr(weights, "_multiply", lambda kernel, route: multiply)
    kernel = weights.kernel_named("aten")
    steps = list(weights._made_up(LAYERS, kernel, 1 << 20))
    for rows in (8, 64):
        weights._pass(kernel, steps, rows, "own")()
    assert seen == {8: {(8, 64), (8, 160)}, 64: {(64, 64), (1, 160)}}


def test_a_variant_that_this_machine_has_not_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the variant avx9000 cannot be measured"):
        weights.use("avx9000")


def test_prepared_weights_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be measured"):
        list(weights._mapped(tmp_path))


@pytest.mark.filterwarnings("ignore")  # importing vLLM warns of its own
def test_the_canary_passes_here_and_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures(canary.measure, threads=2, rows=[1, 7], times=2)
    assert [(one["settings"]["rows"], one["figures"]["passed"]) for one in found] == [(1, [2.0]), (7, [2.0])]
    monkeypatch.setattr(canary.Attention, "expected", lambda self: self().double() * 1.1)
    with pytest.raises(TransientError, match="attention, 1 rows, round 0"):
        figures(canary.measure, threads=2, rows=[1], times=1)


@pytest.mark.parametrize(("budget_s", "least", "most"), [(0.0, 1, 1), (0.001, 1, 200), (1.0, 3, 200)])
def test_repeats(budget_s: float, least: int, most: int) -> None:
    assert least <= len(clock.repeat(lambda: sum(range(1000)), budget_s=budget_s)) <= most
