"""The gateway before two nodes with real vLLM and the default model, under load while one of them is hurt. The order counts:
each test begins with what the one before left, and `upgrade` is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ansible import balanced
from tests.ansible.balanced import NODES, Balanced, hurt_under_load
from tests.ansible.fleet import BOOT_S
from tests.system.testhost.host import Host

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def gateway(haproxy: Path, served_layer: str, served_releases: Path, served_variables: dict[str, Any], make_host: Callable[..., Host],
            tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    folder = tmp_path_factory.mktemp("gateway")
    with balanced.balanced(folder, make_host, haproxy, served_layer, served_releases, served_variables) as made:
        made.put_up().ok()
        yield made


@pytest.mark.parametrize(("hurt", "begun"), [
    (balanced.drain, 0), (balanced.restart, 0), (balanced.kill_engine, 4), (balanced.kill_host, 4), (balanced.powercut, 4), (balanced.upgrade, 0)])
def test_load_while_a_node_is_hurt(gateway: Balanced, hurt: balanced.Hurt, begun: int) -> None:
    for name in NODES:
        gateway.wait_for(name, "UP", timeout_s=120)
    load = hurt_under_load(gateway, hurt, drill=f"gateway, vLLM: {hurt.__name__}", back_s=BOOT_S, after_s=4, count=4, tokens=(10, 60), limit_s=240)
    assert load.lost(unbegun=True) == []
    assert len(load.lost()) <= begun, load.lost()
    assert load.kinds().get("refused", 0) == 0
