"""Unit tests reach no network. (What a pure module may import is checked by test_layers.)"""

from __future__ import annotations

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:  # a file, not a network
            raise AssertionError(f"a unit test tried to connect to {address}")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", refuse)
