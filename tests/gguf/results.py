"""What a run measured, in build/gguf/results.json; `python -m tests.gguf.results` writes it into docs/gguf.md.

Tables stand between `<!-- NAME -->` and `<!-- end -->`. Nothing in them is typed by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build/gguf/results.json"
PAGE = ROOT / "docs/gguf.md"


def keep(part: str, name: str, values: dict[str, Any]) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    known.setdefault(part, {})[name] = values
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def architectures(found: dict[str, Any]) -> str:
    rows = [[name, one["class"], f"{one['mean']:.1e}", f"{one['largest']:.1e}", f"{one['spread']:.1f}"]
            for name, one in found.items()]
    return _table(["model", "becomes", "mean difference", "largest", "spread"], rows)


def types(found: dict[str, Any]) -> str:
    order = sorted(found.items(), key=lambda item: -item[1]["bits"])
    rows = [[name, f"{one['bits']:.2f}", f"{one['decoded']:.1e}", f"{one['decoded_largest']:.1e}", one["linears"],
             one["table"], f"{one['served']:.3f}", f"{one['stored_bits']:.2f}", f"{one['stored']:.3f}", f"{one['kl']:.4f}"]
            for name, one in order]
    return _table(["type", "bits in file", "decoded: mean", "largest", "linears", "tables", "served by llama.cpp: mean", "bits stored", "stored: mean",
                   "KL"], rows)


def smollm2(found: dict[str, Any]) -> str:
    rows = [[name, f"{one['bits']:.2f}",
             ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(one["shares"].items(), key=lambda pair: -pair[1])),
             f"{one['stored_bits']:.2f}", f"{one['kept']} of {one['layers']}"]
            for name, one in sorted(found.items(), key=lambda item: -item[1]["bits"])]
    return _table(["name", "bits in file", "types, by weights", "bits stored", "layers with codes kept"], rows)


def main() -> None:
    found = json.loads(FILE.read_text())
    page = PAGE.read_text()
    for part, render in (("architectures", architectures), ("types", types), ("smollm2", smollm2)):
        page = re.sub(rf"<!-- {part} -->.*?<!-- end -->",
                      lambda _, part=part, render=render: f"<!-- {part} -->\n{render(found.get(part, {}))}\n<!-- end -->",
                      page, flags=re.DOTALL)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
