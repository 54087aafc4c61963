"""What a life makes of damage: a layout that it maps ends it, a file that it does not need any more is a warning."""

from __future__ import annotations

import time

import pytest

from appliance.board import Traffic
from appliance.patrol import Walked
from appliance.supervisor.health import Answer
from appliance.supervisor.life import PATROL_S, Life


class Worker:
    pid = 1

    def status(self) -> int | None:
        return None

    def new_log_lines(self) -> list[str]:
        return []

    def cpu_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


def live(found: Walked, *, running: int = 0) -> tuple[Life, list[float]]:
    """A life that has served for a while; the moments at which it went on patrol."""
    walks: list[float] = []
    now = 0.0

    def patrol() -> Walked:
        walks.append(now)
        return found

    life = Life(worker=Worker(), listening=lambda: True, counters=lambda: None, traffic=lambda: Traffic(running=running, chunks_total=int(now)),
                answer=lambda timeout_s, tokens: Answer(text="Paris", tokens=tokens, seconds=0.1), oom_kills=lambda: 0,
                slowed=lambda: 0, patrol=patrol, probe_s=5.0, began=0.0)
    while now < 3 * PATROL_S and life.fault is None:
        now += 1.0
        life.tick(now)
        time.sleep(0.002)  # the background threads
    return life, walks


def test_a_whole_store_is_read_now_and_then() -> None:
    life, walks = live(Walked())
    assert life.fault is None
    assert life.worn == ""
    assert 1 <= len(walks) <= 3


def test_nobody_patrols_while_requests_run() -> None:
    _, walks = live(Walked(), running=1)
    assert walks == []


def test_a_damaged_layout_ends_the_worker() -> None:
    life, _ = live(Walked(layout=("weights.bin: contents changed",)))
    assert life.fault is not None
    assert (life.fault.name, life.fault.repair, life.state) == ("damaged-weights", "weights", "failed")
    assert "weights.bin: contents changed" in life.fault.sentence


def test_a_damaged_model_is_a_warning_while_its_layout_serves() -> None:
    life, _ = live(Walked(model=("config.json: contents changed",)))
    assert life.fault is None
    assert life.worn.startswith("the stored model is damaged: config.json: contents changed; ")


@pytest.mark.parametrize("model", [(), ("config.json: gone",)])
def test_damage_of_both_is_the_layouts(model: tuple[str, ...]) -> None:
    life, _ = live(Walked(layout=("weights.bin: gone",), model=model))
    assert life.fault is not None
