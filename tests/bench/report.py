"""Results as markdown tables and PNG plots.

    python -m tests.bench.report RESULT.json ... [--plots FOLDER]

Tables go to the standard output, to be pasted into docs/benchmarks.md. Plots need matplotlib (`make bench-report` keeps
it in an environment of its own); without `--plots` nothing but the standard library is used. A figure is `median
(least-greatest)`; nothing is left out or rounded to look better.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OURS = "ours"
MIB, GIB = 1 << 20, 1 << 30
PHASES = ("load", "compile", "warm-up", "serve")
COLOURS = ("#1f5a99", "#d98324", "#7a9e3c", "#8d8d8d")


def cell(found: dict[str, Any] | None, digits: int = 1) -> str:
    """Samples as one cell."""
    if not found:
        return "-"
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def serving_tables(result: dict[str, Any]) -> str:
    """Speed, start and memory of one serving run."""
    names = list(result["starts"])
    pairs = [name for name in names if name != OURS]
    title = f"### {result['model']}, {result['isa']}, {result['threads']} threads"
    speeds = {metric: found for metric, found in result["speeds"].items() if metric.endswith("tok/s")}
    rows = [[metric, *(cell(found[name]) for name in names), *(cell(found[f"ours / {name}"], 2) for name in pairs)]
            for metric, found in speeds.items()]
    warnings = [f"**Not valid**, {name}: {reason}." for name, reason in result["speeds"]["suspicious"].items()]
    parts = [title, *warnings, table(["", *names, *(f"ours / {name}" for name in pairs)], rows)]
    bench = result.get("llama-bench") or {}
    if bench:
        kinds = sorted({kind for found in bench.values() for kind in found})
        parts.append(table(["llama-bench, tok/s", *bench], [[k, *(cell(bench[n].get(k)) for n in bench)] for k in kinds]))
    starts = result["starts"]
    rows = [
        ["cold start, s", *(f"{starts[name]['cold start s']:.1f}" for name in names)],
        ["warm start, s", *(cell(starts[name].get("warm start s")) for name in names)],
        ["stop, s", *(f"{starts[name].get('stop s', 0):.1f}" for name in names)],
        ["processes", *(str(result["memory"][name]["processes"]) for name in names)],
    ]
    for figure in ("pss MiB", "anonymous MiB", "file MiB", "key/value cache MiB", "pss minus cache MiB"):
        rows.append([figure, *(str(result["memory"][name][figure]) for name in names)])
    parts.append(table(["start and memory", *names], rows))
    return "\n\n".join(parts)


def memory_cells(row: dict[str, Any]) -> list[str]:
    """One start: what was planned, and each phase as predicted / measured (error)."""
    out = [row["model"], f"{row['ceiling'] / GIB:g}"]
    if "refused" in row:
        return [*out, row["refused"], *[""] * (len(PHASES) + 2)]
    out += [str(row["context"]), f"{row['kv bytes'] / MIB:.0f}"]
    for phase in PHASES:
        cell = row["phases"].get(phase)
        out.append(f"{cell['predicted'] / MIB:.0f} / {cell['measured'] / MIB:.0f} ({cell['error']:+.1%})" if cell else "-")
    engine = row["engine contexts"]
    return [*out, f"{row['contexts'] / engine - 1:+.1%}" if engine else "-"]


def memory_tables(result: dict[str, Any]) -> str:
    """The plan's arithmetic against measurements."""
    head = ["model", "ceiling GiB", "context", "cache MiB", *(f"{phase}, MiB" for phase in PHASES), "full contexts"]
    return table(head, [memory_cells(row) for row in result["rows"]])


def kernel_tables(result: dict[str, Any]) -> str:
    """Speed and error of one kernel run."""
    speed, many, error = [], [], []
    for one in result["results"]:
        label = [one["shape"], str(one["threads"])]
        for name, entry in one["kernels"].items():
            if "1 row GB/s" in entry:
                speed.append([*label, name, cell(entry["1 row GB/s"]), cell(one.get("read bandwidth GB/s", {}).get("huge")),
                              " / ".join(f"{share:.2f}" for share in entry.get("share of bandwidth", {}).values()) or "-",
                              f"{entry['8 rows / 1 row']:.2f}", f"{entry['16 rows / 1 row']:.2f}"])
            if "512 rows GFLOP/s" in entry:
                many.append([*label, name, cell(entry["512 rows GFLOP/s"], 0), cell(entry["512 rows / torch fp32"], 2)])
            if "error" in entry:
                found = entry["error"]["8"]
                error.append([*label, name, f"{found['fp32 out']:.2e}", f"{found['bf16 out']:.3e}",
                              f"{found['bf16 rounding alone']:.3e}",
                              f"{found['bf16 out'] / found['bf16 rounding alone']:.3f}"])
    return "\n\n".join((
        f"### kernels, {result['isa']}",
        table(["N x K", "threads", "kernel", "1 row, GB/s", "memory, GB/s", "share: huge / small pages", "8 rows / 1", "16 rows / 1"], speed),
        table(["N x K", "threads", "kernel", "512 rows, GFLOP/s", "/ torch fp32"], many),
        table(["N x K", "threads", "kernel", "error, fp32 out", "error, bf16 out", "bf16 rounding alone", "ratio"], error)))


def serving_plot(result: dict[str, Any], file: Path) -> None:
    """Tokens per second of every server, one group of bars for each metric; bars of one group share its own scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result["starts"])
    speeds = {metric: found for metric, found in result["speeds"].items() if metric.endswith("tok/s")}
    figure, axes = pyplot.subplots(1, len(speeds), figsize=(2.1 * len(speeds), 3.2))
    for axis, (metric, found) in zip(axes, speeds.items(), strict=True):
        medians = [found[name]["median"] for name in names]
        spread = [[found[n]["median"] - found[n]["min"] for n in names], [found[n]["max"] - found[n]["median"] for n in names]]
        axis.bar(range(len(names)), medians, yerr=spread, color=COLOURS[: len(names)], capsize=3)
        axis.set_title(metric.replace(" tok/s", ""), fontsize=9)
        axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens per second", fontsize=8)
    figure.suptitle(f"{result['model']}, {result['isa']}, {result['threads']} threads; median, least and greatest of "
                    f"{len(next(iter(speeds.values()))[OURS]['values'])}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def kernel_plot(result: dict[str, Any], file: Path) -> None:
    """1 row: GB/s under the line of the machine's bandwidth; 512 rows: GFLOP/s. All cores."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(one["threads"] for one in result["results"])
    shown = [one for one in result["results"] if one["threads"] == most]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 3.6))
    for axis, key, title in ((axes[0], "1 row GB/s", "1 row, GB/s of packed weights"),
                             (axes[1], "512 rows GFLOP/s", "512 rows, GFLOP/s")):
        used = [one for one in shown if any(key in entry for entry in one["kernels"].values())]
        kernels = list(dict.fromkeys(name for one in used for name, entry in one["kernels"].items() if key in entry))
        width = 0.8 / max(1, len(kernels))
        for number, name in enumerate(kernels):
            values = [one["kernels"].get(name, {}).get(key, {}).get("median", 0) for one in used]
            axis.bar([x + number * width for x in range(len(used))], values, width, label=name, color=COLOURS[number % 4])
        if key == "1 row GB/s":
            for x, one in enumerate(used):
                if reads := one.get("read bandwidth GB/s", {}).get("huge"):
                    axis.hlines(reads["median"], x - width / 2, x + 0.8 - width / 2, colors="black", linewidth=1.2,
                                label="memory read" if x == 0 else None)
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(used))], [one["shape"] for one in used], rotation=30,
                        ha="right", fontsize=8)
        axis.set_title(f"{title}; {most} threads, --isa {result['isa']}", fontsize=9)
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncol=5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.plots:
        args.plots.mkdir(parents=True, exist_ok=True)
    for file in args.results:
        result = json.loads(file.read_text())
        kind = result["bench"]
        machine = result["machine"]
        print(f"<!-- {file.name}: {machine['date']}, {machine['commit']}, {machine['cpu']}, {machine['cores']} cores -->")
        tables = {"serving": serving_tables, "memory": memory_tables}.get(kind, kernel_tables)
        print(tables(result) + "\n")
        if args.plots and kind != "memory":
            (serving_plot if kind == "serving" else kernel_plot)(result, args.plots / f"{file.stem}.png")


if __name__ == "__main__":
    main()
