"""A prepared layout mapped into this process: one file, read-only, shared by every process that maps it.

Does: open the folder that `APPLIANCE_PREPARED` names, check that it belongs to the model, map it, bring it into
memory, hand out the weights of layers as views. Does not: pack, or know vLLM. Rules: the mapping cannot be written to,
so its pages are the page cache's and never anonymous memory, but where each of several engines needs a copy of its own
(`COPIED`); whatever is wrong with the folder is a reason and no error, and the layers are then packed in memory; a
layer gets a view only when its shape is exactly the stored one (tensor-parallel parts are not); what was handed out is
remembered, so that nobody reads the checkpoint's tensors of it.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from appliance.errors import ModelError
from appliance.kernels.prepare import object_digest
from appliance.kernels.registry import LayerShape
from appliance.prepared import INDEX, TABLE, WEIGHTS, Index, Run, index_refusal, read_index
from appliance.quantize.format import HEADS, TABLES

VARIABLE = "APPLIANCE_PREPARED"
COPIED = "APPLIANCE_COPIED"
"""Set: several engines lie on different NUMA nodes. The page cache holds the weights once, on whichever node first read
them, so each engine reads them into memory of its own, which lies on its own node."""
BLOCKED = "int4_blocked"
"""The parameter of a layer that holds its mapped weight; a weight packed in memory has the same name."""
POPULATE_READ = 22
"""MADV_POPULATE_READ (Linux 5.14): read and map now; an I/O error is an error here instead of SIGBUS later."""
CHUNK_BYTES = 64 << 20
SAY_EVERY_S = 5.0

Say = Callable[[str], None]


class Mapped:
    """One open prepared layout. `replaced`: the checkpoint's tensors that the handed out views stand for; `taken`:
    their runs."""

    def __init__(self, index: Index, data: mmap.mmap) -> None:
        self.index = index
        self.replaced: set[str] = set()
        self.taken: list[Run] = []
        self._data = data
        self._names = {run.name: run.name for run in index.runs}

    def rename(self, names: Callable[[list[str]], list[str]]) -> None:
        """Follow a model whose modules are not called as in the checkpoint: from now on layers ask by the new names.
        A name that `names` drops keeps the old one."""
        self._names = {name: (names([called]) or [called])[0] for name, called in self._names.items()}

    def find(self, prefix: str, shape: LayerShape) -> Tensor | None:
        """The weight of the layer that vLLM calls `prefix`: uint8 [bytes], read-only; None when it is not there."""
        run = self._run(prefix, shape.kind)
        if run is None or (run.n, run.k, run.group, run.bits) != (shape.n, shape.k, shape.group, shape.bits):
            return None
        self.replaced.update(run.replaces)
        self.taken.append(run)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._data, dtype=torch.uint8, count=run.bytes, offset=run.offset)

    def _run(self, prefix: str, kind: str) -> Run | None:
        """By name; several models give their embedding table no name or only the last part of one."""
        exact = [run for run in self.index.runs if run.kind == kind and prefix in (self._names[run.name], run.name)]
        if exact or kind != TABLE:
            return exact[0] if exact else None
        names = HEADS if prefix.rpartition(".")[2] in HEADS else TABLES
        found = [run for run in self.index.runs if run.kind == TABLE and run.name.rpartition(".")[2] in names]
        return found[0] if len(found) == 1 else None


def open_prepared(env: Mapping[str, str], model: Path, say: Say) -> Mapped | None:
    """The prepared layout for the model folder `model`, in memory; None, after one sentence to `say`, without one."""
    folder = env.get(VARIABLE)
    if not folder:
        say("no prepared weights are given; packing in memory")
        return None
    try:
        copied = bool(env.get(COPIED))
        began = time.monotonic()
        mapped = _open(Path(folder), model, say if copied else None)
        if not copied:
            _populate(mapped, say)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    except ModelError as error:
        reason = error.line
    else:
        how = "copied" if copied else "mapped"
        say(f"weights {how} from {folder}: {mapped.index.bytes / 1e6:.0f} MB in {time.monotonic() - began:.1f} s")
        return mapped
    say(f"the prepared weights in {folder} cannot be used ({reason}); packing in memory")
    return None


def _open(folder: Path, model: Path, say: Say | None) -> Mapped:
    """Map the file; with `say` read a copy of it into this process's own memory instead."""
    index, broken = read_index((folder / INDEX).read_text("utf-8"))
    with open(folder / WEIGHTS, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        reason = index_refusal(index, source=object_digest(model), weights_bytes=size) if index else broken
        if index is None or reason:
            raise ModelError(f"{INDEX} cannot be used", why=reason or broken)
        if say is not None:
            return Mapped(index, _copy(file, size, say))
        return Mapped(index, mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))


def _copy(file: BinaryIO, size: int, say: Say) -> mmap.mmap:
    """The file's bytes in anonymous memory, which the memory policy of this process places."""
    data, said = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), time.monotonic()
    with memoryview(data) as view:
        for first in range(0, size, CHUNK_BYTES):
            last = min(size, first + CHUNK_BYTES)
            if file.readinto(view[first:last]) != last - first:  # type: ignore[attr-defined]  # a buffered reader
                raise ModelError("the weights cannot be used", why="the file is shorter than it was")
            said = _say_progress(last, size, said, say)
    return data


def _populate(mapped: Mapped, say: Say) -> None:
    """Read the whole file into the page cache and into this process's page tables."""
    data, said = mapped._data, time.monotonic()
    for first in range(0, len(data), CHUNK_BYTES):
        length = min(CHUNK_BYTES, len(data) - first)
        try:
            data.madvise(POPULATE_READ, first, length)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel: read ahead, and fault on first use
                raise
            data.madvise(mmap.MADV_WILLNEED)
            return
        said = _say_progress(first + length, len(data), said, say)


def _say_progress(done: int, size: int, said: float, say: Say) -> float:
    """A line when the last one is SAY_EVERY_S old; returns when the last one was said."""
    if time.monotonic() - said <= SAY_EVERY_S:
        return said
    say(f"reading the weights: {done / size:.0%} of {size / 1e6:.0f} MB")
    return time.monotonic()
