"""Child of test_layout: packs random codes for every N under this process's ATen capability.

`python -m tests.kernels.pack_everything OUT` writes a torch file: `capability`, and per (N, K) what was found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

CHANNELS = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 576, 960, 49152)
COLUMNS = (64, 192)


def main(out: str) -> None:
    import torch

    from appliance.kernels import layout, reference

    found: dict[Any, Any] = {"capability": torch.backends.cpu.get_cpu_capability()}
    for n in CHANNELS:
        for k in COLUMNS[:1] if n > 10_000 else COLUMNS:
            codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + k))
            packed = layout.pack(codes)
            runs = layout.layout_of(n)
            ids = torch.tensor([0, n - 1, n // 2, n // 3])
            found[n, k] = {
                "codes": codes,
                "packed": packed,
                "chunked": layout.pack_portable(reference.pack(codes), chunk_bytes=1 << 15),
                "runs": None if runs is None else [asdict(run) for run in runs],
                "rows": None if runs is None else layout.code_rows(packed, runs, ids),
                "ids": ids,
            }
    found["dequant"] = in_child(dequant_agrees)
    torch.save(found, out)


def dequant_agrees() -> bool:
    """Direct and split-halves weights, whole and row by row, have the same bits under this capability."""
    import torch

    from appliance.kernels import reference
    from appliance.kernels.registry import LayerShape, kernel_named

    kernel = kernel_named("aten")
    for n, k, group in ((16, 64, 32), (80, 576, 64), (144, 192, 64), (192, 896, 128), (576, 256, 256)):
        shape = LayerShape(n=n, k=k, group=group)
        portable = reference.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), group)
        direct = list(kernel.prepare(portable, direct=True).values())
        halves = list(kernel.prepare(portable, direct=False).values())
        x = torch.eye(k, dtype=torch.bfloat16)  # the product is the weight itself, so it shows every block route
        products = [torch.empty(k, n, dtype=torch.bfloat16) for _ in (direct, halves)]
        for tensors, out in zip((direct, halves), products, strict=True):
            kernel.linear(x, tensors, shape, 2, out)
        if not (torch.equal(*products) and torch.equal(kernel.whole(direct, shape), kernel.whole(halves, shape))):
            return False
    return True


def in_child(check: Callable[[], bool]) -> str:
    """`True`, `False`, or the signal that ended the check: a forced instruction set may not exist here."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else str({0: True, 2: False}.get(status >> 8))


if __name__ == "__main__":
    main(sys.argv[1])
