"""What the role `gateway` writes of its nodes: weights from measured speed, limits, and what stays when a node is off."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "ansible/plugins/filter/gateway.py"
SPEC = importlib.util.spec_from_file_location("gateway_filter", PATH)
assert SPEC is not None
assert SPEC.loader is not None
gateway = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gateway)

WRITTEN = """backend nodes
  server n1 10.0.0.1:8000 weight 100 maxconn 19
  server n2 10.0.0.2:8000 weight 50 maxconn 19
backend light
  server n1 10.0.0.1:8000 track nodes/n1
"""


@pytest.mark.parametrize(("speeds", "before", "expected"), [
    ({"a": 40.0, "b": 20.0}, {}, {"a": 100, "b": 50}),
    ({"a": 40.0, "b": 0.1}, {}, {"a": 100, "b": 1}),
    ({"a": None, "b": None}, {}, {"a": 100, "b": 100}),
    ({"a": 40.0, "b": 20.0, "c": None}, {}, {"a": 100, "b": 50, "c": 75}),
    ({"a": 40.0, "b": 22.0}, {"a": 100, "b": 50}, {"a": 100, "b": 50}),
    ({"a": 40.0, "b": 30.0}, {"a": 100, "b": 50}, {"a": 100, "b": 75}),
    ({"a": 40.0, "b": None}, {"a": 100, "b": 50}, {"a": 100, "b": 50}),
    ({"a": 35.0, "b": 40.0}, {"a": 100, "b": 100}, {"a": 100, "b": 100}),
])
def test_weights(speeds: dict[str, float | None], before: dict[str, int], expected: dict[str, int]) -> None:
    assert gateway.weights(speeds, before, change_pct=20) == expected


@pytest.mark.parametrize(("node", "expected"), [
    ({"max_running": 4, "max_queued": 16}, {"maxconn": 19, "max_queued": 16, "weight": 100, "port": 8000}),
    ({"max_running": 4, "max_queued": 0}, {"maxconn": 4, "max_queued": 0}),
    ({}, {"maxconn": 23, "max_queued": 16}),
    ({"weight": 7, "port": 8443}, {"weight": 7, "port": 8443}),
    ({"address": "fd00::1"}, {"address": "[fd00::1]"}),
    ({"name": "node 1:x"}, {"name": "node_1_x"}),
])
def test_a_row(node: dict[str, Any], expected: dict[str, Any]) -> None:
    row = gateway.rows([{"name": "n", "address": "10.0.0.1", **node}])[0]
    assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -3.0, "", "fast", [1], 10**400], ids=["nan", "infinite", "negative", "empty", "text", "list", "huge"])
def test_what_is_no_speed_is_unknown(speed: object) -> None:
    nodes = [{"name": "n1", "address": "10.0.0.1", "decode_tokens_per_s": "40"}, {"name": "n2", "address": "10.0.0.2", "decode_tokens_per_s": speed}]
    assert [row["weight"] for row in gateway.rows(nodes, WRITTEN)] == [100, 50]


def test_a_node_that_is_off_stays_as_it_was_written() -> None:
    nodes = [{"name": "n1", "address": "10.0.0.1", "decode_tokens_per_s": 40.0, "max_running": 4, "max_queued": 16},
             {"name": "n2", "address": "10.0.0.2"}]
    assert [(row["weight"], row["maxconn"]) for row in gateway.rows(nodes, WRITTEN)] == [(100, 19), (50, 19)]
