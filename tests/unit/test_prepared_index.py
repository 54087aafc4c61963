"""The index of a prepared layout: what is believed, what is refused, and the sizes that everything rests on. Pure."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from appliance.prepared import (
    Index,
    LeftOut,
    Run,
    folder_name,
    index_refusal,
    layout_refusal,
    read_index,
    record_bytes,
    run_bytes,
    write_index,
)

RUN = Run(name="l.qkv_proj", kind="linear", offset=0, bytes=run_bytes(960, 576, 32, 4), n=960, k=576, group=32, bits=4,
          replaces=("l.q_proj.weight_packed",))
INDEX = Index(source="ab" * 32, bytes=RUN.bytes + 4096, sha256="0" * 64, runs=(RUN,),
              left_out=(LeftOut(name="x", reason="odd"),))


@pytest.mark.parametrize(("n", "k", "group", "bits", "size"), [
    (16, 32, 32, 4, 16 * 32 // 2 + 64), (16, 64, 64, 8, 16 * 64 + 64), (17, 64, 32, 4, 2 * 2 * (256 + 64)),
    (960, 576, 32, 4, 60 * 18 * 320), (49152, 576, 32, 8, 3072 * 18 * 576),
])
def test_sizes(n: int, k: int, group: int, bits: int, size: int) -> None:
    assert run_bytes(n, k, group, bits) == size
    assert record_bytes(group, bits) % 64 == 0


@pytest.mark.parametrize(("k", "group", "bits", "reason"), [
    (576, 32, 4, None), (576, 64, 8, None), (64, 16, 4, "group size 16 is not one of 32, 64, 128, 256"),
    (80, 32, 4, "80 columns are not whole groups of 32"), (64, 32, 3, "codes of 3 bits"), (64, 0, 4, "group size 0 is not one of 32, 64, 128, 256"),
])
def test_what_the_layout_holds(k: int, group: int, bits: int, reason: str | None) -> None:
    assert layout_refusal(k, group, bits) == reason


def test_round_trip_and_name() -> None:
    assert read_index(write_index(INDEX)) == (INDEX, "")
    assert folder_name("ab" * 32) == "ab" * 32 + "-int4-b16-1"


@pytest.mark.parametrize(("change", "why"), [
    ({"bytes": 7}, "its checksum is wrong"), ({"layout": "int4-b16-2"}, "it is schema 1, layout int4-b16-2"),
    ({"schema": 2}, "it is schema 2"), ({"checksum": ""}, "its checksum is wrong"), ({"runs": []}, "its checksum is wrong"),
])
def test_a_changed_index_is_refused(change: dict[str, Any], why: str) -> None:
    text = json.dumps(json.loads(write_index(INDEX)) | change)
    found, reason = read_index(text)
    assert found is None
    assert why in reason


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "x" * 100, "[" * 100_000])
def test_garbage_is_refused(text: str) -> None:
    assert read_index(text) == (None, "it is not readable")


@pytest.mark.parametrize(("source", "size", "run", "why"), [
    ("ab" * 32, INDEX.bytes, {}, None),
    ("cd" * 32, INDEX.bytes, {}, "it was made from another model (abababababab)"),
    ("ab" * 32, 1, {}, f"weights.bin has 1 bytes, recorded {INDEX.bytes}"),
    ("ab" * 32, INDEX.bytes, {"n": 976}, "the entry of l.qkv_proj contradicts itself"),
    ("ab" * 32, INDEX.bytes, {"offset": 64}, "the entry of l.qkv_proj contradicts itself"),
    ("ab" * 32, INDEX.bytes, {"offset": 8192}, "l.qkv_proj ends beyond weights.bin"),
])
def test_an_index_serves_one_model_and_one_file(source: str, size: int, run: dict[str, Any], why: str | None) -> None:
    index = dataclasses.replace(INDEX, runs=(dataclasses.replace(RUN, **run),))
    assert index_refusal(index, source=source, weights_bytes=size) == why
