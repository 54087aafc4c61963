"""PURE: do the tensors of a model have the shapes that its configuration speaks of, and are they all there?

Covers the architectures of `format.PLAIN_DECODERS`, whose names and shapes are the same everywhere; of others nothing
is said here. Does not: read files. Rules: one sentence, for the first tensor that contradicts; numbers of the
configuration are not believed before they are whole, positive and of a size that the tensors could have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from appliance.quantize.format import PLAIN_DECODERS

Shape = tuple[int, ...]


def shape_refusal(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str | None:
    """Why configuration and tensors do not belong together, or None."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or architectures[:1] == [] or architectures[0] not in PLAIN_DECODERS:
        return None
    tables = [name for name in shapes if name.endswith("embed_tokens.weight")]
    if len(tables) != 1:
        return "it has no embed_tokens.weight" if not tables else f"it has {len(tables)} embedding tables"
    numbers = _numbers(config)
    if isinstance(numbers, str):
        return numbers
    if numbers["layers"] > len(shapes):
        return f"its configuration speaks of {numbers['layers']} layers, there are {len(shapes)} tensors"
    prefix = tables[0].removesuffix("embed_tokens.weight")
    expected = dict(_expected(prefix, numbers, config))
    for name, (shape, needed) in expected.items():
        found = shapes.get(name)
        if found is None:
            if needed:
                return f"tensor {name} is missing"
        elif found != shape:
            return f"tensor {name} has the shape {list(found)}; its configuration says {list(shape)}"
    layer = f"{prefix}layers."
    beyond = next((name for name in shapes if name.startswith(layer) and name not in expected
                   and not name.endswith("rotary_emb.inv_freq") and _number_of(name, layer) is not None), None)
    if beyond is not None and (_number_of(beyond, layer) or 0) >= numbers["layers"]:
        return f"tensor {beyond} belongs to a layer beyond the {numbers['layers']} of its configuration"
    return None


def _number_of(name: str, layer: str) -> int | None:
    text = name.removeprefix(layer).partition(".")[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


def _numbers(config: Mapping[str, Any]) -> dict[str, int] | str:
    """The sizes, or what is wrong with one."""
    found = {}
    for ours, theirs in (("layers", "num_hidden_layers"), ("hidden", "hidden_size"), ("inner", "intermediate_size"),
                         ("heads", "num_attention_heads"), ("vocab", "vocab_size")):
        value = config.get(theirs)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 32:
            return f"`{theirs}` of its configuration is {str(value)[:40]}, not a whole number above 0"
        found[ours] = value
    for ours, theirs, default in (("kv_heads", "num_key_value_heads", found["heads"]),
                                  ("head_dim", "head_dim", found["hidden"] // found["heads"])):
        value = config.get(theirs)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 32:
            return f"`{theirs}` of its configuration is {str(value)[:40]}, not a whole number above 0"
        found[ours] = value
    if found["heads"] % found["kv_heads"]:
        return f"{found['heads']} heads cannot share {found['kv_heads']} heads for keys and values"
    return found


def _expected(prefix: str, n: Mapping[str, int], config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Shape, bool]]]:
    """Tensor name -> its shape, and whether it must be there."""
    q, kv, hidden, inner = n["heads"] * n["head_dim"], n["kv_heads"] * n["head_dim"], n["hidden"], n["inner"]
    yield f"{prefix}embed_tokens.weight", ((n["vocab"], hidden), True)
    yield f"{prefix}norm.weight", ((hidden,), True)
    yield "lm_head.weight", ((n["vocab"], hidden), False)
    linears = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
               "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
               "mlp.down_proj": (hidden, inner)}
    biased = config["architectures"][0] == "Qwen2ForCausalLM"
    normed = config["architectures"][0] == "Qwen3ForCausalLM"
    for i in range(n["layers"]):
        layer = f"{prefix}layers.{i}."
        for module, shape in linears.items():
            yield f"{layer}{module}.weight", (shape, True)
            needs_bias = biased and module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            yield f"{layer}{module}.bias", (shape[:1], needs_bias)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", ((hidden,), True)
        for norm in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{norm}.weight", ((n["head_dim"],), normed)
