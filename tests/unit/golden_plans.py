"""The golden plans. `python -m tests.unit.golden_plans` writes them again.

tests/plans/models/*.json are ModelFacts as `read_model` gives them. tests/plans/MODEL-CEILING.json is the whole plan of a
model on the host folder avx2-vm with that ceiling and nothing else in memory; tests/plans/hosts/HOST.json is what matters
of the plans of every model on a host folder as it is, one line a model.
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
WHOLE = ("smollm2", "llama-1b")
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
        for ceiling in CEILINGS_GIB if name in WHOLE else ():
            yield f"{name}-{ceiling}GiB", make_plan(with_ceiling(host, ceiling * GIB), model, Settings(), PLACES)


def text(plan: Plan) -> str:
    return json.dumps(to_json(plan), indent=1, sort_keys=True) + "\n"


def hosts() -> dict[str, Path]:
    """Every host folder by name."""
    return {path.parent.name: path.parent for path in sorted(HOSTS.glob("*/expect.json"))}


def zoo(folder: Path) -> dict[str, Plan]:
    """The plans of all models on a host folder, weights prepared."""
    host, places = read_host(folder), dataclasses.replace(PLACES, prepared="/store/prepared/model")
    return {name: make_plan(host, model, Settings(), places) for name, model in models().items()}


def gist(plan: Plan) -> dict[str, Any]:
    """Of a plan what an operator would ask for."""
    if plan.refused:
        return {"refused": plan.refused.exit_code, "what": plan.refused.what, "why": plan.refused.why, "do": plan.refused.do}
    chosen = {choice.name: choice for choice in plan.choices}
    full, usable = plan.full, plan.usable_bytes or 0
    return {
        "tier": plan.tier, "kernel": chosen["kernel, one row"].value, "threads": full.threads,
        "cpus": chosen["cpus"].value if "cpus" in chosen else None,
        **({"engines": chosen["engines"].value, "why": chosen["engines"].reason} if "engines" in chosen else {}), "running": full.running, "context": full.context,
        "cache": chosen["key/value cache"].reason, "cache_mib": full.kv_bytes >> 20,
        "batch": chosen["batch tokens"].value, "compile": chosen["compile"].value,
        "peak": f"{plan.peak_bytes >> 20} of {usable >> 20} MiB in {plan.peak_phase}",
        "ceiling": chosen["memory ceiling"].evidence, "more": chosen["with 1 GiB more"].value if "with 1 GiB more" in chosen else None,
        "rungs": " ".join(rung.id for rung in plan.rungs), "because": chosen["threads"].reason,
    }


def zoo_text(plans: dict[str, Plan]) -> str:
    lines = [f" {json.dumps(name)}: {json.dumps(gist(plan))}" for name, plan in plans.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    for case, plan in cases():
        (PLANS / f"{case}.json").write_text(text(plan))
        print(case, plan.refused.why if plan.refused else f"context {plan.full.context}, peak {plan.peak_bytes >> 20} MiB")
    folder = PLANS / "hosts"
    folder.mkdir(exist_ok=True)
    for stale in set(folder.glob("*.json")) - {folder / f"{name}.json" for name in hosts()}:
        stale.unlink()
    for name, path in hosts().items():
        (folder / f"{name}.json").write_text(zoo_text(zoo(path)))


if __name__ == "__main__":
    main()
