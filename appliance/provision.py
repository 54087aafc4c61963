"""What must be there before a worker can start: the model in the store, its weights laid out. Run as the agent's child.

    python -m appliance.provision < ORDER     one JSON object (see `Order`); JSON lines of events on standard output

A child, because it takes minutes and may be stopped at any moment: SIGTERM ends it and all it started, and no draft is
left. Does: add the embedded default model when the wanted one is not stored yet, make its prepared layout, measure
memory and threads where this host was not measured yet. Does not: plan, or choose a model. Raises nothing: the exit
code and an `error` event tell.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance import disk, settings
from appliance import repair as repairs
from appliance.directories import Directories
from appliance.errors import ApplianceError
from appliance.jobs import Event, ending_on_sigterm, worker_contract
from appliance.library import Recipe, add_model, prepare_model
from appliance.node import read_wanted, refuse_early
from appliance.report import reporting
from appliance.settings import DEFAULT_MODEL, Parsed
from appliance.store import Store
from appliance.tune import first


@dataclass(frozen=True, kw_only=True)
class Order:
    """`model`: name in the store; `digest`: the object itself, where it is known (then nothing is added);
    `repair`: what a fault made suspect, checked and made anew: `cache` or `weights`; `refused`: figures that were given
    up, each by its `measured.decision`; in their place those behind `figures` count."""

    model: str
    digest: str | None
    settings: Mapping[str, Any]
    directories: Mapping[str, str]
    worker_python: str
    repair: str = ""
    refused: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def provision(order: Order, *, env: Mapping[str, str], on_event: Callable[[Event], None]) -> Mapping[str, Any]:
    """Make model and layout present and see that they are whole. Returns `{digest, cached, seconds, note, mended,
    versions, figures, given_up}`; `mended` is a sentence on damage that was found, `figures` what measurements decide
    for this model and these settings (`Plan.tuned`), None where that is not known now; `given_up` what they would
    decide if that had not failed before, None where it has not.

    Raises what adding the model raises, ModelError for a damaged model that cannot be made again.
    """
    began = time.monotonic()
    wanted = settings.from_tree(order.settings, origin="order")
    places = Directories(**{name: Path(path) for name, path in order.directories.items()})
    parsed = Parsed(settings=wanted, warnings=(), sources={})
    refuse_early(parsed, places, order.worker_python, env=env)
    store = Store(places.store)
    cached = True
    if order.repair == "cache":
        on_event({"event": "phase", "phase": "clearing", "note": ""})
        for folder in places.cache.iterdir():
            disk.delete(folder)
    if order.digest is not None:
        digest = order.digest
    elif order.model in store.names() or order.model != DEFAULT_MODEL:
        digest = store.pointed(order.model)
    else:
        added = add_model(order.model, name=order.model, recipe=Recipe(), store=store, directories=places,
                          worker_python=lambda: order.worker_python, on_event=on_event, env=env, now=time.time(),
                          worker_env=wanted.worker.env)
        digest, cached = added.digest, added.cached
    mended = repairs.ensure_whole(
        store, digest, order.model, kernel=wanted.kernel, state=places.state, every_byte=order.repair == "weights",
        tools=repairs.Tools(worker_python=lambda: order.worker_python, on_event=on_event, env=env,
                            worker_env=wanted.worker.env, now=time.time()))
    note = ""
    try:
        prepare_model(digest, kernel=wanted.kernel, store=store, worker_python=lambda: order.worker_python,
                      on_event=on_event, env=env, worker_env=wanted.worker.env, verified=True)
    except ApplianceError as error:
        note = f"the weights cannot be laid out ({error.line}); the worker packs them in memory; "
    if order.digest is None and not order.repair:  # a start after a fault is not held up
        note += first.measure(parsed, places, order.worker_python, env=env, model_name=order.model, digest=digest,
                              on_event=on_event)
    versions, figures, given_up = _planned(parsed, places, order, digest, env=env)
    return {"digest": digest, "cached": cached, "seconds": time.monotonic() - began, "note": note.rstrip("; "),
            "mended": mended, "versions": versions, "figures": figures, "given_up": given_up}


def _planned(parsed: Parsed, places: Directories, order: Order, digest: str, *,
             env: Mapping[str, str]) -> tuple[Mapping[str, str], Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The worker's versions, what measurements decide, what was given up. ConfigError when it cannot be asked."""
    try:
        node, given_up = read_wanted(parsed, places, order.worker_python, env=env, model_name=order.model,
                                     digest=digest, refused=order.refused, good=order.figures)
    except (ApplianceError, OSError):  # the agent meets it again, and says so
        return worker_contract(order.worker_python, env=env)["versions"], None, None
    return node.versions, None if node.plan.refused else node.plan.tuned, given_up


def main() -> int:
    try:
        order = Order(**json.load(sys.stdin))
    except (ValueError, TypeError):
        print("usage: python -m appliance.provision < ORDER", file=sys.stderr)
        return 2
    with ending_on_sigterm():  # what it has started ends with it, and no draft is left
        return reporting(
            lambda emit: provision(order, env=os.environ, on_event=lambda event: emit(dict(event))), noun="model")


if __name__ == "__main__":
    sys.exit(main())
