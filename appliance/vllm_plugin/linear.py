"""The int4 linear layer, and what it shares with the table: parameters, packing after loading or a mapped weight, the
call.

Rules: a tensor whose shape does not fit the config is refused at load; after packing a layer holds its kernel's tensors
and nothing else; a bias is added once, after the multiplication; calls of `dequant_threshold` rows or more never reach
torch's one-row kernel (`prefill_dequant: false` lifts that, and no plan chooses it).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.utils import set_weight_attrs

from appliance.errors import ModelError
from appliance.kernels import native
from appliance.kernels.reference import Portable
from appliance.kernels.registry import LINEAR, Kernel, LayerShape, choose, kernels, torch_host
from appliance.quantize.format import PACKED, SCALE, ZERO, Int4Config, packed_columns
from appliance.vllm_plugin import ops
from appliance.vllm_plugin.mapped import BLOCKED, Mapped
from appliance.vllm_plugin.rows import ROWS, expect_rows, settle_rows

logger = init_logger("vllm.cpu_int4")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What a loaded layer knows of itself; its tensors are the parameters called `names`."""

    kernel: Kernel
    shape: LayerShape
    names: tuple[str, ...]
    blocked: bool
    """The native operator takes the one tensor at every number of rows: no Python in between, nothing to choose."""

    def tensors(self, layer: Module) -> list[Tensor]:
        return [getattr(layer, name) for name in self.names]


class Int4Weights:
    """What the methods of a linear layer and of a table share: the config, and the checkpoint's three tensors or the
    prepared weight that stands for them."""

    kind = LINEAR

    def __init__(self, fields: Int4Config, group: int, prefix: str, *, bits: int = 4,
                 prepared: Mapped | None = None) -> None:
        self.fields = fields
        self.group = group
        self.prefix = prefix
        self.bits = bits
        self.prepared = prepared
        ops.register_ops()

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        n, k = sum(output_partition_sizes), input_size_per_partition
        prepared, self.prepared = self.prepared, None
        if prepared is None or not take_prepared(
            layer, prepared, self.prefix, LayerShape(n=n, k=k, group=self.group, kind=self.kind, bits=self.bits),
            self.fields,
        ):
            create_parameters(layer, n, k, input_size, self.group, self.prefix, extra_weight_attrs, self.bits)
        elif self.kind == LINEAR:
            expect_rows(layer, n, extra_weight_attrs)


class Int4LinearMethod(Int4Weights, LinearMethodBase):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's quantize method of one int4 linear layer."""

    def process_weights_after_loading(self, layer: Module) -> None:
        if not hasattr(layer, "int4"):
            pack_layer(layer, self.fields, self.group, LINEAR)
        elif hasattr(layer, ROWS):
            settle_rows(layer, BLOCKED, layer.int4.shape, self.prefix)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = self.fields.wide_residual and isinstance(layer, RowParallelLinear) and torch.compiler.is_compiling()
        return multiply(layer, x, bias, self.fields, wide=wide)


class KeptLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM is not typed here
    """A linear layer that stays bf16; takes the fp32 activations that `wide_residual` may hand it."""

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = super().apply(layer, x.to(torch.bfloat16), bias)
        return out


def create_parameters(
    layer: Module, n: int, k: int, full_k: int, group: int, prefix: str, extra: dict[str, Any], bits: int = 4
) -> None:
    """Register the checkpoint's three tensors of an [N, K] weight, zero filled, with checking loaders."""
    if k % group:
        raise ModelError(f"layer {prefix} cannot be served", why=f"{k} columns are not whole groups of {group}",
                         do="use fewer tensor-parallel ranks, or quantize again with a smaller group size")
    loader = extra.pop("weight_loader")
    for name, columns, full, dtype in (
        (PACKED, packed_columns(k, bits), packed_columns(full_k, bits), torch.uint8),
        (SCALE, k // group, full_k // group, torch.bfloat16),
        (ZERO, k // group, full_k // group, torch.bfloat16),
    ):
        parameter = Parameter(torch.zeros(n, columns, dtype=dtype), requires_grad=False)
        set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0, **extra})
        set_weight_attrs(parameter, {"weight_loader": checked(loader, f"{prefix}.{name}", full, dtype, group)})
        layer.register_parameter(name, parameter)


def checked(loader: Callable[..., Any], name: str, columns: int, dtype: torch.dtype, group: int) -> Callable[..., Any]:
    """The loader, refusing a tensor of another width or kind with a sentence instead of a bare assertion."""

    @functools.wraps(loader)
    def load(param: Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if loaded_weight.ndim != 2 or loaded_weight.shape[1] != columns:
            raise ModelError(f"tensor {name} does not fit its config",
                             why=f"shape {list(loaded_weight.shape)}, expected {columns} columns at group size {group}",
                             do="quantize the model again")
        if (loaded_weight.dtype == torch.uint8) != (dtype == torch.uint8):
            raise ModelError(f"tensor {name} does not fit its config",
                             why=f"type {loaded_weight.dtype}, expected {dtype}", do="quantize the model again")
        return loader(param, loaded_weight, *args, **kwargs)

    return load


def take_prepared(layer: Module, prepared: Mapped, prefix: str, shape: LayerShape, fields: Int4Config) -> bool:
    """Give the layer its mapped weight instead of the checkpoint's tensors, if there is one that its kernel reads."""
    choice = choose(shape, torch_host(), kernels(), fields.kernel)
    weight = prepared.find(prefix, shape) if choice.kernel.layout_id == prepared.index.layout else None
    if weight is None:
        return False
    layer.register_parameter(BLOCKED, Parameter(weight, requires_grad=False))
    layer.int4 = packed_by(choice.kernel, shape, (BLOCKED,))
    return True


def pack_layer(layer: Module, fields: Int4Config, group: int, kind: str, bits: int = 4) -> None:
    """Replace the checkpoint's tensors by those of the first kernel that takes the layer."""
    portable = Portable(packed=layer.weight_packed.data, scale=layer.weight_scale.data, zero=layer.weight_zero.data,
                        bits=bits)
    shape = LayerShape(n=portable.n, k=portable.k, group=group, kind=kind, bits=bits)
    choice = choose(shape, torch_host(), kernels(), fields.kernel)
    for name, reason in choice.refused.items():
        logger.warning_once("kernel %s not used for %dx%d: %s", name, shape.n, shape.k, reason)
    logger.info_once("kernel %s for %s layers, layout %s", choice.kernel.name, kind, choice.kernel.layout_id)
    tensors = choice.kernel.prepare(portable, direct=fields.direct_dequant)
    for name in (PACKED, SCALE, ZERO):
        delattr(layer, name)
    for name, tensor in tensors.items():
        layer.register_parameter(f"int4_{name}", Parameter(tensor, requires_grad=False))
    layer.int4 = packed_by(choice.kernel, shape, tuple(f"int4_{name}" for name in tensors))


def packed_by(kernel: Kernel, shape: LayerShape, names: tuple[str, ...]) -> Packed:
    """What the layer knows of itself, its kernel's fixed facts worked out."""
    return Packed(kernel=kernel, shape=shape, names=names, blocked=kernel.name == native.NAME and not torch_host().amx)


def threshold(fields: Int4Config) -> int:
    """The smallest number of rows that takes the dequantize route."""
    return fields.dequant_threshold if fields.prefill_dequant else sys.maxsize


def multiply(layer: Module, x: Tensor, bias: Tensor | None, fields: Int4Config, *, wide: bool = False) -> Tensor:
    """x bf16 or fp32 [..., K] times the layer's weight, plus the bias: [..., N], fp32 if `wide`, else bf16."""
    packed: Packed = layer.int4
    shape = packed.shape
    flat = x if x.dim() == 2 else x.reshape(-1, shape.k)
    if fields.use_custom_op and packed.blocked:
        out = native.linear(flat, getattr(layer, packed.names[0]), shape, native.NO_BIAS if bias is None else bias,
                            wide=wide)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], shape.n)
    if not fields.use_custom_op and torch.compiler.is_compiling():
        # Traced once for every number of rows, so a branch on it would be frozen: always the safe route.
        weight = packed.kernel.whole(packed.tensors(layer), shape)
        out = torch.mm(flat.to(weight.dtype), weight.t()).to(torch.float32 if wide else torch.bfloat16)
    else:
        call = torch.ops.vllm.cpu_int4_linear if fields.use_custom_op else ops.int4_linear
        out = call(flat, packed.tensors(layer), packed.kernel.name, shape.n, shape.k, shape.group, threshold(fields),
                   wide)
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], shape.n)
