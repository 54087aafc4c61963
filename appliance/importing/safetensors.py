"""Safetensors headers: read with bounds and checked against the file, without touching the data.

It reads the JSON header of one file and nothing else; `appliance.importing.tensors` reads the data.
Rules: at most 25 MB of header is read whatever the file claims, and no name may stand in it twice; the tensors must lie
one after the other and end exactly at the end of the file; shape x element size must equal the stored bytes. What is
wrong is told by the file's first bytes (an LFS pointer, a web page, a GGUF file with the wrong name), one line each.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ModelError

MAX_HEADER_BYTES = 25_000_000
"""The format allows 100 MB, which take 1 GB to parse; a shard with 100,000 tensors has 12."""
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
}
FETCH = "download the file again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file: `offset` counts from the start of the file, `bytes` is its stored size."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def foreign_content(path: Path) -> str | None:
    """What a model file is when its first bytes belong to something else, or None: an LFS pointer, a web page, nothing.

    Raises ModelError when the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(128)
            file.seek(0, 2)
            size = file.tell()
    except OSError as error:
        raise ModelError(f"{path} cannot be read", why=str(error.strerror), do="check its permissions") from None
    if not start:
        return "it is empty (0 bytes)"
    if start.startswith(b"version https://git-lfs"):
        return f"it is a Git LFS pointer of {size} bytes, not the weights"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, not a model file"
    return None


def read_header(path: Path) -> dict[str, Entry]:
    """Tensor name -> entry, in file order. Raises ModelError with the one-line cause when the file is not whole."""
    foreign = foreign_content(path)
    if foreign:
        raise _broken(path, foreign)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if start[:4] == b"GGUF":
            raise _broken(path, "it is a GGUF file with the wrong name", do="rename it to .gguf and give its path")
        # The first byte is the low byte of a length and may be anything: a JSON header begins with a brace.
        if (start[:4] == b"PK\x03\x04" or start[:1] == b"\x80") and file.read(1) != b"{":
            raise _broken(path, "it is a pickled PyTorch file with the wrong name", do="convert it to safetensors")
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            raise _broken(path, f"it ends after {size} bytes")
        if length > MAX_HEADER_BYTES:
            raise _broken(path, f"it claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        if length > size - 8:
            raise _broken(path, f"it is cut short inside its header ({size} bytes, the header alone has {length})")
        file.seek(8)
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=without_doubles)
        assert isinstance(header, dict)
        if b"\\u" in text:  # half a surrogate pair passes here and ends other readers
            json.dumps(header, ensure_ascii=False).encode()
    except DoubleName as double:
        raise _broken(path, f"its header names {double} twice") from None
    except (ValueError, AssertionError, RecursionError):
        raise _broken(path, "its header is not valid JSON") from None
    said = header.pop("__metadata__", {})
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise _broken(path, "its metadata are no texts")
    entries = {name: _entry(path, name, raw, 8 + length) for name, raw in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return entries


class DoubleName(ValueError):
    """A JSON object that has one name twice: readers do not agree on which one counts."""


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=)`. Raises DoubleName."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        raise DoubleName(next(repr(name[:80]) for name, count in counted.items() if count > 1))
    return found


def _broken(path: Path, why: str, *, do: str = FETCH) -> ModelError:
    return ModelError(f"{path} is not a usable safetensors file", why=why, do=do)


def _entry(path: Path, name: str, raw: Any, base: int) -> Entry:
    def natural(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    wrong = _broken(path, f"the header entry of tensor {name!r} is damaged")
    if not isinstance(raw, dict):
        raise wrong
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise wrong
    if not all(map(natural, shape)) or not all(map(natural, offsets)):
        raise wrong
    if not isinstance(dtype, str) or len(shape) > 16:
        raise wrong
    if dtype not in ELEMENT_BYTES:
        raise _broken(path, f"tensor {name!r} has the unknown type {dtype!r}", do="use a bf16, fp16 or fp32 model")
    begin, end = offsets
    if math.prod(shape) * ELEMENT_BYTES[dtype] != end - begin:
        raise _broken(path, f"tensor {name!r} has {end - begin} bytes, its shape {shape} of {dtype} needs "
                            f"{math.prod(shape) * ELEMENT_BYTES[dtype]}")
    return Entry(dtype=dtype, shape=tuple(shape), offset=base + begin, bytes=end - begin)


def _check_layout(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != position:
            raise _broken(path, f"tensor {name!r} does not begin where the one before it ends")
        position += entry.bytes
    if position > size:
        raise _broken(path, f"it is cut short: {position - size} of {position} bytes are missing")
    if position < size:
        raise _broken(path, f"{size - position} bytes follow the last tensor")
