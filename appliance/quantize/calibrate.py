"""Calibrated codes: chosen so that a layer's results on a text change least, each rounding made good by the next ones.

One forward pass over a short text that ships with the package (`calibration.txt`). Each linear is quantized when the
pass reaches it, from the moments X^T X of what it is given, and goes on with its quantized weights; so later layers
make good what earlier ones lost (Frantar et al., GPTQ, 2022). Runs in the worker's environment.
Rules: one layer in memory at a time; more than `WIDEST` columns are taken in parts that know nothing of each other;
scales and zeros come from the search, weighted by the energy of the inputs, and are rounded before a code is chosen; a
layer whose moments cannot be used (a text that never reaches it, a value that is not finite) is left to the caller. The
result depends on the last bits of matrix products, so another CPU may choose a few other codes; the key does not depend
on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import ModelError
from appliance.evaluate.streaming import Model
from appliance.evaluate.text import WINDOW, read_text, windows
from appliance.evaluate.weights import Weights
from appliance.quantize.grid import dequantize, whole_range
from appliance.quantize.search import search

if TYPE_CHECKING:
    import torch

TEXT = Path(__file__).with_name("calibration.txt")
TOKENS = 8 * WINDOW
WIDEST = 4096
"""Columns whose moments are held at once: three matrices of 64 MB."""
DAMPING = 0.01
"""Share of the mean moment that is added to each: the text is a sample."""
BLOCK = 64
"""Columns whose roundings are made good at once within, then in one product beyond."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """One linear: codes uint8 [n, K], scale and zero bf16 [n, K / group], and the energies of weights and error."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    signal: float
    noise: float


def calibrate(folder: Path, weights: Weights, groups: dict[str, int], done: Callable[[str, Quantized], None]) -> None:
    """Quantize the linears `groups` (module -> group size) of the model whose config.json and tokenizer `folder` has.

    `done(module, result)` is called for each in the order of the pass; modules that the pass does not reach, or that
    cannot be calibrated, are left out. Raises ModelError when the model cannot be run at all.
    """
    ids = windows(read_text(TEXT), folder, TOKENS // 2)
    rows = max((weight.rows for weight in weights.values() if len(weight.shape) == 2), default=0)
    if int(ids.max()) >= rows:
        raise ModelError("the model cannot be calibrated", why="its tokenizer has more tokens than its table")
    moments = _Moments()

    def visit(module: str, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        group = groups.get(module)
        if group is None:
            return None
        found = _quantize(weight, moments.of(given), group)
        if found is None:
            return None
        done(module, found)
        return dequantize(found.codes, found.scale, found.zero)

    Model(folder, weights, visit=visit, wanted=groups).read(ids)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Columns [start, stop): the factor of their inverse moments, and how much an error in each column counts."""

    start: int
    stop: int
    factor: torch.Tensor
    counts: torch.Tensor


class _Moments:
    """The parts of the last input: q, k and v are given the same one."""

    def __init__(self) -> None:
        self._given: Any = None
        self._parts: list[_Part] | None = None

    def of(self, given: torch.Tensor) -> list[_Part] | None:
        """None when they cannot be used."""
        if given is not self._given:
            self._given, self._parts = given, _split(given.reshape(-1, given.shape[-1]))
        return self._parts


def _split(x: torch.Tensor) -> list[_Part] | None:
    columns = x.shape[1]
    step = -(-columns // -(-columns // WIDEST) // 256) * 256
    parts = []
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        factor, energy = _factor(x[:, start:stop]), x[:, start:stop].square().mean(dim=0)
        if factor is None:
            return None
        parts.append(_Part(start=start, stop=stop, factor=factor, counts=energy / energy.mean()))
    return parts


def _factor(x: torch.Tensor) -> torch.Tensor | None:
    """U with U^T U = (X^T X + damping)^-1, in upper triangular form; None when there is none."""
    import torch

    moments = x.T @ x
    mean = float(moments.diagonal().mean())
    if not 0 < mean < float("inf"):
        return None
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        damped = moments.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            del damped
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
    return None


def _quantize(weight: torch.Tensor, parts: list[_Part] | None, group: int) -> Quantized | None:
    import torch

    if parts is None:
        return None
    found = [_feedback(weight[:, part.start : part.stop], part, group) for part in parts]
    codes, scale, zero = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
    values = dequantize(codes, scale, zero)
    if not bool(torch.isfinite(values.to(torch.bfloat16)).all()):
        return None
    error = values.sub_(weight)
    return Quantized(codes=codes, scale=scale, zero=zero, signal=float(weight.square().sum(dtype=torch.float64)),
                     noise=float(error.square_().sum(dtype=torch.float64)))


def _feedback(weight: torch.Tensor, part: _Part, group: int,
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero, column by column; what a column lost is taken from those to its right."""
    import torch

    # Columns are worked on one by one: here each is a row, whose values lie side by side.
    w, factor, counts = weight.T.clone(memory_format=torch.contiguous_format), part.factor, part.counts
    columns, n = w.shape
    codes = torch.empty((columns, n), dtype=torch.uint8)
    scales, zeros = (torch.empty((columns // group, n), dtype=torch.bfloat16) for _ in range(2))
    block = max(group, BLOCK)
    for first in range(0, columns, block):
        last = min(first + block, columns)
        lost = torch.empty((last - first, n))
        for column in range(first, last):
            if column % group == 0:
                scale, zero = _grid(w[column : column + group].T.contiguous(), counts[column : column + group])
                scales[column // group], zeros[column // group] = scale, zero
            here = w[column]
            code = (here - zero).div_(scale).round_().clamp_(-8, 7)
            codes[column] = code + 8
            error = lost[column - first]
            torch.sub(code.mul_(scale).add_(zero), here, out=error).div_(factor[column, column])
            w[column + 1 : last].addr_(factor[column, column + 1 : last], error)
        w[last:].addmm_(factor[first:last, last:].T, lost)
    return codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous()


def _grid(groups: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero in float32, with values that bf16 holds; `counts`: see `_Part`."""
    scale, zero = (part.float() for part in whole_range(groups, 4))
    search(groups, scale, zero, 4, counts)
    return scale, zero
