"""Processes are known by pid, ticks since boot and boot: no clock, no later process can stand in for them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from appliance.identity import alive, identity, reused


def test_this_process_lives() -> None:
    assert alive(identity())
    assert not reused(identity())


def test_an_ended_process_does_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = identity(child.pid)
    assert alive(known)
    child.communicate()
    assert not alive(known)
    assert not reused(known), "nobody has the number yet"


@pytest.mark.parametrize("change", [{"ticks": 1}, {"boot": "another"}, {"pid": -5}, {"pid": 0}, {"pid": "x"}, {"pid": 1e400}, {"pid": True}])
def test_what_is_not_the_same_is_another(change: dict[str, Any]) -> None:
    known = {**identity(), **change}
    assert not alive(known)
    assert reused(known)


@pytest.mark.parametrize("nonsense", [None, 5, "x", [], {}, {"pid": os.getpid()}])
def test_nonsense_is_not_alive(nonsense: Any) -> None:
    assert not alive(nonsense)


def test_a_process_that_nobody_reaped_yet_does_not_live() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = identity(child.pid)
    assert alive(known)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(known)
    child.communicate()
