"""A stored model that is damaged: made again from its source, or refused with what would help.

Does: look before a model is served (`ensure_whole`), quantize again from the recorded source (`repair_model`). Does
not: find damage by itself (`appliance.patrol`, `Store.verify`), or choose another model. Rules: a source counts only if
its digest, read anew, gives the key of the damaged object; the new object takes the old one's place at one moment and
only when it is whole; a layout made before goes with the damaged object; what cannot be repaired is never served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance import jobs, manifest, patrol
from appliance.digests import source_digest
from appliance.errors import ApplianceError, ModelError, StoreError
from appliance.hub.reference import is_hub
from appliance.importing.source import Source, inspect
from appliance.library import NATIVE, Recipe, convert, estimate_bytes, recorded, resolve
from appliance.settings import DEFAULT_MODEL
from appliance.sources import Sources
from appliance.store import Store, damaged

OTHERWISE = "give its source with --source, or import a bundle of it"


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What a repair needs of its surroundings; see `library.add_model`."""

    worker_python: Callable[[], str]
    on_event: Callable[[jobs.Event], None]
    env: Mapping[str, str]
    worker_env: Mapping[str, str]
    now: float

    def phase(self, phase: str) -> None:
        self.on_event({"event": "phase", "phase": phase, "note": ""})


def ensure_whole(store: Store, digest: str, name: str, *, kernel: str, state: Path, every_byte: bool,
                 tools: Tools) -> str:
    """Look at a model before it is served: sizes, checksums and a bounded part of its bytes; all of them after a
    finding, with `every_byte`, and where a layout is to be made of them (`kernel`: the setting). Returns what was
    mended, in one sentence, or nothing. Raises ModelError for a damaged model that cannot be made again."""
    to_lay_out = kernel in ("auto", NATIVE) and store.prepared(digest) is None
    if not every_byte and not to_lay_out:
        found = patrol.walk(store, digest, place=state / patrol.FILE, most_bytes=patrol.START_BYTES,
                            seconds=patrol.START_S)
        if not found.model and not found.layout:
            return ""
    tools.phase("verifying")
    if findings := store.verify(digest):
        try:
            return repair_model(store, digest, name, source=None, tools=tools)
        except ModelError as error:
            do = f"run `applianctl model repair {name} --source SOURCE`, or import a bundle of it"
            raise damaged(name, f"{findings[0]}; it cannot be made again: {error.why or error.what}", do=do) from None
    finding = store.prepared_finding(digest, contents=True)
    if finding is None or not store.prepared_folder(digest).is_dir():
        return ""
    try:
        store.discard_prepared(digest)
    except StoreError:
        if store.prepared(digest) is not None:  # it would be mapped
            raise
        return f"its laid out weights cannot be used ({finding}), and the store cannot be written"
    return f"its laid out weights could not be used ({finding}) and are made again"


def repair_model(store: Store, digest: str, name: str, *, source: str | None, tools: Tools) -> str:
    """Make a damaged object again from `source`, else from the recorded one. Returns a sentence, or nothing for a model
    that is whole. Raises ModelError where it is not possible, or what the quantizing child ended with; the store is
    then unchanged."""
    findings = store.verify(digest)
    if not findings:
        return ""
    said, _ = manifest.read(store.root / "objects" / digest)
    origin = source or said.get("source") or (DEFAULT_MODEL if name == DEFAULT_MODEL else None)
    if origin is None:
        raise _refused(name, "its manifest is damaged, so its source is not known", OTHERWISE)
    if said and not manifest.made_by_these_rules(said):
        raise _refused(name, "another release made it, by other rules of quantizing",
                       f"remove it and add {origin} again, or import a bundle of it")
    found, digest_of_source = _read(store, name, origin, tools)
    recipe = dict(said["recipe"]) if said else _usual_recipe(found)
    if manifest.key(digest_of_source, recipe) != digest:
        raise _refused(name, f"{origin} is not what it was made from" + ("" if said else ", or the recipe was another"),
                       OTHERWISE)
    bits = recipe.get("table_bits")
    need = estimate_bytes(found, table_bits=bits if isinstance(bits, int) else None)
    with jobs.ending_on_sigterm(), store.begin(digest, need_bytes=need,
                                               on_wait=lambda: tools.phase("waiting")) as draft:
        report = convert(found, recipe, draft, worker_python=tools.worker_python(), on_event=tools.on_event,
                         env=tools.env, worker_env=tools.worker_env)
        if said and "origin" in said["report"]:
            report["origin"] = said["report"]["origin"]
        tools.phase("storing")
        created = datetime.fromtimestamp(tools.now, UTC).isoformat(timespec="seconds")
        store.commit(draft, source=said.get("source") or recorded(origin), source_digest=digest_of_source,
                     recipe=recipe, report=report, created=said.get("created") or created, replace=True)
    store.discard_prepared(digest)
    return f"the stored model was damaged ({findings[0]}) and was made again from {origin}"


def source_path(store: Store, origin: str, *, env: Mapping[str, str]) -> Path:
    """Where the files of a recorded source lie. What came from the Hub is here if it was kept; nothing is fetched.
    Raises ModelError."""
    if not is_hub(origin):
        return resolve(origin, env=env)
    if found := Sources(store.root).find(origin):
        return found
    raise ModelError(f"{origin} is not kept here", do="give the path of its files, or add it with --keep-source")


def _read(store: Store, name: str, origin: str, tools: Tools) -> tuple[Source, str]:
    """The source and its digest: every byte is read, whatever was remembered."""
    try:
        found = inspect(source_path(store, origin, env=tools.env))
        tools.phase("checking")
        return found, source_digest(found, cache=None, now=tools.now, on_progress=lambda done, total: tools.on_event(
            {"event": "progress", "done_bytes": done, "total_bytes": total, "item": found.path.name}))
    except ApplianceError as error:
        why = f"its source cannot be used: {error.what}" + (f" ({error.why})" if error.why else "")
        raise _refused(name, why, OTHERWISE) from None


def _usual_recipe(found: Source) -> dict[str, Any]:
    return {"as_is": True} if found.kind == "cpu_int4" else Recipe().to_dict()


def _refused(name: str, why: str, do: str) -> ModelError:
    return ModelError(f"the model {name!r} cannot be repaired", why=why, do=do)
