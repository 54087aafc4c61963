"""Child of test_layout: packs random codes for every N under this process's ATen capability, writes what it found.

`python -m tests.kernels.pack_everything OUT`: a torch file {N: {codes, packed, chunked, runs, rows_ok}} plus `capability`.
"""

from __future__ import annotations

import sys
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
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1])
