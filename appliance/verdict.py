"""What adding a model would mean here, before it is made: bytes to fetch and to store, peak memory, fits or not.

Judges an outline (`python -m appliance.quantize --outline`): the stored model as it will be, with headers and no data.
Does: ask the outline's child, read the facts, plan. Does not: print, fetch, or change the store. Rules: every refusal
that can be known is collected, the one that ends an `add` first; free memory that others hold for the moment refuses
nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import jobs
from appliance.budget import show
from appliance.draft import Draft
from appliance.errors import ApplianceError, ModelError, StoreError, TransientError
from appliance.facts import ModelFacts
from appliance.importing.source import Source, read_config
from appliance.plan import Plan
from appliance.probe.model import read_model
from appliance.quantize.layers import refuse_architecture
from appliance.sources import Sources, held_bytes
from appliance.store import HEADROOM_BYTES, Store

Planner = Callable[[ModelFacts], Plan]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`files`: name -> size of all that is read; `fetch_bytes` of them are still to come. `stored_bytes`: the object;
    `layout_bytes`: its prepared layout, 0 where none is made. `plan` None: it could not be made."""

    source: str
    files: Mapping[str, int]
    fetch_bytes: int
    stored_bytes: int
    layout_bytes: int
    free_bytes: int
    facts: ModelFacts | None
    plan: Plan | None
    refusals: tuple[ApplianceError, ...]
    warnings: tuple[str, ...]

    @property
    def needed_bytes(self) -> int:
        """Disk that adding takes at its highest: fetched files, the object, the layout."""
        return self.fetch_bytes + self.stored_bytes + self.layout_bytes

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "source": self.source, "files": dict(self.files), "fetch_bytes": self.fetch_bytes,
            "stored_bytes": self.stored_bytes, "layout_bytes": self.layout_bytes, "free_bytes": self.free_bytes,
            "needed_bytes": self.needed_bytes, "architecture": self.facts.architecture if self.facts else None,
            "parameters": self.facts.parameters if self.facts else None,
            "bits_per_weight": self.facts.bits_per_weight if self.facts else None,
            "context": plan.full.context if plan is not None and plan.rungs else None,
            "peak_bytes": plan.peak_bytes if plan is not None and plan.rungs else None,
            "usable_bytes": plan.usable_bytes if plan is not None else None,
            "refusals": [{"exit_code": one.exit_code, "line": one.line} for one in self.refusals],
            "warnings": list(self.warnings),
        }


def outline(source: Source, draft: Draft, recipe: Mapping[str, Any], *, worker_python: str, env: Mapping[str, str],
            on_event: Callable[[jobs.Event], None], worker_env: Mapping[str, str] | None = None) -> Path:
    """The stored model that a source would become, as an outline in the draft. Raises ModelError as adding would."""
    if source.kind != "gguf":
        refuse_architecture(read_config(source.path), source.path)
    if source.kind == "cpu_int4":
        return source.path
    out = draft.scratch / "outline"
    out.mkdir()
    jobs.run_job(
        worker_python, ("-m", "appliance.quantize", str(source.path.absolute()), str(out), "--recipe",
                        json.dumps(dict(recipe)), "--outline"),
        on_event=on_event, env=jobs.job_env(env, home=draft.scratch, extra=worker_env), cwd=draft.scratch,
        keep_open=(draft.lock_fd,),
    )
    return out


def judge(outlined: Path, *, source: str, name: str, files: Mapping[str, int], fetch_bytes: int, store: Store,
          planner: Planner, layout: bool) -> Verdict:
    """Weigh an outline against this node. `layout`: a prepared layout will be made as well."""
    stored = sum(file.stat().st_size for file in outlined.iterdir() if file.is_file())
    free = shutil.disk_usage(store.root).free
    refusals: list[ApplianceError] = []
    warnings: list[str] = []
    if refusal := disk_refusal(fetch_bytes + stored, free, store):
        refusals.append(refusal)
    elif fetch_bytes + stored * (2 if layout else 1) + HEADROOM_BYTES > free:
        warnings.append("no room for the kernels' layout: the worker packs the weights in memory at each start")
    facts, plan = None, None
    try:
        facts = read_model(outlined, name=name, digest="0" * 64)
        plan = planner(facts)
    except ModelError as error:
        refusals.insert(0, ModelError(f"{source} cannot be served", why=error.why or error.what, do=error.do))
    if plan is not None and plan.refused is not None:
        refused = plan.refused.error()
        if isinstance(refused, TransientError):
            warnings.append(refused.line)
        else:
            refusals.append(refused)
    return Verdict(source=source, files=dict(files), fetch_bytes=fetch_bytes, stored_bytes=stored,
                   layout_bytes=stored if layout else 0, free_bytes=free, facts=facts, plan=plan,
                   refusals=tuple(refusals), warnings=tuple(warnings))


def disk_refusal(need_bytes: int, free_bytes: int, store: Store) -> StoreError | None:
    """Why this does not go on the store's disk, or None."""
    if need_bytes + HEADROOM_BYTES <= free_bytes:
        return None
    held = held_bytes(Sources(store.root))
    also = f" ({show(held)} are held by unfinished fetches: `applianctl store gc`)" if held else ""
    return StoreError(
        f"the disk of {store.root} is too full",
        why=f"about {show(need_bytes)} and {show(HEADROOM_BYTES)} of headroom are needed, {show(free_bytes)} are free",
        do=f"free some space{also}, or set `store` to another disk")
