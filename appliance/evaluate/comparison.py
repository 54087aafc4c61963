"""Scores a stored model on a text, and where its source is given, both of them on the same tokens.

Runs in the worker's environment. Rules: the second half of each window is scored; differences are taken token by token
from the whole distributions; all sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.evaluate.streaming import Model
from appliance.evaluate.weights import Weights

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 24
"""Logits of one model held at once: 64 MB in float32, four times that in work."""

Event = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Perplexities, and of a pair: share of the same first choice, mean KL divergence, mean and largest difference.

    Differences are of the log-probability of the token that stands in the text, in nats. None: there was no source.
    `streamed`: no model was ever in memory as a whole.
    """

    tokens: int
    perplexity: float
    source_perplexity: float | None
    same_first_choice: float | None
    divergence: float | None
    mean_difference: float | None
    largest_difference: float | None
    streamed: bool


def score(folder: Path, stored: Weights, source: Weights | None, windows: torch.Tensor, event: Event) -> Score:
    """Score the stored model of `folder` on token ids [n, length], against `source` unless that is None."""
    import torch

    work = [("the stored model", stored)] + ([("its source", source)] if source is not None else [])
    models: list[Model] = []
    first = windows.shape[1] // 2
    wanted = windows[:, first + 1 :].reshape(-1, 1)
    total = len(wanted)
    for name, weights in work:
        event({"event": "phase", "phase": "evaluating", "note": name})
        models.append(Model(folder, weights))
        models[-1].read(windows, first)
    event({"event": "phase", "phase": "comparing", "note": ""})
    step = max(1, BLOCK_ELEMENTS // models[0].logits(0, 1).shape[-1])
    sums = torch.zeros(5, dtype=torch.float64)  # -log p stored, -log p source, same choice, divergence, |difference|
    largest = 0.0
    for start in range(0, total, step):
        stop = min(start + step, total)
        ours = _normalized(models[0].logits(start, stop))
        mine = ours.gather(1, wanted[start:stop]).double()
        sums[0] -= mine.sum()
        if source is not None:
            theirs = _normalized(models[1].logits(start, stop))
            other = theirs.gather(1, wanted[start:stop]).double()
            sums[1] -= other.sum()
            sums[2] += (ours.argmax(-1) == theirs.argmax(-1)).sum()
            sums[4] += (mine - other).abs().sum()
            largest = max(largest, float((mine - other).abs().max()))
            ours.neg_().add_(theirs)
            sums[3] += theirs.exp_().mul_(ours).sum(-1).sum(dtype=torch.float64)
        event({"event": "progress", "done_bytes": stop, "total_bytes": total, "item": ""})
    mean = [float(value) for value in sums / total]
    pair = source is not None
    return Score(
        tokens=total, perplexity=math.exp(mean[0]), streamed=all(model.streamed for model in models),
        source_perplexity=math.exp(mean[1]) if pair else None, same_first_choice=mean[2] if pair else None,
        divergence=mean[3] if pair else None, mean_difference=mean[4] if pair else None,
        largest_difference=largest if pair else None,
    )


def _normalized(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, in place."""
    return logits.sub_(logits.logsumexp(-1, keepdim=True))
