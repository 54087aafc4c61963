"""Is what `tune` chooses the best there is? Every combination of a few threads, batches and blocks, as whole workers.

    python -m tests.bench.sweep --model NAME [--threads 1 2] [--batch 256 512 1024] [--block 32 64] [--rounds 2] [--json FILE]

Also the plan without measurements, the plan by the node's record, and vLLM's own defaults (no dial of ours: its batch,
block, number of sequences and threads; compiled). Workers take turns in each round, because a machine drifts. The
service's home is APPLIANCE_HOME, where the model must be stored; `applianctl tune` must have run there. Printed: every
configuration with its figures, and the tuned one against each (ratios of medians).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.directories import from_process
from appliance.jobs import ending_on_sigterm, find_worker_python
from appliance.measured import PREFILL_TOK_S, STREAMS_TOK_S, TOK_S
from appliance.plan import Rung
from appliance.settings import Parsed, Settings
from appliance.tune import archive, served
from appliance.tune.subject import Subject, read_subject
from appliance.tuning import score
from tests.bench import machine

FIGURES = (TOK_S, PREFILL_TOK_S, STREAMS_TOK_S)
ATTEMPTS = 3
"""How often a worker is measured that others disturbed."""
OURS = ("--max-num-batched-tokens", "--block-size", "--max-num-seqs", "--max-num-queued-reqs", "--kv-cache-memory-bytes")
"""Flags that `vLLM's own` runs without."""


def vllm_defaults(rung: Rung) -> Rung:
    """The same model without our dials; its key/value cache would be 4 GiB, which is left at ours to fit."""
    argv = list(rung.argv)
    for flag in OURS[:-1]:
        at = argv.index(flag)
        del argv[at : at + 2]
    if "--enforce-eager" in argv:
        argv.remove("--enforce-eager")
    env = {name: value for name, value in rung.env.items() if name not in ("OMP_NUM_THREADS", "APPLIANCE_WORKER_CPUS", "VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE")}
    return replace(rung, argv=tuple(argv), env={**env, "OMP_NUM_THREADS": str(os.cpu_count()), "CXX": "g++"})


def configurations(subject: Subject, args: argparse.Namespace, places: Any) -> dict[str, Rung]:
    """Name -> rung; the tuned plan first."""
    record = archive.load(args.directories.state, subject.host)
    plain, tuned = subject.plan(None, places).full, subject.plan(record, places).full
    found = {"tuned": tuned, "untuned": plain}
    base = served.settings_of(tuned)
    for threads, batch, block in itertools.product(args.threads, args.batch, args.block):
        settings = {**base, "threads": threads, "batch_tokens": batch, "block": block}
        found[f"{threads} threads, batch {batch}, block {block}"] = served.altered(tuned, settings)
    if args.defaults:
        found["vLLM's own"] = vllm_defaults(plain)
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    parsed = Parsed(settings=Settings(), warnings=(), sources={})
    python = find_worker_python(parsed.settings)
    subject = read_subject(parsed, args.directories, python, env=os.environ, model_name=args.model)
    cpus = subject.host.topology.allowed
    figures: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, str] = {}
    with served.folders(str(subject.stored), str(subject.prepared or "")) as places:
        rungs = configurations(subject, args, places)
        for number in range(args.rounds):
            for name in list(rungs) if number % 2 == 0 else reversed(list(rungs)):
                for _ in range(ATTEMPTS):
                    idle = machine.wait_quiet(5.0)
                    trial = served.serve(rungs[name], places, subject.model, python=python, env=os.environ, check=lambda _: None, cpus=cpus,
                                         now=time.time())
                    if not trial.notes:
                        break
                    print(f"{name:34} again: others used {trial.notes['disturbed']:.0%} of the CPUs", flush=True)
                if trial.failure:
                    failures[name] = trial.failure
                for figure in FIGURES if not trial.failure and not trial.notes else ():
                    figures.setdefault(name, {}).setdefault(figure, []).append(trial.seen(figure))
                print(f"{name:34} " + (trial.failure or ", ".join(f"{trial.seen(f):.1f} {f}" for f in (*FIGURES, "ready s")))
                      + f", score {score(replace(trial, notes={})):.1f}, idle before {idle}, others {trial.notes.get('disturbed', 0):.0%}", flush=True)
    medians = {name: {figure: statistics.median(values) for figure, values in found.items()} for name, found in figures.items()}
    if "tuned" not in medians:
        raise SystemExit("the tuned worker was never measured undisturbed")
    tuned = medians["tuned"]
    ratios = {name: {figure: tuned[figure] / found[figure] for figure in FIGURES} for name, found in medians.items() if name != "tuned"}
    for name, ratio in ratios.items():
        print(f"tuned / {name:34} " + ", ".join(f"{value:.3f} {figure}" for figure, value in ratio.items()), flush=True)
    return {"bench": "sweep", "model": args.model, "machine": machine.facts(), "tuned": served.settings_of(rungs["tuned"]), "medians": medians,
            "ratios": ratios, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="*", default=[256, 512, 1024])
    parser.add_argument("--block", type=int, nargs="*", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--defaults", action="store_true", help="vLLM's own defaults too (compiles for minutes)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.directories = from_process(os.environ)
    with ending_on_sigterm():  # a whole worker would be left over
        result = run(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
