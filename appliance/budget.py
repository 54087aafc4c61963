"""PURE memory arithmetic: what one worker needs, item by item and phase by phase, against the node's ceiling.

All figures are bytes. A phase is a moment of the worker's life; the peak is the largest phase, not the sum:

    load     runtime + weights + the largest layer being packed
    compile  runtime + weights + activations + the compiler (g++ runs beside the worker; no cache is allocated yet)
    warm-up  runtime + weights + key/value cache + activations of one full batch + logits
    serve    as warm-up; never larger

Constants carry where they were measured; docs/benchmarks.md has the runs. No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.facts import ModelFacts
from appliance.launch import PROBE_SEATS

MIB = 1024**2
GIB = 1024**3

PHASES = ("load", "compile", "warm-up", "serve")

API_SERVER_BYTES = 480 * MIB
"""PSS of vLLM's API server process: Python, torch and vLLM imported, tokenizer. Measured: docs/profile.md."""
ENGINE_BYTES = 420 * MIB
"""PSS of the engine process without weights, cache and activations: forked from the API server, so what neither has
written to since is counted half here and half there. Measured: docs/profile.md."""
COMPILE_BYTES = 500 * MIB
"""Inductor's graph memory plus one g++ at its peak. Measured: docs/benchmarks.md."""
RESERVE_PERCENT = 10
LEAST_RESERVE_BYTES = 128 * MIB
MIN_CONTEXT = 2048
"""Below this many tokens a chat is not usable; a model whose own maximum is smaller may go down to that."""


@dataclass(frozen=True, kw_only=True)
class MemoryItem:
    """One line of the arithmetic. `phases`: the phases in which the bytes are held."""

    item: str
    bytes: int
    phases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dials that memory depends on. `kv_tokens`: tokens the key/value cache can hold."""

    context: int
    kv_tokens: int
    batch_tokens: int
    running: int
    compile: bool


def kv_bytes_per_token(model: ModelFacts) -> int:
    """2 (key and value) x layers x kv_heads x head_dim x 2 bytes (bf16).

    Sliding-window layers count in full: vLLM allocates all layers from one pool on CPU.
    """
    return 2 * model.layers * model.kv_heads * model.head_dim * 2


def kv_bytes(model: ModelFacts, tokens: int, block: int) -> int:
    """Bytes of a cache of at least `tokens` tokens in whole blocks, plus the one block vLLM keeps for itself."""
    blocks = -(-tokens // block) + 1
    return blocks * block * kv_bytes_per_token(model)


def items(model: ModelFacts, shape: Shape, *, block: int, gemm_bytes: int, mapped: bool) -> tuple[MemoryItem, ...]:
    """Every line of the arithmetic. `gemm_bytes`: bytes of one value in the many-row GEMM (4 fp32, 2 bf16); `mapped`:
    the weights lie prepared in the store, so that loading packs nothing."""
    always = PHASES
    n, k = model.largest_linear
    table_rows = model.vocab_size
    # torch's packer wants the codes as int32, and the checkpoint's tensors are still there: 4 + 1/2 bytes a code.
    packing = max(n * k, table_rows * model.hidden_size if model.quantize_embedding else 0) * 9 // 2
    widest = max(n, 2 * model.intermediate_size, 4 * model.hidden_size)
    activations = shape.batch_tokens * (widest * (2 + gemm_bytes) * 2 + model.hidden_size * 2 * 8)
    logits = (shape.running + PROBE_SEATS) * table_rows * (4 + 4 + 2)
    lines = [
        MemoryItem(item="api server process", bytes=API_SERVER_BYTES, phases=always),
        MemoryItem(item="engine process", bytes=ENGINE_BYTES, phases=always),
        MemoryItem(item="weights: 4-bit linears", bytes=model.linear_bytes, phases=always),
        MemoryItem(item="weights: embedding table and head", bytes=model.table_bytes, phases=always),
        MemoryItem(item="weights: kept in bf16", bytes=model.kept_bytes, phases=always),
        *([] if mapped else [MemoryItem(item="packing the largest layer", bytes=packing, phases=("load",))]),
        MemoryItem(item="key/value cache", bytes=kv_bytes(model, shape.kv_tokens, block),
                   phases=("warm-up", "serve")),
        MemoryItem(item="activations of one batch", bytes=activations, phases=("compile", "warm-up", "serve")),
        MemoryItem(item="logits", bytes=logits, phases=("warm-up", "serve")),
    ]
    if shape.compile:
        lines.append(MemoryItem(item="compiler", bytes=COMPILE_BYTES, phases=("compile",)))
    return tuple(lines)


def phase_bytes(lines: Iterable[MemoryItem], phase: str) -> int:
    return sum(line.bytes for line in lines if phase in line.phases)


def peak(lines: Iterable[MemoryItem]) -> tuple[str, int]:
    """The phase that needs most, and how much."""
    lines = tuple(lines)
    worst = max(PHASES, key=lambda phase: phase_bytes(lines, phase))
    return worst, phase_bytes(lines, worst)


def reserve_bytes(ceiling: int, wanted: int | None) -> int:
    """What stays free below the ceiling: the operator's figure, else 10 %, at least 128 MiB."""
    return wanted if wanted is not None else max(ceiling * RESERVE_PERCENT // 100, LEAST_RESERVE_BYTES)


def show(size: int) -> str:
    """`1.50 GiB`, `312 MiB`, `12 KiB`, `7 bytes` - for people; exact bytes are in the JSON."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / 1024:.0f} KiB" if size >= 1024 else f"{size} bytes"
