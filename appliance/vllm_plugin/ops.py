"""The two custom operators, opaque to torch.compile: `vllm::cpu_int4_linear` and `vllm::cpu_int4_rows`.

Opaque, because vLLM traces once and drops all guards: a branch on the number of rows in traced code would be frozen.
Inside an operator everything is eager ATen. Operators take plain values: the kernel by name, the layer as numbers.

This module has no `from __future__ import annotations`: torch reads the operators' schemas from real annotations.
"""

import functools

import torch
from torch import Tensor

from appliance.kernels.registry import LayerShape, kernel_named


@functools.cache
def _shape(n: int, k: int, group: int, bits: int = 4) -> LayerShape:
    """Cached: this runs for every layer of every token."""
    return LayerShape(n=n, k=k, group=group, bits=bits)


def int4_linear(
    x: Tensor, tensors: list[Tensor], kernel: str, n: int, k: int, group: int, threshold: int, wide: bool
) -> Tensor:
    """x bf16 or fp32 [M, K], any strides, times an int4 weight: [M, N], fp32 if `wide`, else bf16.

    From `threshold` rows on by dequantizing.
    """
    out = torch.empty((x.shape[0], n), dtype=torch.float32 if wide else torch.bfloat16)
    if x.shape[0]:
        kernel_named(kernel).linear(x.contiguous(), tensors, _shape(n, k, group), threshold, out)
    return out


def _linear_meta(
    x: Tensor, tensors: list[Tensor], kernel: str, n: int, k: int, group: int, threshold: int, wide: bool
) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=torch.float32 if wide else torch.bfloat16)


def int4_rows(ids: Tensor, tensors: list[Tensor], kernel: str, n: int, k: int, group: int, bits: int) -> Tensor:
    """Rows `ids` (int64 [T]) of an int4 table: bf16 [T, K]."""
    return kernel_named(kernel).rows(ids, tensors, _shape(n, k, group, bits)).to(torch.bfloat16)


def _rows_meta(ids: Tensor, tensors: list[Tensor], kernel: str, n: int, k: int, group: int, bits: int) -> Tensor:
    return ids.new_empty((ids.shape[0], k), dtype=torch.bfloat16)


def register_ops() -> None:
    """Define both operators in this process; a second call changes nothing."""
    from vllm.utils.torch_utils import direct_register_custom_op

    if not hasattr(torch.ops.vllm, "cpu_int4_linear"):
        direct_register_custom_op("cpu_int4_linear", int4_linear, fake_impl=_linear_meta, dispatch_key="CPU")
        direct_register_custom_op("cpu_int4_rows", int4_rows, fake_impl=_rows_meta, dispatch_key="CPU")
