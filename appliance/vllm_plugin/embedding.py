"""The vocabulary table: the embedding lookup and the head, from one copy - in 4 or 8 bits, or kept in bf16.

Logits are fp32. In bf16 a logit of 16 to 32 has a step of 0.125, which turns near ties into exact ones: the largest
single error of the whole model (docs/fidelity.md).

A tied table is packed once: the head's parameters are the embedding's. Rows are gathered from the packed layout
(torch's through the measured pattern), so no row-major copy is kept beside it. The head obeys the same rule as every
linear layer: more than one row never reaches torch's one-row kernel. The rows that pad the vocabulary are zero.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from appliance.errors import ModelError
from appliance.kernels import native
from appliance.kernels.dequantize import linear_bf16
from appliance.kernels.registry import TABLE
from appliance.quantize.format import PACKED, SCALE, ZERO, Int4Config
from appliance.vllm_plugin.linear import Int4Weights, Packed, pack_layer, threshold
from appliance.vllm_plugin.mapped import Mapped

TIED = "int4_tied_to"


@contextmanager
def quantized_tables(quantization: Any, vocabulary: int) -> Iterator[None]:
    """While models are built in here, tables of at least `vocabulary` rows that are given no quantization get this one.

    Half of vLLM's model files (Gemma, Mixtral, Falcon, ...) do not hand it to their table; that is an omission and
    no statement, and the table is the largest tensor of a small model.
    """
    original = VocabParallelEmbedding.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("quant_config") is None and given.get("quant_method") is None and (
                given["num_embeddings"] >= vocabulary):
            given["quant_config"] = quantization
        call = signature.bind_partial()
        call.arguments.update(given)
        original(*call.args, **call.kwargs)

    VocabParallelEmbedding.__init__ = build
    try:
        yield
    finally:
        VocabParallelEmbedding.__init__ = original


class Int4TableMethod(Int4Weights, QuantizeMethodBase):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's quantize method of an int4 embedding table or head. Several models give their table no name."""

    kind = TABLE

    def __init__(self, fields: Int4Config, group: int, prefix: str, *, prepared: Mapped | None = None) -> None:
        super().__init__(fields, group, prefix or "embed_tokens", bits=fields.stored_table_bits, prepared=prepared)

    def create_weights(self, layer: Module, input_size_per_partition: int, output_partition_sizes: list[int],
                       *args: Any, **kwargs: Any) -> None:
        """As every layer's. Some models look whether their table has a `weight` (Cohere), or of which type it is
        (Gemma 3n): they find its shape and type, and no values (past Module.__setattr__: it is no parameter)."""
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **kwargs)
        shape = (sum(output_partition_sizes), input_size_per_partition)
        object.__setattr__(layer, "weight", torch.empty(shape, dtype=torch.bfloat16, device="meta"))

    def tie_weights(self, layer: Module, embed_tokens: Module) -> Module:
        """Make the head use the table's parameters, before loading. Returns the head."""
        if not isinstance(embed_tokens.quant_method, Int4TableMethod):
            raise ModelError("head and table are tied but not quantized alike",
                             why="the config quantizes the head and ignores the table", do="quantize both or neither")
        for name in (PACKED, SCALE, ZERO):
            if hasattr(embed_tokens, name):
                setattr(layer, name, getattr(embed_tokens, name))
            else:  # the table is mapped; sharing comes after loading
                delattr(layer, name)
        # Past Module.__setattr__: the table must not become a submodule of the head.
        object.__setattr__(layer, TIED, embed_tokens)
        return layer

    def process_weights_after_loading(self, layer: Module) -> None:
        """Pack; for a tied pair the first of both packs and the other one shares."""
        table = getattr(layer, TIED, layer)
        if not hasattr(table, "int4"):
            pack_layer(table, self.fields, self.group, TABLE, self.bits)
        if table is not layer:
            packed: Packed = table.int4
            for name in (PACKED, SCALE, ZERO):
                if hasattr(layer, name):
                    delattr(layer, name)
            for name in packed.names:
                layer.register_parameter(name, getattr(table, name))
            layer.int4 = packed

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits: hidden states bf16 [..., K] times the table, fp32 [..., N]. Runs outside the compiled graph."""
        packed: Packed = layer.int4
        shape = packed.shape
        flat = x.reshape(-1, shape.k)
        if packed.blocked:
            out = native.linear(flat, packed.tensors(layer)[0], shape, wide=True)
        else:
            out = torch.empty((flat.shape[0], shape.n), dtype=torch.float32)
            packed.kernel.linear(flat.contiguous(), packed.tensors(layer), shape, threshold(self.fields), out)
        return _shaped(out, x, layer, bias)

    def embedding(self, layer: Module, input_: Tensor) -> Tensor:
        """Rows of the table for token ids of any shape: bf16 [..., K]."""
        packed: Packed = layer.int4
        shape = packed.shape
        ids = input_.reshape(-1)
        if packed.kernel.name == native.NAME and self.fields.use_custom_op:
            rows = native.rows(ids, packed.tensors(layer)[0], shape, wide=False)
        elif self.fields.use_custom_op:
            rows = torch.ops.vllm.cpu_int4_rows(ids, packed.tensors(layer), packed.kernel.name, shape.n, shape.k,
                                                shape.group, shape.bits)
        else:
            rows = packed.kernel.rows(ids, packed.tensors(layer), shape).to(torch.bfloat16)
        return rows.view(*input_.shape, shape.k)


class KeptTableMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is not typed here
    """A table that stays bf16: vLLM's own lookup, and a head in fp32 without a second copy of the table."""

    def process_weights_after_loading(self, layer: Module) -> None:
        """Keep the weight as it is: a prepacked head could not be indexed by row."""

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits: hidden states bf16 [..., K] times the table, fp32 [..., N]."""
        weight: Tensor = layer.weight
        flat = x.reshape(-1, weight.shape[1])
        out = torch.empty((flat.shape[0], weight.shape[0]), dtype=torch.float32)
        linear_bf16(flat, weight, out)
        return _shaped(out, x, layer, bias)

    def embedding(self, layer: Module, input_: Tensor) -> Tensor:
        """Rows of the table for token ids of any shape: bf16 [..., K]."""
        return functional.embedding(input_, layer.weight)


def _shaped(out: Tensor, x: Tensor, layer: Module, bias: Tensor | None) -> Tensor:
    """Logits with the head's bias, which some model files (Phi-3.5-MoE) load and do not hand on."""
    if bias is None:
        bias = getattr(layer, "bias", None)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], out.shape[1])
