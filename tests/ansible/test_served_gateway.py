"""The gateway before two nodes with real vLLM and the default model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ansible import balanced
from tests.ansible.balanced import REAL_SETTINGS, Balanced
from tests.ansible.test_gateway import say
from tests.system.installation import WORKER_PACKAGES, make_layer
from tests.system.testhost.base import LAYERS
from tests.system.testhost.host import Host


@pytest.fixture(scope="module")
def gateway(needed: Path, make_host: Callable[..., Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    if not WORKER_PACKAGES.is_dir():
        pytest.skip("the worker's environment is not installed: make test-worker")
    source, folder = tmp_path_factory.mktemp("haproxy"), tmp_path_factory.mktemp("gateway")
    if reason := balanced.packages(source):
        pytest.skip(reason)
    layer = make_layer("real")
    try:
        with balanced.balanced(folder, make_host, source, layer, settings=REAL_SETTINGS, ready_s=280) as made:
            made.put_up().ok()
            yield made
    finally:
        shutil.rmtree(LAYERS / layer, ignore_errors=True)


@pytest.mark.parametrize(("hurt", "begun"), [("restart", 0), ("kill_engine", 4), ("powercut", 4)])
def test_load_while_a_node_is_hurt(gateway: Balanced, hurt: str, begun: int, record_property: Callable[[str, object], None]) -> None:
    node = gateway.node("n1")
    for name in balanced.NODES:
        gateway.wait_for(name, "UP", timeout_s=120)
    with gateway.load(count=4, tokens=(10, 60), limit_s=240) as load:
        time.sleep(5)
        at = time.monotonic()
        getattr(balanced, hurt)(node)
        gateway.join()
        if hurt.startswith("kill_"):
            gateway.wait_for("n1", "NOLB", "DOWN")
        node.wait_ready(180)
        gateway.wait_for("n1", "UP", timeout_s=60)
        back = time.monotonic() - at
        time.sleep(4)
    say(record_property, f"vLLM, {hurt}", load, back)
    assert load.lost(unbegun=True) == []
    assert len(load.lost()) <= begun, load.lost()
