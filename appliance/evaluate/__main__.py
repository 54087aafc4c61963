"""`python -m appliance.evaluate MODEL [--source PATH]`: the child of the agent that scores one stored model.

Standard output carries JSON lines only (`appliance.report`); the exit code is the error's.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
from pathlib import Path
from typing import Any

from appliance.report import Event, reporting


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m appliance.evaluate")
    parser.add_argument("model", type=Path, help="folder of a stored model")
    parser.add_argument("--source", type=Path, help="what it was made from: GGUF file or folder")
    parser.add_argument("--text", type=Path, help="default: Python's language reference")
    parser.add_argument("--tokens", type=int, default=2048, help="how many are scored")
    args = parser.parse_args()
    return reporting(lambda event: _run(args, event), noun="evaluation")


def _run(args: argparse.Namespace, event: Event) -> dict[str, Any]:
    from appliance.evaluate.comparison import score
    from appliance.evaluate.text import read_text, windows
    from appliance.evaluate.weights import of_source, of_stored

    text = read_text(args.text)
    ids = windows(text, args.model, args.tokens)
    found = score(args.model, of_stored(args.model), of_source(args.source) if args.source else None, ids, event)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {**dataclasses.asdict(found), "text": text.name, "text_digest": text.digest, "peak_bytes": peak}


if __name__ == "__main__":
    sys.exit(main())
