"""Measurements as pictures: bars in a terminal, PNG files where matplotlib happens to be installed.

Does: tokens per second over threads, and the roofline (tokens per second over rows that share one read of the weights,
against what the memory allows). Does not: measure or decide. Rule: matplotlib is no dependency; without it the sentence
says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance import measured
from appliance.errors import ConfigError
from appliance.facts import ModelFacts
from appliance.measured import BANDWIDTH, GB_S, OWN, PREFILL_TOK_S, TOK_S, WEIGHTS, Record, Trial

BAR = 32
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, kw_only=True)
class Point:
    """`rows` tokens for one read of the weights: measured, and what the memory alone would allow."""

    rows: int
    tok_s: float
    roof_tok_s: float

    @property
    def share(self) -> float:
        return self.tok_s / self.roof_tok_s if self.roof_tok_s else 0.0


def bytes_per_token(model: ModelFacts) -> int:
    """Weights that one token reads: all layers and the head; of two tables only the head."""
    return model.linear_bytes + model.kept_bytes + model.table_bytes // (1 if model.tied else 2)


def roofline(record: Record, model: ModelFacts) -> list[Point]:
    """The linears of one step at every number of rows measured, fewest first; empty where the bandwidth is unknown."""
    read, size = measured.bandwidth(record), bytes_per_token(model)
    if read is None or not size:
        return []
    best: dict[int, float] = {}
    for trial in record.of(WEIGHTS, model.digest):
        for name in trial.figures if trial.settings.get("route") == OWN else ():
            best[measured.rows_of(name)] = max(best.get(measured.rows_of(name), 0.0), trial.median(name))
    roof = read.median(GB_S) * 1e9 / size
    return [Point(rows=rows, tok_s=best[rows], roof_tok_s=roof * rows) for rows in sorted(best) if best[rows]]


def lines(record: Record, model: ModelFacts) -> Iterator[str]:
    """Everything for a terminal."""
    reads = measured.by_threads(record.of(BANDWIDTH))
    if reads:
        yield "read bandwidth"
        yield from _bars([(_threads(trial), trial.seen(GB_S), _text(trial, f"{trial.seen(GB_S):.1f} GB/s"))
                          for trial in reads])
    tried = measured.by_threads(trial for trial in record.of(WEIGHTS, model.digest)
                                if not trial.settings.get("variant") and trial.settings.get("route") == OWN)
    if tried:
        yield "tokens per second over threads (linears alone)"
        speeds = {trial.id: f"{trial.seen(TOK_S):.1f} tok/s, prompts {trial.seen(PREFILL_TOK_S):.0f} tok/s"
                  for trial in tried}
        yield from _bars([(_threads(trial), trial.seen(TOK_S), _text(trial, speeds[trial.id])) for trial in tried])
    points = roofline(record, model)
    if points:
        yield f"roofline: {bytes_per_token(model) / 1e6:.0f} MB of weights a step"
        yield from _bars([(f"{point.rows} row{'s' if point.rows > 1 else ''}", min(1.0, point.share),
                           f"{point.tok_s:.0f} of {point.roof_tok_s:.0f} tok/s ({point.share:.0%})")
                          for point in points], most=1.0)


def write_png(record: Record, model: ModelFacts, file: Path) -> None:
    """Both pictures in one file. Raises ConfigError without matplotlib."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # not a dependency

        matplotlib.use("Agg")
        from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError("a PNG cannot be drawn", why="matplotlib is not installed",
                          do="leave out --png, or install matplotlib beside the agent") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    tried = [trial for trial in measured.by_threads(record.of(WEIGHTS, model.digest)) if not trial.failure
             and not trial.settings.get("variant") and trial.settings.get("route") == OWN]
    left.plot([trial.settings["threads"] for trial in tried], [trial.median(TOK_S) for trial in tried], "o-")
    left.set(xlabel="threads", ylabel="tokens per second, one row", title=model.name, ylim=(0, None))
    left.xaxis.get_major_locator().set_params(integer=True)
    points = roofline(record, model)
    right.loglog([p.rows for p in points], [p.roof_tok_s for p in points], "--", label="memory")
    right.loglog([p.rows for p in points], [p.tok_s for p in points], "o-", label="measured")
    right.set(xlabel="rows for one read of the weights", ylabel="tokens per second", title="roofline")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _bars(rows: list[tuple[str, float, str]], most: float = 0.0) -> Iterator[str]:
    top = most or max((value for _, value, _ in rows), default=0.0)
    for label, value, text in rows:
        eighths = round(BAR * 8 * value / top) if top else 0
        bar = "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
        yield f"  {label:<24}{bar:<{BAR}} {text}"


def _text(trial: Trial, figures: str) -> str:
    """A trial's end, or its figures."""
    return trial.failure or figures + (" (disturbed: decides nothing)" if trial.notes.get("disturbed") else "")


def _threads(trial: Trial) -> str:
    count = trial.settings.get("threads")
    where = f" on CPUs {trial.settings['cpus']}" if trial.settings.get("cpus") else ""
    return f"{count} thread{'s' if count != 1 else ''}{where}"
