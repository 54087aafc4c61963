"""`python -m appliance.quantize SOURCE OUT --recipe JSON`: the child of the agent that converts one model.

Standard output carries JSON lines only (`appliance.report`); everything else goes to standard error. The exit code is
the error's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from appliance.errors import UsageError
from appliance.report import Event, reporting


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m appliance.quantize")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="{}", help="JSON: grid, group_size, table_bits, ignore")
    parser.add_argument("--outline", action="store_true", help="headers only, to judge what the model will need")
    args = parser.parse_args()
    return reporting(lambda event: _run(args.source, args.out, args.recipe, event, args.outline), noun="checkpoint")


def _run(source: Path, out: Path, recipe_text: str, event: Event, outline: bool) -> dict[str, Any]:
    from appliance.quantize.checkpoint import quantize
    from appliance.quantize.layers import parse_recipe

    try:
        raw = json.loads(recipe_text)
        if not isinstance(raw, dict):
            raise ValueError
    except ValueError:
        raise UsageError("the recipe cannot be used", why="it is not a JSON object") from None
    return quantize(source, out, parse_recipe(raw), event, outline=outline)


if __name__ == "__main__":
    sys.exit(main())
