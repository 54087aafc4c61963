"""PURE: the largest worker that fits below a memory ceiling, and what more memory would buy.

Gives way in this order: a smaller key/value cache, no compiler, a shorter context, smaller batches; below MIN_CONTEXT
tokens it does not fit. A context that the operator asked for is kept or refused, never cut. No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from appliance import budget
from appliance.budget import MIN_CONTEXT, MemoryItem, Shape
from appliance.facts import ModelFacts
from appliance.launch import PROBE_SEATS

CONTEXT_STEP = 256
"""A context is cut in steps of so many tokens."""
BATCHES = (512, 256, 128)
"""Tokens of one step: longer prompts are computed in chunks of so many."""
MOST_SEQUENCES = 4
"""Full contexts that the cache has room for where memory is no matter."""
ROOMY_SHARE = 4
"""More than one full context only where the cache is at most a quarter of the memory."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """One model and what is wanted of it. `wanted_context`: the operator's, or None; the rest as in `budget.items`."""

    model: ModelFacts
    wanted_context: int | None
    running: int
    can_compile: bool
    block: int
    gemm_bytes: int
    mapped: bool
    engines: int = 1
    copies: int = 1
    node_bytes: int | None = None
    """What one engine may use of the memory of its NUMA node, where it has one of its own."""
    batch: int = BATCHES[0]
    """The first of the batch sizes to try: larger than BATCHES it is taken only while nothing else must give way."""

    @property
    def context(self) -> int:
        """The context that is wanted: the operator's, or as much as the model answers best at."""
        model = self.model
        return min(self.wanted_context or model.short_context or model.max_context, model.max_context)

    def lines(self, shape: Shape) -> tuple[MemoryItem, ...]:
        return budget.items(self.model, shape, block=self.block, gemm_bytes=self.gemm_bytes, mapped=self.mapped,
                            engines=self.engines, copies=self.copies)

    def needed_bytes(self, shape: Shape) -> int:
        return budget.peak(self.lines(shape))[1]

    def fits(self, shape: Shape, usable_bytes: int) -> bool:
        """Whether all engines fit together, and each on its node (the API server may lie on any of them)."""
        if self.node_bytes is not None:
            alone = replace(self, engines=1, copies=1, node_bytes=None)
            if alone.needed_bytes(shape) > self.node_bytes:
                return False
        return self.needed_bytes(shape) <= usable_bytes

    def fit(self, usable_bytes: int) -> Shape | None:
        """The most wanted shape that fits, or None."""
        for wanted, shortest in self._shapes():
            shape = self._cut(wanted, shortest, usable_bytes)
            roomy = shape.sequences == 1 or self._cache_bytes(shape) <= usable_bytes // ROOMY_SHARE
            if roomy and self.fits(shape, usable_bytes):
                return shape
        return None

    def smallest(self) -> Shape:
        """The shape that needs least; of equal needs the one that asks for least."""
        shapes = [replace(wanted, context=shortest) for wanted, shortest in self._shapes()]
        return min(reversed(shapes), key=self.needed_bytes)

    def with_more(self, shape: Shape, more_bytes: int) -> str:
        """What changes when so much may be used instead of what `shape` was fitted to; empty when nothing does."""
        larger = self.fit(more_bytes)
        if larger is None:
            return ""
        changes = [
            f"context {larger.context}" if larger.context != shape.context else "",
            f"a cache for {contexts(larger.sequences)}" if larger.sequences != shape.sequences else "",
            "torch.compile" if larger.compile and not shape.compile else "",
            f"batches of {larger.batch_tokens} tokens" if larger.batch_tokens != shape.batch_tokens else "",
        ]
        return ", ".join(change for change in changes if change)

    def _shapes(self) -> Iterator[tuple[Shape, int]]:
        """Shapes from most to least wanted, each with the shortest context that it may be cut to."""
        least = self.context if self.wanted_context is not None else min(MIN_CONTEXT, self.context)
        # A cache for several full contexts only while the context is not being cut, smaller batches only for the
        # shortest one: less memory never plans a longer context.
        most, first = min(MOST_SEQUENCES, self.running), min(self.batch, BATCHES[0])
        steps = [*([(self.batch, self.context, self.context, most)] if self.batch > first else []),
                 (first, self.context, self.context, most), (first, self.context, least, 1),
                 *((batch, least, least, 1) for batch in BATCHES if batch < first)]
        for batch, context, shortest, sequences in steps:
            for compiled in ([True, False] if self.can_compile else [False]):
                for count in range(sequences, 0, -1):
                    yield Shape(context=context, sequences=count, running=self.running, compile=compiled,
                                batch_tokens=max(batch, self.running + PROBE_SEATS)), shortest

    def _cut(self, shape: Shape, shortest: int, usable_bytes: int) -> Shape:
        """With the longest context that fits, in steps of CONTEXT_STEP; with the shortest one where none does."""
        if shape.context <= shortest or self.fits(shape, usable_bytes):
            return shape
        low, high = 0, (shape.context - 1 - shortest) // CONTEXT_STEP  # steps above the shortest
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(replace(shape, context=shortest + middle * CONTEXT_STEP), usable_bytes):
                low = middle
            else:
                high = middle - 1
        return replace(shape, context=shortest + low * CONTEXT_STEP)

    def _cache_bytes(self, shape: Shape) -> int:
        return self.engines * budget.kv_bytes(self.model, shape, self.block)


def contexts(sequences: int) -> str:
    return "one full context" if sequences == 1 else f"{sequences} full contexts"


def lost(one: Shape | None, several: Shape | None) -> str:
    """What several engines would have less of than one has; empty when nothing."""
    if several is None:
        return "do not fit"
    if one is None or (one.context, one.batch_tokens, one.compile) == (several.context, several.batch_tokens,
                                                                       several.compile):
        return ""
    if several.context < one.context:
        return f"would leave a context of {several.context} tokens, one has {one.context}"
    return "would leave too little memory for " + ("the compiler" if one.compile else "large batches")
