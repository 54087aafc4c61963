"""The arithmetic of the benchmarks: pairs, turns, and figures that cannot be right."""

from __future__ import annotations

import pytest

from tests.bench import client, machine
from tests.bench.report import cell
from tests.bench.serving import starved


def test_a_ratio_is_of_pairs_not_of_medians() -> None:
    ours, theirs = machine.Samples(values=(10.0, 20.0, 60.0)), machine.Samples(values=(10.0, 10.0, 20.0))
    assert machine.ratio(ours, theirs).values == (1.0, 2.0, 3.0)


def test_samples_that_do_not_pair_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="shorter"):
        machine.ratio(machine.Samples(values=(1.0, 2.0)), machine.Samples(values=(1.0,)))


def test_every_other_round_goes_backwards() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = machine.alternate({"a": lambda _: measure("a"), "b": lambda _: measure("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found["a"].values == (1.0, 4.0, 5.0)


@pytest.mark.parametrize(("streamed", "whole", "valid"), [(30.0, 28.0, True), (42.0, 28.0, True), (334.0, 6.2, False)])
def test_a_stream_faster_than_its_answer_is_reported(streamed: float, whole: float, valid: bool) -> None:
    speeds = {"decode tok/s": {"ours": {"median": streamed}}, "1 streams tok/s": {"ours": {"median": whole}}}
    assert (starved(speeds, "ours") is None) == valid


def test_prompts_have_their_length_and_share_nothing() -> None:
    first, second = client.prompt(32, 1), client.prompt(32, 2)
    assert len(first) == len(second) == 32
    assert first[0] != second[0]
    assert client.prompt(32, 1) == first


def test_a_cell_shows_the_spread() -> None:
    assert cell(machine.Samples(values=(1.0, 2.0, 4.0)).to_dict()) == "2.0 (1.0-4.0)"
    assert cell(None) == "-"
