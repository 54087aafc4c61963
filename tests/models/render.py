"""`python -m tests.models.render`: write the tables of docs/models.md anew from build/models/results.json. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "models" / "results.json"
DOCUMENT = ROOT / "docs" / "models.md"
HEAD = ("| model | architecture | code | 4-bit linears | table | bits per weight | stays bf16 | difference |\n"
        "|---|---|---|---|---|---|---|---|\n")
CONTROLS_HEAD = "| defect | rows | smallest difference | largest |\n|---|---|---|---|\n"


def line(row: dict[str, Any]) -> str:
    kept = sorted({_short(reason) for _, reason in row["kept"]})
    code = "transformers" if row["ran"].startswith(("transformers", "causal", "moe")) or "Transformers" in row["ran"] else "vLLM"
    table = "bf16" if row["table_bits"] == 16 else f"{row['table_bits']} bits"
    return (f"| {row['name']} | `{row['architecture']}` | {code} | {row['linears']} | {table} | {row['bits_per_weight']:.2f} | "
            f"{', '.join(kept) or '-'} | {row['difference']:.3f} |\n")


def _short(reason: str) -> str:
    words = {"expert": "experts", "router": "routers", "Conv1D": "linears (stored transposed)", "not a linear": "positions, norms", "not a matrix": "convolutions",
             "reads this": "table", "keeps the table": "table"}
    return next((word for part, word in words.items() if part in reason), reason)


def controls(rows: Iterable[dict[str, Any]]) -> str:
    """What each known defect made of the difference."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["controls"].items():
            found.setdefault(name, []).append(value)
    return "".join(f"| {name} | {len(values)} | {min(values):.2f} | {max(values):.2f} |\n" for name, values in sorted(found.items()))


def replaced(text: str, name: str, table: str) -> str:
    """The text with the table called `name` anew."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{DOCUMENT} has no table {name}"
    return before + begin + table + end + after


def main() -> None:
    results = json.loads(RESULTS.read_text())
    from tests.models.zoo import ROWS

    rows = [results[row.name] for row in ROWS if row.name in results and "error" not in results[row.name]]
    text = replaced(DOCUMENT.read_text(), "table", HEAD + "".join(line(row) for row in rows))
    DOCUMENT.write_text(replaced(text, "controls", CONTROLS_HEAD + controls(rows)))


if __name__ == "__main__":
    main()
