"""Start a worker for a planned rung, and the life that watches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from appliance import patrol
from appliance.board import Traffic
from appliance.directories import Directories
from appliance.node import Node
from appliance.pieces import PIECE_BYTES
from appliance.plan import Rung
from appliance.probe.cgroup import read_oom_kills, read_slowed
from appliance.probe.tree import Tree
from appliance.store import Store
from appliance.supervisor import health, worker
from appliance.supervisor.leaf import Leaf
from appliance.supervisor.life import Life
from appliance.supervisor.several import EngineWatch

PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def start(node: Node, rung: Rung, *, directories: Directories, worker_python: str, env: Mapping[str, str],
          probe_s: float, traffic: Callable[[], Traffic], leaf: Leaf | None,
          now: float) -> tuple[worker.WorkerTree, Life]:
    """Raises StoreError when log or record cannot be written, ConfigError for an interpreter that cannot run;
    then nothing runs."""
    socket = Path(node.places.socket)
    tree = Tree(root=Path("/"))
    kills = leaf.oom_kills if leaf is not None else lambda: read_oom_kills(tree)
    before = kills()
    started = worker.start(worker.WorkerCommand(
        python=worker_python, argv=rung.argv, log=directories.state / "worker.log", cwd=Path(node.places.cache),
        env={"PATH": env.get("PATH") or PATH_DEFAULT, **rung.env}, runtime=directories.runtime, leaf=leaf))
    several = EngineWatch(len(rung.engines), started.engine_seconds) if rung.engines else None

    def answer(timeout_s: float, tokens: int) -> health.Answer | health.Busy | str:
        def ask(engine: int | None) -> health.Answer | health.Busy | str:
            return health.answer(socket, model=node.model.name, timeout_s=timeout_s, tokens=tokens, engine=engine)

        return several.ask(ask, time.sleep) if several is not None else ask(None)

    life = Life(
        engines=several, worker=started, probe_s=probe_s, began=now, traffic=traffic,
        listening=lambda: health.listening(socket), counters=lambda: health.counters(socket),
        answer=answer,
        oom_kills=lambda: _grown(before, kills()), slowed=lambda: read_slowed(tree),
        patrol=lambda: patrol.walk(Store(directories.store), node.model.digest, place=directories.state / patrol.FILE,
                                   most_bytes=PIECE_BYTES, seconds=1.0))
    return started, life


def _grown(before: int | None, now: int | None) -> int | None:
    """How much a counter grew; None where it cannot be read."""
    return None if before is None or now is None else now - before
