"""What 4 bits cost, grid by grid, beside llama.cpp's files: one text, one evaluator, one run.

    worker_python -m tests.bench.fidelity [--source FILE.gguf] [--row NAME ...] [--tokens 2048] [--json FILE] [--as-is]

The source (default: the embedded SmolLM2) is first decoded to an F32 GGUF file by llama-quantize and its channels are
shuffled (`tests.bench.shuffle`; not with --as-is): the function stays, but no recipe and no format finds the lattice
that the source was quantized on, and every row starts from the same numbers. Ours are quantized as `model add` does; llama.cpp's are made
by llama-quantize and decoded by our importer. All are scored by `appliance.evaluate`, in float32, against the F32 file.
Bits per weight are those of all tensors, real ones: llama.cpp falls back to wider types where 256 does not divide K.
Rows that `--json` names already are not run again. Needs the peers' build (`make bench-peers`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.evaluate.comparison import score
from appliance.evaluate.text import read_text, windows
from appliance.evaluate.weights import Weights, of_source, of_stored
from appliance.library import resolve
from appliance.quantize.checkpoint import quantize
from appliance.quantize.layers import Recipe
from tests.bench.build_llama import binary
from tests.bench.shuffle import shuffle

OURS: Mapping[str, Recipe] = {
    "minmax g64, table 8": Recipe(grid="minmax", group_size=64, table_bits=8),
    "search g64, table 8": Recipe(grid="search", group_size=64, table_bits=8),
    "calibrated g64, table 8": Recipe(grid="calibrated", group_size=64, table_bits=8),
    "minmax g32, table 8": Recipe(grid="minmax", group_size=32, table_bits=8),
    "search g32, table 8": Recipe(grid="search", group_size=32, table_bits=8),
    "default (calibrated g32, table 8)": Recipe(grid="auto"),
    "minmax g64, table 4": Recipe(grid="minmax", group_size=64, table_bits=4),
    "calibrated g64, table 4": Recipe(grid="calibrated", group_size=64, table_bits=4),
    "calibrated g128, table 8": Recipe(grid="calibrated", group_size=128, table_bits=8),
}
THEIRS = ("Q4_0", "Q4_K_M")


def bits(weights: Weights, stored_bytes: int) -> float:
    return 8 * stored_bytes / sum(math.prod(weight.shape) for weight in weights.values())


def gguf_bytes(file: Path) -> int:
    """Bytes of all tensors."""
    import gguf

    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)


def llama_quantize(source: Path, out: Path, kind: str) -> None:
    subprocess.run([str(binary("llama-quantize", "native")), "--allow-requantize", str(source), str(out), kind],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Bench:
    """One source; `run(name)` gives one row."""

    def __init__(self, source: Path, folder: Path, tokens: int, *, as_is: bool) -> None:
        self.folder = folder
        self.exact_file = folder / "exact.gguf"
        llama_quantize(source, self.exact_file, "F32")
        if not as_is:
            shuffle(self.exact_file)
        self.as_is = as_is
        self.exact = of_source(self.exact_file)
        self.home = folder / "home"
        quantize(self.exact_file, self.home, Recipe(grid="minmax"), lambda event: None)
        text = read_text(None)
        self.text = f"{text.name} ({text.digest})"
        self.ids = windows(text, self.home, tokens)

    def run(self, name: str) -> dict[str, Any]:
        began = time.monotonic()
        if name in OURS:
            out = self.folder / "out"
            report = quantize(self.exact_file, out, OURS[name], lambda event: None)
            seconds = time.monotonic() - began
            weights = of_stored(out)
            size = report["bits_per_weight"]
        elif name == "bf16":
            weights, seconds, size = rounded(self.exact), 0.0, 16.0
        else:
            file = self.folder / "peer.gguf"
            llama_quantize(self.exact_file, file, name.removeprefix("llama.cpp "))
            seconds = time.monotonic() - began
            weights = of_source(file)
            size = bits(weights, gguf_bytes(file))
        found = score(self.home, weights, self.exact, self.ids, lambda event: None)
        subprocess.run(["rm", "-rf", str(self.folder / "out"), str(self.folder / "peer.gguf")], check=True)
        return {"bits": round(size, 2), "quantize_s": round(seconds, 1), "perplexity": found.perplexity,
                "source": found.source_perplexity, "kl": found.divergence, "same": found.same_first_choice,
                "tokens": found.tokens, "text": self.text, "shuffled": not self.as_is}


def rounded(weights: Weights) -> Weights:
    """The same in bf16."""
    import torch

    def one(weight: Any) -> Any:
        return type(weight)(shape=weight.shape, rows=weight.rows,
                            read=lambda a, b: weight.read(a, b).to(torch.bfloat16).float())

    return {name: one(weight) for name, weight in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--row", action="append")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-is", action="store_true", help="do not shuffle the channels")
    args = parser.parse_args()
    source = args.source or Path(resolve("smollm2", env=os.environ))
    done: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    rows = args.row or ["bf16", *OURS, *(f"llama.cpp {kind}" for kind in THEIRS)]
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(source, Path(name), args.tokens, as_is=args.as_is)
        for row in rows:
            if row not in done:
                done[row] = bench.run(row)
                if args.json:
                    args.json.write_text(json.dumps(done, indent=1))
            r = done[row]
            print(f"| {row} | {r['bits']} | {r['perplexity']:.3f} | {r['perplexity'] / r['source'] - 1:+.2%} | "
                  f"{r['kl']:.4f} | {r['same']:.1%} | {r['quantize_s']:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
