"""Does a variable of the worker's environment make it faster? Workers side by side, which are asked in turn.

    python -m tests.bench.pairs --model smollm2 --env LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libjemalloc.so.2 [--env ...]
    python -m tests.bench.pairs --model smollm2 --kernel aten --env APPLIANCE_GEMM=fp32

One worker by the plan, one more by the plan again (`the same`: what two equal ones differ by), and one for each variable.
All live at once; only one has work at a time. In each round every worker gets the same requests (decode, a prompt of 512
tokens, four streams), in an order that is turned about, so that a machine's drift and its other programs meet all of
them. Printed: the median of each figure's ratio to the plan's in the same round, and the quartiles of these ratios.
The service's home is APPLIANCE_HOME, where the model must be stored.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import time
from pathlib import Path

from appliance.directories import from_process
from appliance.jobs import ending_on_sigterm, find_worker_python
from appliance.measured import PREFILL_TOK_S, STREAMS_TOK_S, TOK_S
from appliance.settings import Parsed, Settings
from appliance.supervisor import worker
from appliance.supervisor.start import PATH_DEFAULT
from appliance.tune import served
from appliance.tune.requests import Target
from appliance.tune.subject import read_subject
from tests.bench import machine

PLAN, AGAIN = "plan", "the same"
PROMPT, TOKENS, STREAMS = 32, 64, 4
Figures = dict[str, float]


def ask(target: Target, seed: int) -> Figures:
    return {TOK_S: target.stream(PROMPT, TOKENS, seed).decode_tok_s, PREFILL_TOK_S: target.prefill_tok_s(served.PREFILL, seed + 1),
            STREAMS_TOK_S: target.together(STREAMS, PROMPT, TOKENS, seed + 2)[0]}


def rounds(targets: dict[str, Target], seconds: float) -> dict[str, list[Figures]]:
    """The figures of each worker, round by round, for so long."""
    names = list(targets)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for name in names:
        ask(targets[name], 1)  # the first of its kind is slower everywhere
    began = time.monotonic()
    for number in itertools.takewhile(lambda _: time.monotonic() - began < seconds, itertools.count()):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(ask(targets[name], 100 * (number + 1)))
    return found


def run(args: argparse.Namespace) -> dict[str, object]:
    parsed = Parsed(settings=Settings(kernel=args.kernel, compile=False), warnings=(), sources={})
    python = find_worker_python(parsed.settings)
    subject = read_subject(parsed, from_process(os.environ), python, env=os.environ, model_name=args.model)
    variables: dict[str, dict[str, str]] = {PLAN: {}, AGAIN: {}}
    for text in args.env:
        name, _, value = text.partition("=")
        variables[f"{name}={Path(value).name}"] = {name: value}
    targets: dict[str, Target] = {}
    with contextlib.ExitStack() as stack:
        for name, more in variables.items():
            places = stack.enter_context(served.folders(str(subject.stored), str(subject.prepared or "")))
            rung = subject.plan(None, places).full
            tree = worker.start(worker.WorkerCommand(
                python=python, argv=rung.argv, env={"PATH": os.environ.get("PATH") or PATH_DEFAULT, **rung.env, **more},
                log=Path(places.sockets) / "worker.log", cwd=Path(places.cache), runtime=Path(places.sockets)))
            stack.callback(worker.end_session, tree.pid)
            began = time.monotonic()
            served._wait(tree, Path(places.socket), lambda _: None)
            print(f"{name}: ready after {time.monotonic() - began:.1f} s", flush=True)
            targets[name] = Target(socket=Path(places.socket), model="default", ids=served.ids(subject.model))
        found = rounds(targets, args.seconds)
    ratios = {name: {figure: [mine[figure] / plan[figure] for mine, plan in zip(found[name], found[PLAN], strict=True)]
                     for figure in (TOK_S, PREFILL_TOK_S, STREAMS_TOK_S)} for name in found if name != PLAN}
    plan = ", ".join(f"{statistics.median(one[figure] for one in found[PLAN]):.1f} {figure}" for figure in (TOK_S, PREFILL_TOK_S, STREAMS_TOK_S))
    print(f"{PLAN:45} {plan}; {len(found[PLAN])} rounds")
    for name, each in ratios.items():
        print(f"{name + ' / ' + PLAN:45} " + ", ".join(f"{statistics.median(values):.3f} ({quartiles(values)}) {figure}" for figure, values in each.items()), flush=True)
    return {"bench": "pairs", "model": args.model, "machine": machine.facts(), "rounds": found}


def quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:.2f}-{high:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--seconds", type=float, default=120.0, help="so long rounds are begun")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with ending_on_sigterm():  # workers would be left over
        result = run(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
