"""The sizing table of docs/sizing.md: which memory ceiling a model needs, and how fast a token can come.

    python -m tests.bench.sizing

The ceiling is searched with the planner itself: the least `MemoryMax=` below which the plan would refuse the model or give
less context. Tokens per second are arithmetic, not measurements: the time of a step without weights, and the bytes that one
token reads over the share of the read bandwidth that the kernel reached with the 1B shape (docs/benchmarks.md). Model
shapes are those of the models' published configurations in this project's default recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from appliance.budget import GIB, MIB
from appliance.facts import ModelFacts
from appliance.plan import Plan, make_plan
from appliance.probe.host import read_host
from appliance.quantize.layers import SMALL_MODEL_PARAMETERS
from appliance.settings import Settings
from tests.unit.golden_plans import HOST, HOSTS, PLACES, models, with_ceiling

CONTEXTS = (2048, 8192, 32768)
BANDWIDTHS = (("two channels of DDR4-3200", 38), ("two channels of DDR5-5600", 65), ("eight channels of DDR5-4800", 220))
"""Read bandwidth, GB/s, as `applianctl tune` would measure it: three quarters of what the memory is sold for."""
STEP_S = 0.0029
"""A step of vLLM around a model without layers (`hollow` in docs/benchmarks.md)."""
SHARE = 0.73
"""Of the read bandwidth, in decoding one sequence of the 1B shape less `STEP_S`."""
GROUP_BITS = 32
"""A bf16 scale and zero point for each group."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def linears(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def table(self) -> int:
        return self.vocab * self.hidden


SHAPES = (
    Shape(name="Qwen2.5 0.5B", hidden=896, layers=24, mlp=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936, tied=True),
    Shape(name="Llama 3.2 1B", hidden=2048, layers=16, mlp=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256, tied=True),
    Shape(name="Qwen2.5 1.5B", hidden=1536, layers=28, mlp=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936, tied=True),
    Shape(name="Llama 3.2 3B", hidden=3072, layers=28, mlp=8192, heads=24, kv_heads=8, head_dim=128, vocab=128256, tied=True),
    Shape(name="Mistral 7B", hidden=4096, layers=32, mlp=14336, heads=32, kv_heads=8, head_dim=128, vocab=32768, tied=False),
    Shape(name="Llama 3.1 8B", hidden=4096, layers=32, mlp=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, tied=False),
    Shape(name="Qwen3 14B", hidden=5120, layers=40, mlp=17408, heads=40, kv_heads=8, head_dim=128, vocab=151936, tied=False),
)


def facts(shape: Shape) -> ModelFacts:
    copies = 1 if shape.tied else 2
    parameters = shape.linears + copies * shape.table
    small = parameters < SMALL_MODEL_PARAMETERS  # docs/quantization.md: groups of 32 and 8-bit tables, else 64 and 4 bits
    overhead = GROUP_BITS / (32 if small else 64)
    linear_bits, table_bits = 4 + overhead, (8 if small else 4) + overhead
    return replace(
        models()["llama-8b"], name=shape.name, parameters=parameters, hidden_size=shape.hidden,
        intermediate_size=shape.mlp, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, tied=shape.tied, linear_bytes=int(shape.linears * linear_bits / 8),
        table_bytes=int(copies * shape.table * table_bits / 8), largest_linear=(2 * shape.mlp, shape.hidden))


def plan(model: ModelFacts, ceiling: int, context: int) -> Plan:
    return make_plan(with_ceiling(read_host(HOSTS / HOST), ceiling), model, Settings(context=context),
                     replace(PLACES, prepared="/store/prepared"))


def gives(made: Plan, context: int) -> bool:
    return made.refused is None and any(choice.name == "context" and choice.value >= context for choice in made.choices)


def least_ceiling(model: ModelFacts, context: int) -> int:
    """Bytes, to 16 MiB."""
    low, high = 0, 64 * GIB
    while high - low > 16 * MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if gives(plan(model, middle, context), context) else (middle, high)
    return high


def read_for_a_token(model: ModelFacts) -> int:
    """Bytes: every linear, and the head's table once."""
    return model.linear_bytes + (model.table_bytes if model.tied else model.table_bytes // 2)


def rows() -> Iterator[tuple[str, ...]]:
    yield ("model", "on disk, GB", *(f"ceiling for {context} tokens, GiB" for context in CONTEXTS),
           *(f"tok/s, {name}" for name, _ in BANDWIDTHS))
    for model in (models()["smollm2"], *map(facts, SHAPES)):
        ceilings = (f"{least_ceiling(model, context) / GIB:.1f}" if context <= model.max_context else "-" for context in CONTEXTS)
        speeds = (f"{1 / (STEP_S + read_for_a_token(model) / (SHARE * bandwidth * 1e9)):.0f}" for _, bandwidth in BANDWIDTHS)
        stored = (model.linear_bytes + model.table_bytes) / 1e9
        yield (model.name, f"{stored:.2f}", *ceilings, *speeds)


def main() -> None:
    for at, row in enumerate(rows()):
        print("| " + " | ".join(row) + " |")
        if not at:
            print("| --- " * len(row) + "|")


if __name__ == "__main__":
    main()
