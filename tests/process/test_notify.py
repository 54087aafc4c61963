"""What systemd hears, on a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from appliance.supervisor.notify import Notifier


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(1)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def heard(listener: socket.socket) -> list[str]:
    listener.setblocking(False)
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


def test_what_is_said_and_that_no_child_can_say_it(systemd: socket.socket) -> None:
    notifier = Notifier(os.environ | {"WATCHDOG_USEC": "2000000"})
    assert "NOTIFY_SOCKET" not in os.environ
    for _ in range(2):
        notifier.status("loading")
    notifier.extend(90)
    notifier.ready()
    notifier.reloading()
    notifier.stopping()
    said = heard(systemd)
    assert said[:3] == ["STATUS=loading", "EXTEND_TIMEOUT_USEC=90000000", "READY=1"]
    assert said[3].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert int(said[3].rpartition("=")[2]) > 0
    assert said[4:] == ["STOPPING=1"]
    notifier.close()


@pytest.mark.parametrize("interval_s", [0.5, 2.0, 30.0])
def test_case_053_the_watchdog_is_fed_at_most_half_its_interval_apart(systemd: socket.socket, interval_s: float) -> None:
    notifier = Notifier(os.environ | {"WATCHDOG_USEC": str(int(interval_s * 1e6))})
    fed, now = [], 1000.0
    while now < 1000 + 10 * interval_s:
        notifier.feed(now)
        if heard(systemd) == ["WATCHDOG=1"]:
            fed.append(now)
        now += notifier.tick_s
    gaps = [b - a for a, b in pairwise(fed)]
    notifier.close()
    assert max(gaps) <= interval_s / 2


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # sdnotify's own socket
def test_a_dead_or_missing_socket_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    dead = Notifier(dict(os.environ))
    assert "does not answer" in dead.warning
    dead.ready()
    silent = Notifier({})
    assert (silent.warning, silent.listening, silent.watchdog_s) == ("", False, 0.0)
    silent.feed(1.0)


@pytest.mark.parametrize(("usec", "pid", "seconds"), [("x", "", 0), ("5000000", "1", 0), ("5000000", "", 5)])
def test_a_watchdog_meant_for_another_is_not_fed(usec: str, pid: str, seconds: float) -> None:
    env = {"WATCHDOG_USEC": usec} | ({"WATCHDOG_PID": pid} if pid else {})
    assert Notifier(env).watchdog_s == seconds
