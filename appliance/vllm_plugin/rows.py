"""Whether a model loads the rows of a weight in the order of the checkpoint, which is the order of a mapped weight.

Some vLLM models move rows while they load (the fused query, key and value of Falcon and Bloom stand head by head in
the checkpoint). A mapped weight skips loading, so instead of its tensors the model is given the numbers of their rows,
through the same loading code. Where they do not come back as 0, 1, 2, ... the mapped weight is put into that order in
memory. Rule: no list of models; what is not loaded at all is found missing as any tensor is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.logger import init_logger
from vllm.model_executor.utils import set_weight_attrs

from appliance.kernels import blocked
from appliance.kernels.reference import Portable
from appliance.kernels.registry import LayerShape
from appliance.prepared import LINEAR, Run
from appliance.quantize.format import PACKED

ROWS = "weight_rows"
"""Begins like the tensors it stands for, so that loading code which looks for a part of the name sees the same."""

logger = init_logger("vllm.cpu_int4")


def expect_rows(layer: Module, n: int, extra: Mapping[str, Any]) -> None:
    """Give the layer a parameter for the numbers of its rows, loaded as its weight would be."""
    rows = Parameter(torch.full((n, 1), -1, dtype=torch.int32), requires_grad=False)
    set_weight_attrs(rows, {"input_dim": 1, "output_dim": 0, **extra})
    layer.register_parameter(ROWS, rows)


def numbered(runs: Iterable[Run], rows: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The numbers of the rows of each mapped linear, part by part under the checkpoint's names."""
    for run in runs:
        if run.kind != LINEAR:
            continue
        first = 0
        for name in run.replaces:
            if not name.endswith(f".{PACKED}"):
                continue
            module = name.removesuffix(f".{PACKED}")
            yield f"{module}.{ROWS}", torch.arange(first, first + rows[module], dtype=torch.int32).unsqueeze(1)
            first += rows[module]


def settle_rows(layer: Module, name: str, shape: LayerShape, prefix: str) -> None:
    """Drop the numbers; where they are not in order, replace the mapped weight by one that is."""
    order = getattr(layer, ROWS).data.flatten().long()
    delattr(layer, ROWS)
    if torch.equal(order, torch.arange(shape.n)):
        return
    logger.info_once("rows of %s are loaded in another order than stored; such layers are held in memory", prefix)
    stored = blocked.unpack(getattr(layer, name).data, shape.n, shape.k, shape.group, shape.bits)
    moved = blocked.pack(Portable(packed=stored.packed[order], scale=stored.scale[order], zero=stored.zero[order],
                                  bits=shape.bits))
    delattr(layer, name)
    layer.register_parameter(name, Parameter(moved, requires_grad=False))
