"""The golden plans: two models under five ceilings. `python -m tests.unit.golden_plans` writes them again.

tests/plans/models/*.json are ModelFacts as `read_model` gives them; tests/plans/MODEL-CEILING.json is what is planned on
the host folder avx2-vm with that ceiling and nothing else in memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.budget import GIB
from appliance.facts import HostFacts, KeptLayer, ModelFacts, to_json
from appliance.launch import Places
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host
from appliance.settings import Settings

TESTS = Path(__file__).parents[1]
PLANS = TESTS / "plans"
HOSTS = TESTS / "hosts"
HOST = "avx2-vm"
CEILINGS_GIB = (1, 2, 4, 8, 64)
PLACES = Places(model="/store/objects/model", cache="/cache/host", tmp="/cache/host/tmp", socket="/run/appliance/worker.sock",
                sockets="/run/appliance")


def models() -> dict[str, ModelFacts]:
    return {path.stem: load_model(path) for path in sorted((PLANS / "models").glob("*.json"))}


def load_model(path: Path) -> ModelFacts:
    raw: dict[str, Any] = json.loads(path.read_text())
    raw["kept"] = tuple(KeptLayer(**kept) for kept in raw["kept"])
    raw["largest_linear"] = tuple(raw["largest_linear"])
    return ModelFacts(**raw)


def with_ceiling(host: HostFacts, ceiling: int) -> HostFacts:
    memory = dataclasses.replace(host.memory, total_bytes=max(ceiling, host.memory.total_bytes or 0), available_bytes=ceiling,
                                 ceiling_bytes=ceiling, ceiling_source="/sys/fs/cgroup/appliance/memory.max", used_bytes=0)
    software = dataclasses.replace(host.software, compiler="/usr/bin/g++", python_headers="/usr/include/python3.11/Python.h",
                                   libnuma="/usr/lib/x86_64-linux-gnu/libnuma.so.1")
    return dataclasses.replace(host, memory=memory, software=software)


def cases() -> Iterator[tuple[str, Plan]]:
    host = read_host(HOSTS / HOST)
    for name, model in models().items():
        for ceiling in CEILINGS_GIB:
            yield f"{name}-{ceiling}GiB", make_plan(with_ceiling(host, ceiling * GIB), model, Settings(), PLACES)


def text(plan: Plan) -> str:
    return json.dumps(to_json(plan), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for case, plan in cases():
        (PLANS / f"{case}.json").write_text(text(plan))
        print(case, plan.refused.why if plan.refused else f"context {plan.full.context}, peak {plan.peak_bytes >> 20} MiB")
