"""The arithmetic of the benchmarks: pairs, turns, and figures that cannot be right."""

from __future__ import annotations

import pytest

from tests.bench import client, machine, soak
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


@pytest.mark.parametrize(("per_hour", "minutes", "bad"), [(1.0, 23, False), (10.0, 23, True), (10.0, 2, False), (100.0, 2, True), (-50.0, 23, False)])
def test_growth_is_judged_by_its_slope_and_noise_of_a_short_run_is_not(per_hour: float, minutes: int, bad: bool) -> None:
    samples = [{"at": 10.0 * n, "agent pss MiB": 40 + per_hour * 10 * n / 3600} for n in range(6 * minutes)]
    slope = soak.growth_per_hour(samples, "agent pss MiB")
    assert slope == pytest.approx(per_hour)
    assert bool(soak.verdict({"agent pss MiB": slope}, minutes / 60, 0, 0)) == bad
    assert soak.growth_per_hour(samples[:3], "agent pss MiB") is None


def test_a_restart_or_an_unexpected_outcome_speaks_against_a_service_that_does_not_grow() -> None:
    assert soak.verdict({"agent fds": 0.0}, 0.5, 0, 0) == []
    assert len(soak.verdict({"agent fds": 0.0}, 0.5, 2, 3)) == 2
