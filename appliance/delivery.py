"""A model of the Hub on its way into the store: surveyed, judged, fetched, added.

Does: run the child that speaks with the Hub, keep what it fetches in `store/sources/`, refuse before the first large
byte. Does not: speak with the Hub, quantize, or print. Rules: the commit that was found is the one that is fetched and
recorded; a model of the same commit, endpoint and recipe that is stored already is not fetched again; whatever
interrupts a fetch, what has come stays for the next one; after a successful add the fetched files go.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import jobs, manifest
from appliance.directories import Directories, ensure
from appliance.draft import Draft
from appliance.errors import ApplianceError, UsageError
from appliance.hub.access import Access, token_pipe
from appliance.hub.orders import Order
from appliance.hub.reference import Reference, parse, suggested_name
from appliance.importing.source import inspect
from appliance.library import Added, Recipe, add_model, default_name
from appliance.sources import Held, Sources, key_of
from appliance.store import Store, check_name
from appliance.verdict import Planner, Verdict, judge, outline

SMALL = (".json", ".txt", ".model", ".jinja")
"""What a survey fetches whole; all else it only outlines."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a reference means now. `main`: the first GGUF file, empty for a folder. `folder`: the outlined source."""

    reference: Reference
    files: Mapping[str, Mapping[str, Any]]
    main: str
    folder: Path
    contents: str

    @property
    def key(self) -> str:
        return key_of(self.reference.repo, self.reference.revision, self.reference.file)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(said["bytes"]) for name, said in self.files.items()}


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Everything that bringing a model takes; `on_event` gets the events of its jobs. `patience`: fields of `Order`
    that say how long to try."""

    access: Access
    store: Store
    directories: Directories
    worker_python: Callable[[], str]
    env: Mapping[str, str]
    on_event: Callable[[jobs.Event], None]
    planner: Planner
    layout: bool
    worker_env: Mapping[str, str] | None = None
    patience: Mapping[str, Any] | None = None

    def judge(self, source: str, *, name: str | None, recipe: Recipe) -> Verdict:
        """What adding `source` would mean; fetches headers and small files only. Raises what makes that impossible."""
        with self._surveyed(parse(source)) as (survey, draft):
            return self._judge(survey, draft, name or hub_name(source), recipe)

    def add(self, source: str, *, name: str | None, recipe: Recipe, keep_source: bool, even_so: bool,
            now: float) -> Added:
        """Fetch and add. `even_so`: also where this node's memory will not serve it.

        Raises what a verdict refuses before anything large is fetched, and else what `library.add_model` raises.
        """
        began = time.monotonic()
        wanted = parse(source)
        chosen = name if name is not None else hub_name(source)
        check_name(chosen)
        settled = self._settled(recipe)
        if str(wanted) in settled:  # a commit: nobody need be asked
            return self._there(settled[str(wanted)], name, chosen, began)
        with jobs.ending_on_sigterm(), self._surveyed(wanted, settled) as (survey, draft):
            canonical = str(survey.reference)
            if digest := settled.get(canonical) or settled.get(survey.contents):
                return self._there(digest, name, chosen, began)
            self._refuse_name(None, name, chosen)
            sources = Sources(self.store.root)
            with sources.hold(survey.key, on_wait=lambda: self._phase("waiting")) as held:
                keep_source = keep_source or sources.kept(survey.key)
                if digest := self._settled(recipe).get(canonical):  # added by another process while this one waited
                    if not keep_source:
                        sources.finish(held)
                    return self._there(digest, name, chosen, began)
                self._refuse(survey, held, draft, chosen, recipe, even_so=even_so)
                self._fetch(sources, survey, held, draft, keep_source=keep_source)
                added = add_model(
                    canonical, name=chosen, recipe=recipe, store=self.store, directories=self.directories,
                    worker_python=self.worker_python, on_event=self.on_event, env=self.env, now=now,
                    worker_env=self.worker_env, path=held.path / survey.main,
                    origin={"endpoint": self.access.endpoint, "asked": source, "contents": survey.contents},
                )
                if not keep_source:
                    sources.finish(held)
        return Added(name=added.name, digest=added.digest, cached=added.cached, seconds=time.monotonic() - began)

    @contextlib.contextmanager
    def files(self, source: str) -> Iterator[Path]:
        """The files of a model of the Hub, fetched for as long as the block lasts (or found, where they were kept)."""
        with jobs.ending_on_sigterm(), self._surveyed(parse(source)) as (survey, draft):
            sources = Sources(self.store.root)
            with sources.hold(survey.key, on_wait=lambda: self._phase("waiting")) as held:
                kept = sources.kept(survey.key)
                self._fetch(sources, survey, held, draft, keep_source=kept)
                yield held.path / survey.main
                if not kept:
                    sources.finish(held)

    def _fetch(self, sources: Sources, survey: Survey, held: Held, draft: Draft, *, keep_source: bool) -> None:
        for file in survey.folder.iterdir():
            if file.suffix in SMALL and not (held.path / file.name).exists():
                shutil.move(file, held.path / file.name)
        sources.describe(held, source=str(survey.reference), commit=survey.reference.revision, files=survey.files,
                         kept=keep_source)
        self._run("fetch", survey.reference, held.path, draft, (held.lock_fd,))

    def _there(self, digest: str, name: str | None, chosen: str, began: float) -> Added:
        self._refuse_name(digest, name, chosen)
        if self.store.names().get(chosen) != digest:
            self.store.point(chosen, digest)
        return Added(name=chosen, digest=digest, cached=True, seconds=time.monotonic() - began)

    @contextlib.contextmanager
    def _surveyed(self, wanted: Reference, settled: Collection[str] = ()) -> Iterator[tuple[Survey, Draft]]:
        ensure(self.store.root)
        self.store.sweep()
        with self.store.begin(f"survey-{secrets.token_hex(8)}") as draft:
            said = self._run("survey", wanted, draft.folder, draft, (), settled=tuple(settled))
            yield Survey(reference=wanted.at(said["commit"], said["file"]), files=said["files"], main=said["main"],
                         folder=draft.folder, contents=said["contents"]), draft

    def _judge(self, survey: Survey, draft: Draft, name: str, recipe: Recipe, *, present: int = 0) -> Verdict:
        found = inspect(survey.folder / survey.main)
        asked = {} if found.kind == "cpu_int4" else recipe.to_dict()
        outlined = outline(found, draft, asked, worker_python=self.worker_python(), env=self.env,
                           on_event=self.on_event, worker_env=self.worker_env)
        return judge(outlined, source=str(survey.reference), name=name, files=survey.sizes,
                     fetch_bytes=max(0, sum(survey.sizes.values()) - present), store=self.store, planner=self.planner,
                     layout=self.layout)

    def _refuse(self, survey: Survey, held: Held, draft: Draft, name: str, recipe: Recipe, *, even_so: bool) -> None:
        present = sum(file.stat().st_size for file in held.path.iterdir() if file.is_file())
        verdict = self._judge(survey, draft, name, recipe, present=present)
        for refusal in verdict.refusals:
            if not (even_so and refusal.exit_code in (76, 77)):
                raise _before_the_fetch(refusal, verdict)

    def _run(self, work: str, reference: Reference, folder: Path, draft: Draft, keep_open: tuple[int, ...], *,
             settled: tuple[str, ...] = ()) -> dict[str, Any]:
        access = self.access
        order = Order(endpoint=access.endpoint, repo=reference.repo, revision=reference.revision, file=reference.file,
                      folder=str(folder.absolute()), known=str(Sources(self.store.root).root.absolute()),
                      settled=settled, rate_bytes_s=access.rate_bytes_s, **(self.patience or {}))
        token = token_pipe(access.token)
        try:
            return jobs.run_job(
                self.worker_python(), ("-m", "appliance.hub", work, order.text(), str(token)), on_event=self.on_event,
                env=jobs.job_env(self.env, home=draft.scratch, extra={**access.network, "HF_HUB_OFFLINE": "0"}),
                cwd=draft.scratch, keep_open=(draft.lock_fd, token, *keep_open),
            )
        finally:
            os.close(token)

    def _settled(self, recipe: Recipe) -> dict[str, str]:
        """Reference, and digest of contents -> object, of what came from this endpoint and was made by this recipe, and
        is whole by its sizes."""
        found = {}
        for digest in self.store.digests():
            if not self.store.has(digest):
                continue
            said = self.store.read(digest).manifest
            origin = said["report"].get("origin", {})
            made = {manifest.key(said["source_digest"], chosen) for chosen in (recipe.to_dict(), {"as_is": True})}
            if origin.get("endpoint") == self.access.endpoint and digest in made:
                found[str(said["source"])] = found[str(origin.get("contents"))] = digest
        return found

    def _refuse_name(self, digest: str | None, name: str | None, chosen: str) -> None:
        """A name that nobody chose may not take the place of another model, or of another commit."""
        held = self.store.names().get(chosen)
        if name is not None or held in (None, digest) or not self.store.has(str(held)):
            return
        source = str(self.store.read(str(held)).manifest["source"])
        raise UsageError(f"the name {chosen} belongs to {source}", do="give --name; the same name replaces it")

    def _phase(self, phase: str) -> None:
        self.on_event({"event": "phase", "phase": phase, "note": ""})


def hub_name(source: str) -> str:
    """The name that a model of the Hub gets where none is given."""
    return default_name(suggested_name(parse(source)))


def _before_the_fetch(refusal: ApplianceError, verdict: Verdict) -> ApplianceError:
    """The same error, saying that nothing was fetched for it."""
    do = refusal.do + ("; or add it with --force for another node" if refusal.exit_code in (76, 77) else "")
    return type(refusal)(f"{verdict.source} was not fetched: {refusal.what}", why=refusal.why, do=do.lstrip("; "))
