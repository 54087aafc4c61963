"""Throw-away hosts with the service installed. Everything here is skipped, with a reason, where hosts cannot be made."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import times
from tests.system.installation import WORKER_PACKAGES, host, make_layer
from tests.system.service import Service
from tests.system.testhost import base
from tests.system.testhost.host import sweep

BEGAN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.time()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.system)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = [row for row in times.read() if row["at"] >= config.stash[BEGAN]]
    if rows:
        terminalreporter.section("observed times (seconds)")
        for line in times.table(rows):
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def _hosts() -> None:
    if reason := base.missing():
        pytest.skip(reason)
    sweep()
    for layer in base.LAYERS.glob("appliance-*"):  # of a test run that was killed
        if not Path(f"/proc/{layer.name.rpartition('-')[2]}").exists():
            shutil.rmtree(layer)


@pytest.fixture(scope="session")
def fake_layer(_hosts: None) -> Iterator[str]:
    layer = make_layer("fake")
    yield layer
    shutil.rmtree(base.LAYERS / layer, ignore_errors=True)


@pytest.fixture(scope="session")
def real_layer(_hosts: None) -> Iterator[str]:
    if not WORKER_PACKAGES.is_dir():
        pytest.skip("the worker's environment is not installed: make test-worker")
    layer = make_layer("real")
    yield layer
    shutil.rmtree(base.LAYERS / layer, ignore_errors=True)


@pytest.fixture
def service(fake_layer: str) -> Iterator[Service]:
    """The service with the fake worker, installed and not started."""
    with host(fake_layer) as made:
        yield Service(made)


@pytest.fixture
def running(service: Service) -> Service:
    service.start()
    service.wait_ready()
    return service
