"""Unit tests reach no network. (What a pure module may import is checked by test_layers.)"""

from __future__ import annotations

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"a unit test tried to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
