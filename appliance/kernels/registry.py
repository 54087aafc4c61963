"""The registry of int4 kernels: one seam, so that a native kernel is one more entry.

A kernel says why it cannot take a layer on this host, packs the checkpoint's tensors for itself, and multiplies. The
first in the order of `kernels()` that does not refuse is chosen; every refusal keeps its reason. `portable` refuses
nothing.

Rules: `why_not` looks at shapes, host facts and the packed layout and never multiplies; `prepare` gives the packed
tensors alone, with no second copy unless asked; a kernel has no state but its host's facts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from appliance.kernels.host import TorchHost, read_torch_host
from appliance.kernels.reference import Portable

LINEAR, TABLE = "linear", "table"


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a kernel needs to know of a layer: N channels, K columns, columns per group, `linear` or `table`, bits of a
    code (8 in some tables)."""

    n: int
    k: int
    group: int
    kind: str = LINEAR
    bits: int = 4


class Kernel(Protocol):
    """One way to multiply by an int4 weight. `tensors` are the values of `prepare`, in its order."""

    @property
    def name(self) -> str: ...

    @property
    def layout_id(self) -> str:
        """Names the packed bytes: equal ids mean that prepared tensors may be reused."""
        ...

    def why_not(self, layer: LayerShape, host: TorchHost) -> str | None:
        """Why this kernel does not take this layer on this host, or None."""
        ...

    def prepare(self, portable: Portable, *, direct: bool) -> dict[str, Tensor]:
        """The tensors to keep, by name. `direct` False adds a second copy where that makes many rows faster."""
        ...

    def linear(self, x: Tensor, tensors: Sequence[Tensor], layer: LayerShape, threshold: int, out: Tensor) -> None:
        """out[M, N] = x[M, K] @ W.t(). From `threshold` rows on, the dequantize route; x contiguous, bf16 or fp32;
        `out` bf16 or fp32."""
        ...

    def rows(self, ids: Tensor, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        """Rows `ids` (int64 [T]) of the weight, fp32 [T, K]: the embedding lookup."""
        ...

    def whole(self, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        """The weight in the GEMM type, [N, K], written so that a compiler can trace it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Choice:
    kernel: Kernel
    refused: Mapping[str, str]
    """Kernel name -> why it was not chosen; those after the chosen one were not asked."""


@functools.cache
def torch_host() -> TorchHost:
    """The facts of this process; they cannot change while it runs."""
    return read_torch_host()


@functools.cache
def kernels() -> tuple[Kernel, ...]:
    """Every kernel of this build, the preferred one first."""
    from appliance.kernels.aten import AtenKernel
    from appliance.kernels.library import load
    from appliance.kernels.native import NativeKernel
    from appliance.kernels.portable import PortableKernel

    host = torch_host()
    return (NativeKernel(host=host, loaded=load()), AtenKernel(host=host), PortableKernel(host=host))


@functools.cache
def kernel_named(name: str) -> Kernel:
    """The kernel of this name. Raises KeyError when this build has none."""
    for kernel in kernels():
        if kernel.name == name:
            return kernel
    raise KeyError(name)


def choose(layer: LayerShape, host: TorchHost, available: Sequence[Kernel], wanted: str = "auto") -> Choice:
    """The first kernel that takes the layer, from the `wanted` one on: what stands before it may be what it is to be
    served without."""
    refused: dict[str, str] = {}
    names = [kernel.name for kernel in available]
    if wanted != "auto" and wanted not in names:
        refused[wanted] = "this build has no such kernel"
    for kernel in available[names.index(wanted) if wanted in names else 0 :]:
        reason = kernel.why_not(layer, host)
        if reason is None:
            return Choice(kernel=kernel, refused=refused)
        refused[kernel.name] = reason
    raise LookupError(f"no kernel takes {layer}: {refused}")
