"""`python -m appliance.kernels.prepare SRC DST`: from a stored checkpoint to the layout that the native kernels map.

A pure file-to-file tool, run by the agent as a child with the worker's Python: SRC is an object of the store, DST an
absent or empty folder that will hold `weights.bin` and `index.json` (`appliance.prepared`). Every layer is one run of
bytes in the order in which vLLM computes it: q, k, v and gate, up stand together; a tied table stands once.

Rules: one block of rows in memory at a time; the file has its full size before the first weight is written, so a full
disk says so at once; DST appears by one rename after everything is on the disk, or not at all; a layer that the layout
cannot take is left out with the reason and is no error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ModelError, UsageError
from appliance.importing.safetensors import read_header
from appliance.importing.source import merge_headers, quantization_config, read_config, weight_files
from appliance.importing.tensors import StoredTensor, raw_rows
from appliance.pieces import Digests
from appliance.prepared import (
    BLOCK,
    INDEX,
    LAYOUT_ID,
    LINEAR,
    PAGE,
    TABLE,
    WEIGHTS,
    Index,
    LeftOut,
    Run,
    layout_refusal,
    run_bytes,
    write_index,
)
from appliance.quantize.format import FUSED, HEADS, PACKED, SCALE, TABLES, ZERO, Int4Config, parse_config
from appliance.report import Event, reporting

CHUNK_BYTES = 1 << 20
"""Packed codes worked on at once; about four times as much memory with the intermediates."""
VOCABULARY_PADDING = 64
"""vLLM pads the rows of tables and heads to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One quantized module of the checkpoint: its three tensors, where they are stored."""

    module: str
    packed: StoredTensor
    scale: StoredTensor
    zero: StoredTensor
    bits: int

    @property
    def n(self) -> int:
        return self.packed.shape[0]

    @property
    def k(self) -> int:
        return self.packed.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        return self.k // self.scale.shape[1]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run and the modules it is made of, in order."""

    run: Run
    parts: tuple[Part, ...]


def prepare(source: Path, target: Path, event: Event) -> dict[str, Any]:
    """Write the prepared folder of the stored object `source` as `target`; returns the report.

    Raises ModelError when the object cannot be used, UsageError when the target is not empty, OSError when the disk
    fails; then nothing is left.
    """
    event({"event": "phase", "phase": "preparing", "note": LAYOUT_ID})
    digest = object_digest(source)
    planned, left_out = plan_runs(source)
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty", do="give an empty or absent folder")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.mkdir()
    try:
        digests = _write_weights(draft / WEIGHTS, planned, event)
        index = Index(source=digest, bytes=digests.bytes, sha256=digests.whole, pieces=digests.pieces,
                      runs=tuple(p.run for p in planned), left_out=left_out)
        with open(draft / INDEX, "w", encoding="utf-8") as file:
            file.write(write_index(index))
            file.flush()
            os.fsync(file.fileno())
        _fsync(draft)
        draft.rename(target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return {"layout": LAYOUT_ID, "bytes": index.bytes, "layers": len(planned),
            "left_out": [{"name": entry.name, "reason": entry.reason} for entry in left_out]}


def object_digest(source: Path) -> str:
    """The digest that the object's manifest gives it. Raises ModelError where there is none."""
    try:
        digest = json.loads((source / "manifest.json").read_text("utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        digest = None
    if not isinstance(digest, str):
        raise ModelError(f"{source} is not an object of the store", why="its manifest.json gives no digest",
                         do="add the model with `applianctl model add`")
    return digest


def plan_runs(source: Path) -> tuple[tuple[Planned, ...], tuple[LeftOut, ...]]:
    """Which layers stand where in `weights.bin`, and which are left out and why."""
    config = read_config(source)
    raw = quantization_config(config)
    text = config.get("text_config")
    tied = (text if isinstance(text, Mapping) else config).get("tie_word_embeddings", False)
    parts = _parts(source, parse_config(raw if isinstance(raw, Mapping) else {}), tied=bool(tied))
    planned: list[Planned] = []
    left_out: list[LeftOut] = []
    offset = 0
    for name, members in _fused(parts):
        reason = _refusal(members)
        if reason:
            left_out.append(LeftOut(name=name, reason=reason))
            continue
        table = name.rpartition(".")[2] in TABLES + HEADS
        first, n = members[0], sum(part.n for part in members)
        n = -(-n // VOCABULARY_PADDING) * VOCABULARY_PADDING if table else n
        size = run_bytes(n, first.k, first.group, first.bits)
        replaces = tuple(f"{part.module}.{tensor}" for part in members for tensor in (PACKED, SCALE, ZERO))
        planned.append(Planned(parts=members, run=Run(
            name=name, kind=TABLE if table else LINEAR, offset=offset, bytes=size, n=n, k=first.k, group=first.group,
            bits=first.bits, replaces=replaces)))
        offset += -(-size // PAGE) * PAGE
    if not planned:
        raise ModelError(f"{source} has nothing to prepare", why="no 4-bit layer fits the layout",
                         do="serve it as it is")
    return tuple(planned), tuple(left_out)


def _parts(source: Path, config: Int4Config, *, tied: bool) -> dict[str, Part]:
    stored = {
        name: StoredTensor(name=name, file=file, offset=entry.offset, bytes=entry.bytes, shape=entry.shape,
                           kind=entry.dtype)
        for name, (file, entry) in merge_headers(source, {f: read_header(f) for f in weight_files(source)}).items()
    }
    found = {}
    for name, packed in stored.items():
        module = name.removesuffix(f".{PACKED}")
        if module == name or (tied and module.rpartition(".")[2] in HEADS):  # a tied head is never loaded
            continue
        try:
            scale, zero = stored[f"{module}.{SCALE}"], stored[f"{module}.{ZERO}"]
        except KeyError as error:
            raise ModelError(f"{source} is incomplete", why=f"{error.args[0]} is missing",
                             do="add the model again") from None
        found[module] = Part(module=module, packed=packed, scale=scale, zero=zero, bits=config.bits_of(module))
    return found


def _fused(parts: Mapping[str, Part]) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """Layer name as vLLM has it -> its modules in vLLM's order, in the checkpoint's order of layers."""
    fused = {part: (whole, members) for whole, members in FUSED.items() for part in members}
    for module in parts:
        parent, _, last = module.rpartition(".")
        prefix = f"{parent}." if parent else ""
        whole, members = fused.get(last, (last, (last,)))
        if not all(f"{prefix}{member}" in parts for member in members):
            yield module, (parts[module],)
        elif last == members[0]:
            yield f"{prefix}{whole}", tuple(parts[f"{prefix}{member}"] for member in members)


def _refusal(members: tuple[Part, ...]) -> str | None:
    first = members[0]
    if len({(part.k, part.group, part.bits) for part in members}) > 1:
        return "its parts have different columns, groups or bits"
    for part in members:
        if part.n % BLOCK and len(members) > 1:
            return f"{part.module} has {part.n} channels, not a multiple of {BLOCK}"
    return layout_refusal(first.k, first.group, first.bits)


def _write_weights(path: Path, planned: tuple[Planned, ...], event: Event) -> Digests:
    """Fill the file; returns its size and digests."""
    size = max(-(-(p.run.offset + p.run.bytes) // PAGE) * PAGE for p in planned)
    digests = Digests()
    with open(path, "xb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here, not at 90 %
        for p in planned:
            for block in itertools.chain(_blocks(p), (bytes(-p.run.bytes % PAGE),)):
                digests.update(block)
                rest = memoryview(block)
                while rest:
                    rest = rest[file.write(rest):]
                event({"event": "progress", "done_bytes": digests.bytes, "total_bytes": size, "item": p.run.name})
        if digests.bytes != size:
            raise AssertionError(f"{digests.bytes} bytes written, {size} planned")
        os.fsync(file.fileno())
    return digests


def _blocks(planned: Planned) -> Iterator[memoryview | bytes]:
    """The bytes of one run, a few blocks of channels at a time."""
    import torch

    from appliance.kernels import blocked
    from appliance.kernels.reference import Portable

    written = 0
    for part in planned.parts:
        step = max(1, CHUNK_BYTES // (BLOCK * part.packed.row_bytes)) * BLOCK
        for first in range(0, part.n, step):
            last = min(first + step, part.n)
            scale, zero = (raw_rows(t, first, last).view(torch.bfloat16) for t in (part.scale, part.zero))
            rows = Portable(packed=raw_rows(part.packed, first, last), scale=scale, zero=zero, bits=part.bits)
            data = memoryview(blocked.pack(rows).numpy())
            written += len(data)
            yield data
    yield bytes(planned.run.bytes - written)  # rows that pad a vocabulary


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m appliance.kernels.prepare")
    parser.add_argument("source", type=Path, help="an object of the store")
    parser.add_argument("target", type=Path, help="an absent or empty folder")
    args = parser.parse_args()
    return reporting(lambda event: prepare(args.source, args.target, event), noun="prepared layout")


if __name__ == "__main__":
    sys.exit(main())
