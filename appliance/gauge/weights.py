"""All linears of one model, one after the other, as one step of it multiplies them: rows in, tokens per second out.

Order: `threads` and `rows` (lists), `kernel`, `variants` (native instruction sets, [""]: the one in use), `routes`
(see `_multiply`), `layers` (`n`, `k`, `group`, `bits`, `count`, `head`), `prepared` (folder with the
weights mapped, or empty: made-up ones), `mib` (most memory for made-up weights), `budget_s` (for each figure).

A head sees all rows of a decode step and one row of a prompt. Attention, norms and the server are not in it; a whole
worker is measured elsewhere.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from appliance.errors import ConfigError
from appliance.gauge.clock import repeat
from appliance.kernels.aten import AtenKernel
from appliance.kernels.library import load
from appliance.kernels.native import library_gemm, linear
from appliance.kernels.reference import Portable
from appliance.kernels.registry import LINEAR, TABLE, Kernel, LayerShape, kernel_named, torch_host
from appliance.prepared import INDEX, WEIGHTS, read_index
from appliance.quantize.format import HEADS
from appliance.report import Event

DECODE_ROWS = 16
"""More rows than this are a prompt."""
THRESHOLD, ANY_ROWS = 2, 1 << 30
"""Rows from which torch's kernel leaves them to the dequantize route."""
INT4, GEMMS = "int4", {"bf16": torch.bfloat16, "fp32": torch.float32}
READ_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Step:
    """One multiplication of a step."""

    layer: LayerShape
    tensors: Sequence[Tensor]
    head: bool


def measure(order: Mapping[str, Any], emit: Event) -> None:
    """One figure `tok/s` for each combination of threads, variant, route and rows."""
    torch.set_num_threads(max(order["threads"]))
    kernel = kernel_named(order["kernel"])
    steps = _steps(order, kernel)
    with torch.inference_mode():
        for variant in order["variants"]:
            emit({"event": "trying", "settings": {"threads": order["threads"][0], "kernel": kernel.name,
                                                  "variant": variant, "route": order["routes"][0]}})
            use(variant)
            for threads in order["threads"]:
                torch.set_num_threads(threads)
                for rows in order["rows"]:
                    for route in order["routes"]:
                        settings = {"threads": threads, "rows": rows, "kernel": kernel.name, "variant": variant,
                                    "route": route}
                        emit({"event": "trying", "settings": settings})
                        seconds = repeat(_pass(kernel, steps, rows, route), budget_s=order["budget_s"])
                        emit({"event": "figure", "settings": settings,
                              "figures": {"tok/s": [rows / s for s in seconds]}})


def use(variant: str) -> None:
    """Switch to an instruction set of the native kernel. Raises ConfigError when this machine cannot run it."""
    if not variant:
        return
    library = load().library
    try:
        if library is None:
            raise ValueError(load().refusal)
        library.use(variant)
    except ValueError as error:
        raise ConfigError(f"the variant {variant} cannot be measured", why=str(error)) from None


def _pass(kernel: Kernel, steps: Sequence[Step], rows: int, route: str) -> Callable[[], None]:
    """One step of the model with so many rows. Inputs and outputs of equal sizes share their memory, as they do in a
    model whose activations stay in the caches."""
    generator = torch.Generator().manual_seed(1)
    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    calls: list[tuple[Tensor, Step, Tensor]] = []
    for step in steps:
        m = 1 if step.head and rows > DECODE_ROWS else rows
        key_in, key_out = (m, step.layer.k), (m, step.layer.n)
        if key_in not in inputs:
            inputs[key_in] = torch.randn(*key_in, generator=generator).to(torch.bfloat16)
        outputs.setdefault(key_out, torch.empty(key_out, dtype=torch.bfloat16))
        calls.append((inputs[key_in], step, outputs[key_out]))

    multiply = _multiply(kernel, route)

    def once() -> None:
        for x, step, out in calls:
            multiply(x, step, out)

    return once


def _multiply(kernel: Kernel, route: str) -> Callable[[Tensor, Step, Tensor], None]:
    """How one multiplication is made: as the kernel serves it (`own`; of the native one never by torch's GEMM), by
    torch's GEMM of a type on dequantized blocks (GEMMS), in torch's int4 kernel for any number of rows (`int4`)."""
    host = torch_host()
    if kernel.name == "aten" and route in GEMMS:
        kernel = AtenKernel(host=replace(host, gemm=GEMMS[route]))
    threshold = ANY_ROWS if route == INT4 else THRESHOLD

    def own(x: Tensor, step: Step, out: Tensor) -> None:
        kernel.linear(x, step.tensors, step.layer, threshold, out)

    def native(x: Tensor, step: Step, out: Tensor) -> None:  # not `kernel.linear`, which chooses a route by itself
        out.copy_(linear(x, step.tensors[0], step.layer, wide=False))

    def library(x: Tensor, step: Step, out: Tensor) -> None:
        if x.shape[0] > 1:
            library_gemm(x, step.tensors[0], step.layer, GEMMS[route], out)
        else:
            native(x, step, out)

    if kernel.name != "native":
        return own
    return library if route in GEMMS else native


def _steps(order: Mapping[str, Any], kernel: Kernel) -> list[Step]:
    if order.get("prepared") and kernel.name == "native":
        return list(_mapped(Path(order["prepared"])))
    return list(_made_up(order["layers"], kernel, int(order["mib"]) << 20))


def _mapped(folder: Path) -> Iterator[Step]:
    """The model's own weights: the page cache's memory, shared with a running worker."""
    index, broken = read_index((folder / INDEX).read_text("utf-8"))
    if index is None:
        raise ConfigError(f"{folder} cannot be measured", why=broken)
    with open(folder / WEIGHTS, "rb", buffering=0) as file:
        block = bytearray(READ_BYTES)
        while file.readinto(block):
            pass  # into the page cache: the first figure is no disk's
        data = mmap.mmap(file.fileno(), index.bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    tables = [run for run in index.runs if run.kind == TABLE]
    heads = [run for run in tables if run.name.rpartition(".")[2] in HEADS] or tables[-1:]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for run in index.runs:
            if run.kind == LINEAR or run in heads:
                layer = LayerShape(n=run.n, k=run.k, group=run.group, bits=run.bits, kind=run.kind)
                yield Step(layer=layer, head=run.kind == TABLE, tensors=(
                    torch.frombuffer(data, dtype=torch.uint8, count=run.bytes, offset=run.offset),))


def _made_up(layers: Sequence[Mapping[str, Any]], kernel: Kernel, limit_bytes: int) -> Iterator[Step]:
    """Random codes of the model's shapes, as many different ones as the limit allows."""
    total = sum(entry["n"] * entry["k"] * entry["bits"] // 8 * entry["count"] for entry in layers)
    share = min(1.0, limit_bytes / max(1, total))
    for entry in layers:
        layer = LayerShape(n=entry["n"], k=entry["k"], group=entry["group"], bits=entry["bits"],
                           kind=TABLE if entry["head"] else LINEAR)
        if reason := kernel.why_not(layer, torch_host()):
            raise ConfigError(f"{kernel.name} cannot be measured", why=reason)
        first = list(kernel.prepare(_random(layer), direct=True).values())
        different = max(1, int(entry["count"] * share))
        copies = [first, *([tensor.clone() for tensor in first] for _ in range(different - 1))]
        for number in range(entry["count"]):
            yield Step(layer=layer, head=bool(entry["head"]), tensors=copies[number % different])


def _random(layer: LayerShape) -> Portable:
    generator = torch.Generator().manual_seed(layer.n + layer.k)
    packed = torch.randint(0, 256, (layer.n, layer.k * layer.bits // 8), dtype=torch.uint8, generator=generator)
    groups = layer.k // layer.group
    return Portable(packed=packed, scale=torch.full((layer.n, groups), 0.01, dtype=torch.bfloat16),
                    zero=torch.zeros(layer.n, groups, dtype=torch.bfloat16), bits=layer.bits)
