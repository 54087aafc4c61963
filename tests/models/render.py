"""`python -m tests.models.render`: write the table of docs/models.md anew from build/models/results.json. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "models" / "results.json"
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = ("| model | architecture | code | 4-bit linears | table | bits per weight | stays bf16 | difference |\n"
        "|---|---|---|---|---|---|---|---|\n")


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


def main() -> None:
    rows = json.loads(RESULTS.read_text())
    from tests.models.zoo import ROWS

    lines = [line(rows[row.name]) for row in ROWS if row.name in rows and "error" not in rows[row.name]]
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + HEAD + "".join(lines) + END + after)


if __name__ == "__main__":
    main()
