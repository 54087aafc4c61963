"""The clipping search: per group, the scale and zero with the smallest squared error of the weights.

Starts from the min/max grid, tries narrower ranges, and fits each by least squares to the codes it gives. Runs in the
worker's environment. Rules: only values that bf16 holds are tried, so what is chosen is what is stored; a group is
never worse than by min/max; the native library, where it loads, does the same arithmetic in the same order and gives
the same bits as torch here.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import appliance
from appliance.quantize.grid import SMALLEST_STEP, middle

if TYPE_CHECKING:
    import torch

CLIPS = ((1.0, 1.0), (0.95, 0.95), (0.9, 0.9), (0.85, 0.85), (0.8, 0.8), (0.75, 0.75), (1.0, 0.9), (0.9, 1.0),
         (1.0, 0.8), (0.8, 1.0))
"""Ranges that are tried, as shares of the half below and above the middle."""
FITS = 2
"""Least squares fits from each range."""
THREAD_GROUPS = 4096
"""Groups from which another thread is worth its start."""
LIBRARY = Path(appliance.__file__).with_name("kernels") / "libint4.so"


def search(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int,
           counts: torch.Tensor | None = None) -> None:
    """Improve scale and zero float32 [n] (of the min/max grid) of groups float32 [n, g] in place.

    `counts` float32 [g]: how much an error in each column counts; None: all alike."""
    native = _native()
    if native is None:
        _search(groups, scale, zero, bits, counts)
        return
    import torch

    clips = torch.tensor(CLIPS, dtype=torch.float32)

    def part(start: int, stop: int) -> None:
        each = None if counts is None else counts.data_ptr()
        native(groups[start:].data_ptr(), each, stop - start, groups.shape[1], bits, clips.data_ptr(), len(CLIPS), FITS,
               scale[start:].data_ptr(), zero[start:].data_ptr())

    n = len(groups)
    threads = max(1, min(torch.get_num_threads(), n // THREAD_GROUPS))
    if threads == 1:
        part(0, n)
        return
    cuts = [n * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, cuts[:-1], cuts[1:]))


@functools.cache
def _native() -> ctypes._NamedFuncPointer | None:
    """The function of the library; None where there is none."""
    try:
        found: ctypes._NamedFuncPointer = ctypes.CDLL(str(LIBRARY)).int4_fit_groups
    except (OSError, AttributeError):
        return None
    pointer, count, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    found.argtypes = [pointer, pointer, count, small, small, pointer, small, small, pointer, pointer]
    found.restype = None
    return found


def _search(groups: torch.Tensor, best_scale: torch.Tensor, best_zero: torch.Tensor, bits: int,
            counts: torch.Tensor | None = None) -> None:
    """The same in torch, several times slower. Columns come first, since the library adds them up one by one."""
    import torch

    low, high, steps = -float(middle(bits)), float(middle(bits) - 1), float((1 << bits) - 1)
    size = float(groups.shape[1]) if counts is None else _sum(counts[:, None])
    first, last = groups.amin(-1), groups.amax(-1)
    centre, half = last * 0.5 + first * 0.5, last * 0.5 - first * 0.5
    w = (groups - centre[:, None]).T.contiguous()

    def counted(columns: torch.Tensor) -> torch.Tensor:
        return columns if counts is None else columns * counts[:, None]

    mean = _sum(counted(w)) / size
    best = torch.full_like(centre, torch.inf)

    def attempt(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Keep what is better; returns the codes."""
        shifted = zero - centre
        codes = (w - shifted) * (1.0 / scale)
        codes = torch.where(codes > low, codes, low)
        codes = torch.where(codes < high, codes, high).round()
        error = _sum(counted(((codes * scale + shifted) - w).square()))
        better = error < best
        best.copy_(torch.where(better, error, best))
        best_scale.copy_(torch.where(better, scale, best_scale))
        best_zero.copy_(torch.where(better, zero, best_zero))
        return codes

    attempt(best_scale.clone(), best_zero.clone())
    for below, above in CLIPS:
        start, stop = centre - half * _float32(below), centre + half * _float32(above)
        step = (stop - start) / steps
        scale, zero = _step(step), _bf16(start - low * step)
        for fit in range(FITS + 1):
            codes = attempt(scale, zero)
            if fit == FITS:
                break
            each = counted(codes)
            total = _sum(each)
            q = total / size
            slope = (_sum(each * w) - total * mean) / (_sum(each * codes) - total * q)
            scale, zero = _step(slope), _bf16((mean - q * slope) + centre)


def _sum(columns: torch.Tensor) -> torch.Tensor:
    """[g, n] -> [n], one column after the other."""
    total = columns[0].clone()
    for column in columns[1:]:
        total += column
    return total


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _bf16(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values.to(torch.bfloat16).float()


def _step(values: torch.Tensor) -> torch.Tensor:
    import torch

    return _bf16(torch.where(values > SMALLEST_STEP, values, SMALLEST_STEP))
