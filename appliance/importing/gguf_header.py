"""The header of a GGUF file, read within bounds: metadata, and of each tensor its type, shape and place.

Standard library only and no memory map: the file comes from strangers. Does not read weights, knows no architecture.
Rules: nothing is allocated on the word of a number before the file is known to be long enough; counts, names, arrays
and the whole header are bounded (BOUNDS below, ten times what real models have); arrays do not nest; a tensor lies
whole, aligned and alone within its file. What breaks a rule is a ModelError with one line.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from appliance.errors import ModelError

MAX_HEADER_BYTES = 256 << 20
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 17
MAX_ELEMENTS = 1 << 22
"""Array elements of the whole header: a vocabulary of 262,144 tokens with its merges has 1.3 million."""
MAX_NAME, MAX_DIMENSIONS = 1024, 4
AGAIN = "download the file again"

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}
"""Number of a type -> its name, values and bytes of one block (source: gguf's GGML_QUANT_SIZES; a test compares)."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """`shape` with the longest stride first (rows before columns); `offset` from the beginning of the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Header:
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_header(path: Path) -> Header:
    """The header of one GGUF file. Raises ModelError when it is damaged, cut short or beyond the bounds."""
    try:
        with open(path, "rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read", why=str(error.strerror), do="check its permissions") from None


class _Reader:
    """One pass over the header. `left`: bytes that may still be read."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._left = min(self._size, MAX_HEADER_BYTES)
        self._elements = MAX_ELEMENTS

    def header(self) -> Header:
        magic, version, tensors, keys = struct.unpack("<4sIQQ", self._take(24))
        if magic != b"GGUF" or version not in (2, 3):
            raise self._damaged("it does not begin as a GGUF file of version 2 or 3")
        if keys > MAX_KEYS or tensors > MAX_TENSORS:
            raise self._damaged(f"it says it has {tensors} tensors and {keys} keys")
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = self._name()
            if key in fields:
                raise self._damaged(f"key {key!r} stands twice")
            fields[key] = self._value(self._number("I"))
        infos = [self._info() for _ in range(tensors)]
        return Header(fields=fields, tensors=self._placed(infos, self._alignment(fields)))

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is damaged or cut short", why=why, do=AGAIN)

    def _take(self, count: int) -> bytes:
        if count > self._left:
            raise self._damaged("its header is longer than the file, or than any model's")
        self._left -= count
        data = self._file.read(count)
        if len(data) != count:
            raise self._damaged("it ends inside its header")
        return data

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self, longest: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > longest:
            raise self._damaged(f"a text of its header has {length} bytes")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._damaged("a text of its header is not UTF-8") from None

    def _name(self) -> str:
        name = self._string(MAX_NAME)
        if not name.isprintable():
            raise self._damaged("a name of it cannot be printed")
        return name

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise self._damaged(f"its metadata has a value of unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")
        self._elements -= count
        if self._elements < 0:
            raise self._damaged(f"an array of its metadata has {count} values")
        if inner == STRING:
            return [self._string() for _ in range(count)]
        if inner not in SCALARS:
            raise self._damaged("its metadata has " + ("an array of arrays" if inner == ARRAY else
                                                       f"an array of unknown type {inner}"))
        code = f"<{count}{SCALARS[inner]}"
        return list(struct.unpack(code, self._take(struct.calcsize(code))))

    def _alignment(self, fields: Mapping[str, Any]) -> int:
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}")
        return alignment

    def _info(self) -> tuple[str, Tensor]:
        """One tensor's entry; its offset is still relative to the data."""
        name = self._name()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        kind, block, size = TYPES.get(number := self._number("I"), ("", 1, 0))
        if not kind:
            raise ModelError(f"{self._path} cannot be used", why=f"tensor {name!r} has the unknown type {number}",
                             do="use a file of a common type, such as Q4_K_M or Q8_0")
        values = 1
        for length in shape:  # Python's numbers do not overflow; the file's size bounds them below
            values *= length
        if not values or shape[0] % block:
            raise self._damaged(f"tensor {name!r} has the shape {list(reversed(shape))}, type {kind}")
        return name, Tensor(kind=kind, shape=tuple(reversed(shape)), offset=self._number("Q"),
                            bytes=values // block * size)

    def _placed(self, infos: list[tuple[str, Tensor]], alignment: int) -> dict[str, Tensor]:
        begin = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        end, last = 0, ""
        for name, info in sorted(infos, key=lambda one: one[1].offset):
            if name in tensors:
                raise self._damaged(f"tensor {name!r} stands twice")
            if info.offset % alignment or info.offset < end:
                raise self._damaged(f"tensor {name!r} lies " + ("over " + repr(last) if info.offset < end else
                                                                "at an odd place"))
            end, last = info.offset + info.bytes, name
            if begin + end > self._size:
                raise self._damaged(f"tensor {name!r} ends {begin + end - self._size} bytes behind the file")
            tensors[name] = Tensor(kind=info.kind, shape=info.shape, offset=begin + info.offset, bytes=info.bytes)
        return {name: tensors[name] for name, _ in infos}
