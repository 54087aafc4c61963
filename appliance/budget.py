"""PURE memory arithmetic: what one worker needs, item by item and phase by phase, against the node's ceiling.

All figures are bytes. A phase is a moment of the worker's life; the peak is the largest phase, not the sum:

    load     processes + weights (+ the largest layer being packed)
    compile  processes + weights + activations + the compiler (g++ runs beside the worker; no cache is allocated yet)
    warm-up  processes + weights + key/value cache, up to the first answer
    serve    the same under load: all seats taken, batches full

Mapped weights are page cache: they count, because a worker whose weights are pushed out is of no use. Constants are
fitted to measurements (`make bench-memory`, docs/planning.md). No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.facts import ModelFacts
from appliance.launch import PROBE_SEATS

MIB = 1024**2
GIB = 1024**3

PHASES = ("load", "compile", "warm-up", "serve")
AFTER_LOAD = PHASES[1:]

API_SERVER_BYTES = 430 * MIB
"""PSS of vLLM's API server process: Python, torch and vLLM imported. Measured: docs/profile.md."""
ENGINE_BYTES = 390 * MIB
"""PSS of the engine process without weights, cache and activations: forked from the API server, so what neither has
written to since is counted half here and half there. Measured: docs/profile.md."""
FURTHER_ENGINE_BYTES = 170 * MIB
"""The same for every further engine: the API server is counted once, and more processes share more pages. Measured:
docs/planning.md."""
FURTHER_STARTED_BYTES = 40 * MIB
STARTED_BYTES = 80 * MIB
"""What both gain by the first answer: tokenizer, grammars, scheduler, buffers, OpenMP's threads."""
COMPILE_BYTES = 410 * MIB
"""Inductor's graph memory plus one g++ at its peak, beyond what stays."""
COMPILED_BYTES = 90 * MIB
"""What stays of compiling: graphs, guards, code."""
PROGRAM_FILES_BYTES = 320 * MIB
"""Files that a start reads and that are not held: compiled Python modules, libraries' untouched pages."""
RESERVE_PERCENT = 10
LEAST_RESERVE_BYTES = 128 * MIB
MIN_CONTEXT = 2048
"""Below this many tokens a chat is not usable; a model whose own maximum is smaller may go down to that."""


@dataclass(frozen=True, kw_only=True)
class MemoryItem:
    """One line of the arithmetic. `phases`: the phases in which the bytes are held; none: wanted, not held."""

    item: str
    bytes: int
    phases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dials that memory depends on. `sequences`: requests of full context that the key/value cache can hold."""

    context: int
    sequences: int
    batch_tokens: int
    running: int
    compile: bool


def kv_bytes_per_token(model: ModelFacts) -> int:
    """2 (key and value) x layers x kv_heads x head_dim x 2 bytes (bf16): a token that every layer still remembers."""
    return model.layers * _layer_bytes(model)


def kv_request_bytes(model: ModelFacts, shape: Shape, block: int) -> int:
    """Bytes of one request that fills the context, in whole blocks: what vLLM reserves for it.

    A layer with a sliding window forgets: it holds the window and the batch in work, in one block more because the
    window begins inside of one.
    """
    whole, window = _layers(model)
    tokens = min((model.sliding_window or 0) - 1 + shape.batch_tokens, shape.context)
    blocks = whole * -(-shape.context // block) + window * (-(-tokens // block) + 1)
    return blocks * block * _layer_bytes(model)


def kv_bytes(model: ModelFacts, shape: Shape, block: int) -> int:
    """Bytes of the cache: `sequences` full contexts, and the one block of the pool that vLLM keeps for itself."""
    pool = min(layers for layers in _layers(model) if layers)
    return shape.sequences * kv_request_bytes(model, shape, block) + pool * block * _layer_bytes(model)


def _layer_bytes(model: ModelFacts) -> int:
    return 2 * model.kv_heads * model.head_dim * 2


def _layers(model: ModelFacts) -> tuple[int, int]:
    """Layers that remember everything and layers with a window, as vLLM allocates them: where a model has both, they
    share one pool of blocks in groups of equal size, and the last group is filled up."""
    whole, window = model.layers - model.sliding_layers, model.sliding_layers
    if not whole or not window:
        return whole, window
    few, many = sorted((whole, window))
    group = many if many < few * 1.5 else few
    return -(-whole // group) * group, -(-window // group) * group


def items(model: ModelFacts, shape: Shape, *, block: int, gemm_bytes: int, mapped: bool, engines: int = 1,
          copies: int = 1) -> tuple[MemoryItem, ...]:
    """Every line of the arithmetic. `gemm_bytes`: bytes of one value in the many-row GEMM (4 fp32, 2 bf16); `mapped`:
    the weights lie prepared in the store, so that loading packs nothing; `shape` is each engine's; `copies`: of the
    weights, one for each engine where they lie on different NUMA nodes."""
    always = PHASES
    n, k = model.largest_linear
    table_rows = model.vocab_size
    # torch's packer wants the codes as int32, and the checkpoint's tensors are still there: 4 + 1/2 bytes a code.
    packing = max(n * k, table_rows * model.hidden_size if model.quantize_embedding else 0) * 9 // 2
    widest = max(n, 2 * model.intermediate_size, 4 * model.hidden_size)
    activations = shape.batch_tokens * (widest * (2 + gemm_bytes) * 2 + model.hidden_size * 2 * 8)
    logits = (shape.running + PROBE_SEATS) * table_rows * (4 + 4 + 2)
    weights = model.linear_bytes + model.table_bytes + model.kept_bytes

    def each(item: str, size: int, phases: tuple[str, ...], times: int = engines) -> MemoryItem:
        """A line that several engines, or copies, have each."""
        return MemoryItem(item=item if times == 1 else f"{item}, {times} x", bytes=size * times, phases=phases)

    # What is not mapped is every engine's own.
    own = engines if not mapped else copies
    lines = [
        MemoryItem(item="api server process", bytes=API_SERVER_BYTES, phases=always),
        MemoryItem(item="engine process" if engines == 1 else f"engine process, {engines} x", phases=always,
                   bytes=ENGINE_BYTES + (engines - 1) * FURTHER_ENGINE_BYTES),
        MemoryItem(item="tokenizer, scheduler, buffers", phases=AFTER_LOAD,
                   bytes=STARTED_BYTES + (engines - 1) * FURTHER_STARTED_BYTES),
        each("weights: 4-bit linears", model.linear_bytes, always, own),
        each("weights: embedding table and head", model.table_bytes, always, own),
        each("weights: kept in bf16", model.kept_bytes, always),
        *([] if mapped else [each("packing the largest layer", packing, ("load",))]),
        each("key/value cache", kv_bytes(model, shape, block), ("warm-up", "serve")),
        each("activations of one batch", activations, ("compile", "serve") if shape.compile else ("serve",)),
        each("logits", logits, ("serve",)),
    ]
    if shape.compile:
        lines.append(each("compiler", COMPILE_BYTES, ("compile",)))
        lines.append(each("compiled code", COMPILED_BYTES, AFTER_LOAD))
    # Mapped weights are in the sums; what is packed or copied is read from files that nobody needs afterwards.
    wanted = PROGRAM_FILES_BYTES + (0 if mapped and own == 1 else weights)
    lines.append(MemoryItem(item="page cache wanted besides", bytes=wanted, phases=()))
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
