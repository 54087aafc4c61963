"""PURE: the index of a prepared layout: which bytes of `weights.bin` are which layer, and what they replace.

A prepared layout is a folder `store/prepared/DIGEST-LAYOUT/` with one big file and this index beside it. The worker's
tool writes it, the agent's store keeps it, the worker maps it. Does: sizes, reading and writing the index's text,
saying why an index cannot be used. Does not: touch a file. Rules: the index carries a checksum over itself, so that
one read of a small file and one size tell whether a folder is usable; the portable checkpoint stays the source of
truth: an index that is not understood is simply not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from appliance import pieces
from appliance.quantize.format import group_refusal

SCHEMA = 1
LAYOUT_ID = "int4-b16-1"
"""Blocks of 16 channels. Raise the number with any change of the bytes: older folders then go by themselves."""
INDEX, WEIGHTS = "index.json", "weights.bin"
BLOCK = 16
"""Channels of one block."""
PAGE = 4096
"""Every run in `weights.bin` begins at a multiple of this."""
LINEAR, TABLE = "linear", "table"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One layer as the worker computes it: `bytes` bytes from `offset` on, N = `n` channels of `k` columns.

    `name` is the layer's name after fusion (`...qkv_proj`); `replaces` are the checkpoint's tensors that nobody needs
    to read any more. A table's `n` is its padded number of rows.
    """

    name: str
    kind: str
    offset: int
    bytes: int
    n: int
    k: int
    group: int
    bits: int
    replaces: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A quantized layer that this layout cannot take, and why; the worker packs it in memory."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """`source`: the digest of the stored object; `bytes`, `sha256` and `pieces` are those of `weights.bin`."""

    source: str
    bytes: int
    sha256: str
    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]
    pieces: tuple[str, ...] = ()
    layout: str = LAYOUT_ID


def folder_name(digest: str, layout: str = LAYOUT_ID) -> str:
    """The name of a prepared folder below `store/prepared`."""
    return f"{digest}-{layout}"


def record_bytes(group: int, bits: int) -> int:
    """Bytes of one block of 16 channels in one group of columns: codes, scales, zeros."""
    return BLOCK * group * bits // 8 + 2 * 2 * BLOCK


def run_bytes(n: int, k: int, group: int, bits: int) -> int:
    """Bytes of a whole weight [n, k]; channels are padded to whole blocks."""
    return -(-n // BLOCK) * (k // group) * record_bytes(group, bits)


def layout_refusal(k: int, group: int, bits: int) -> str | None:
    """Why the layout cannot hold a weight of these columns, or None."""
    if bits not in (4, 8):
        return f"codes of {bits} bits"
    if reason := group_refusal(group):
        return reason
    if k % group:
        return f"{k} columns are not whole groups of {group}"
    return None


def write_index(index: Index) -> str:
    """The text of index.json."""
    body = {"schema": SCHEMA, **asdict(index)}
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1) + "\n"


def read_index(text: str) -> tuple[Index | None, str]:
    """The index, or None and why this text is none."""
    try:
        raw = json.loads(text)
        schema, layout, checksum = raw.pop("schema"), raw["layout"], raw.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, "it is not readable"
    if schema != SCHEMA or layout != LAYOUT_ID:
        return None, f"it is schema {schema}, layout {layout}; this release reads {SCHEMA}, {LAYOUT_ID}"
    if checksum != _checksum({"schema": schema, **raw}):
        return None, "its checksum is wrong"
    try:
        runs = tuple(Run(**{**run, "replaces": tuple(run["replaces"])}) for run in raw.pop("runs"))
        left_out = tuple(LeftOut(**entry) for entry in raw.pop("left_out"))
        digests = tuple(str(one) for one in raw.pop("pieces", ()))
        return Index(**raw, runs=runs, left_out=left_out, pieces=digests), ""
    except (KeyError, TypeError):
        return None, "a field is missing or unknown"


def index_refusal(index: Index, *, source: str, weights_bytes: int) -> str | None:
    """Why this index does not serve the object `source` with a `weights.bin` of that size, or None."""
    if index.source != source:
        return f"it was made from another model ({index.source[:12]})"
    if index.bytes != weights_bytes:
        return f"{WEIGHTS} has {weights_bytes} bytes, recorded {index.bytes}"
    if len(index.pieces) != pieces.count(index.bytes):
        return f"it does not have a digest for each piece of {WEIGHTS}"
    for run in index.runs:
        if run.bytes != run_bytes(run.n, run.k, run.group, run.bits) or run.offset % PAGE:
            return f"the entry of {run.name} contradicts itself"
        if run.offset + run.bytes > index.bytes:
            return f"{run.name} ends beyond {WEIGHTS}"
    return None


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
