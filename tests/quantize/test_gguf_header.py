"""The header of a GGUF file from a stranger: bounded, and refused in one line whatever is wrong with it."""

from __future__ import annotations

import random
import resource
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ModelError
from appliance.importing import gguf_header
from appliance.importing.gguf_header import TYPES, read_header


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(path: Path, fields: list[bytes], infos: list[bytes], *, data: int = 64, keys: int | None = None,
         tensors: int | None = None, version: int = 3) -> Path:
    count = len(infos) if tensors is None else tensors
    head = struct.pack("<4sIQQ", b"GGUF", version, count, len(fields) if keys is None else keys)
    raw = head + b"".join(fields) + b"".join(infos)
    path.write_bytes(raw + bytes(-len(raw) % 32) + bytes(data))
    return path


def test_a_whole_header(tmp_path: Path) -> None:
    fields = [field("a", 4, struct.pack("<I", 7)), field("b", 8, text("é")), field("c", 7, b"\1"),
              field("d", 9, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 0.5)),
              field("e", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz"))]
    found = read_header(file(tmp_path / "m", fields, [info("t", (4, 2)), info("u", (32,), 8, 32)], data=66))
    assert found.fields == {"a": 7, "b": "é", "c": True, "d": [1.0, 2.0, 0.5], "e": ["x", "yz"]}
    t, u = found.tensors["t"], found.tensors["u"]
    assert (t.shape, t.bytes, t.offset % 32) == ((2, 4), 32, 0)
    assert (u.kind, u.bytes, u.offset) == ("Q8_0", 34, t.offset + 32)


DEEP = struct.pack("<IQ", 9, 1) * 50_000
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nested arrays": ({"fields": [field("a", 9, DEEP)]}, "an array of arrays"),
    "endless array": ({"fields": [field("a", 9, struct.pack("<IQ", 0, 1 << 60))]}, f"has {1 << 60} values"),
    "long array in a short file": ({"fields": [field("a", 9, struct.pack("<IQ", 0, 1 << 20))]}, "longer than the file"),
    "array of strings": ({"fields": [field("a", 9, struct.pack("<IQ", 8, 1 << 21))]}, "longer than the file"),
    "endless string": ({"fields": [field("a", 8, struct.pack("<Q", 1 << 62))]}, "has 4611686018427387904 bytes"),
    "key of two lines": ({"fields": [field("a\nb", 0, b"\0")]}, "a name of it cannot be printed"),
    "long key": ({"fields": [field("a" * 5000, 0, b"\0")]}, "has 5000 bytes"),
    "doubled key": ({"fields": [field("a", 0, b"\0")] * 2}, "key 'a' stands twice"),
    "unknown type of value": ({"fields": [field("a", 77, b"")]}, "unknown type 77"),
    "not UTF-8": ({"fields": [field("a", 8, text(b"\xff\xfe"))]}, "not UTF-8"),
    "countless keys": ({"keys": 1 << 63}, "keys"),
    "countless tensors": ({"tensors": 1 << 40}, "tensors"),
    "more tensors than there are": ({"tensors": 9}, "has 0 dimensions"),
    "no dimension": ({"infos": [info("t", ())]}, "0 dimensions"),
    "many dimensions": ({"infos": [info("t", (1,) * 9)]}, "9 dimensions"),
    "empty dimension": ({"infos": [info("t", (4, 0))]}, "has the shape [0, 4]"),
    "overflowing shape": ({"infos": [info("t", (1 << 32, 1 << 32))]}, "behind the file"),
    "shape of two to the 252": ({"infos": [info("t", (1 << 63,) * 4)]}, "behind the file"),
    "half a block": ({"infos": [info("t", (33,), 2)]}, "has the shape [33], type Q4_0"),
    "unknown type": ({"infos": [info("t", (4,), 99)]}, "unknown type 99"),
    "behind the file": ({"infos": [info("t", (4,), 0, 64)]}, "ends 16 bytes behind the file"),
    "far behind the file": ({"infos": [info("t", (4,), 0, (1 << 64) - 32)]}, "behind the file"),
    "odd place": ({"infos": [info("t", (4,), 0, 5)]}, "at an odd place"),
    "one over the other": ({"infos": [info("t", (8,)), info("u", (8,), 0, 0)]}, "lies over"),
    "doubled tensor": ({"infos": [info("t", (8,)), info("t", (8,), 0, 32)]}, "tensor 't' stands twice"),
    "alignment 0": ({"fields": [field("general.alignment", 4, struct.pack("<I", 0))]}, "its alignment is 0"),
    "alignment 33": ({"fields": [field("general.alignment", 4, struct.pack("<I", 33))]}, "its alignment is 33"),
    "alignment of text": ({"fields": [field("general.alignment", 8, text("x"))]}, "its alignment is 'x'"),
    "version 1": ({"version": 1}, "version 2 or 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(tmp_path: Path, name: str) -> None:
    parts, why = dict(BAD[name][0]), BAD[name][1]
    path = file(tmp_path / "m", parts.pop("fields", []), parts.pop("infos", []), **parts)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert why in caught.value.line
    assert "\n" not in caught.value.line
    assert caught.value.exit_code == 65


def test_case_030_every_cut_is_one_line(tmp_path: Path) -> None:
    fields = [field("a", 8, text("word")), field("b", 9, struct.pack("<IQ", 8, 1) + text("x"))]
    whole = file(tmp_path / "m", fields, [info("t", (16,))]).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "m").write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_header(tmp_path / "m")


def mutations(whole: bytes, count: int, seed: int) -> Callable[[], Any]:
    draw = random.Random(seed)
    words = [0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1, 1 << 31, 9]

    def one() -> Any:
        for _ in range(count):
            raw = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(raw) - 8)
                match draw.randrange(4):
                    case 0:
                        raw[at] ^= 1 << draw.randrange(8)
                    case 1:
                        raw[at : at + 8] = struct.pack("<Q", draw.choice(words))
                    case 2:
                        raw[at : at + 4] = struct.pack("<I", draw.choice(words) & 0xFFFFFFFF)
                    case _:
                        del raw[at : at + draw.randint(1, 16)]
            yield bytes(raw)

    return one


def test_mutated_headers_are_refused_or_consistent(tmp_path: Path) -> None:
    fields = [field("general.architecture", 8, text("llama")), field("llama.block_count", 4, struct.pack("<I", 2)),
              field("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("b") + text("c")),
              field("tokenizer.ggml.scores", 9, struct.pack("<IQ3f", 6, 3, 0, 1, 2))]
    infos = [info("token_embd.weight", (32, 3), 2), info("blk.0.attn_norm.weight", (8,), 0, 64)]
    path = file(tmp_path / "m", fields, infos, data=96)
    whole, size = path.read_bytes(), path.stat().st_size
    tracemalloc.start()
    accepted = 0
    for raw in mutations(whole, 3000, 5)():
        path.write_bytes(raw)
        try:
            found = read_header(path)
        except ModelError:
            continue
        accepted += 1
        for t in found.tensors.values():
            block, each = next((b, s) for kind, b, s in TYPES.values() if kind == t.kind)
            values = 1
            for length in t.shape:
                values *= length
            assert t.bytes == values // block * each
            assert t.offset + t.bytes <= size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < accepted < 3000
    assert peak < 64 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20


def test_the_sizes_of_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs == dict(TYPES)
    assert set(gguf_header.SCALARS) | {8, 9} == {kind.value for kind in gguf.GGUFValueType}


def test_every_type_that_is_taken_is_decoded() -> None:
    gguf = pytest.importorskip("gguf")
    from appliance.importing.tensors import GGUF_DECODED

    assert {gguf.GGMLQuantizationType[kind] for kind in GGUF_DECODED} <= set(gguf.quants._type_traits)
