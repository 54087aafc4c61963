"""`python -m tests.models.table FOLDER [NAME...]`: make, quantize, serve and compare each row; one JSON line a row.

vLLM is imported once and every row runs in a fork of this process: the worker's own arguments and environment as the plan gives them, its plugin, its
loader, the prepared weights; only the API server in front is left out. Runs in the worker's environment.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.quantize.layers import is_table
from tests.models.zoo import ROWS, Row

GENERATED = 9
Control = Callable[[dict[str, Any], dict[str, Any]], bool]
SERVED_DAMAGED = "one stored scale x 1.1"
"""The control that damages what is served; the others damage the reference."""
FIXED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "cpu_int4", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
         "GLOO_SOCKET_IFNAME": "lo", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""What vLLM and torch read when they are imported, as `appliance.launch` sets it."""


def store(source: Path, folder: Path, recipe: Any) -> dict[str, Any]:
    """Quantize and lay out as `model add` does; returns the report."""
    from appliance import manifest
    from appliance.kernels.prepare import prepare
    from appliance.quantize.checkpoint import quantize

    report = quantize(source, folder / "object", recipe, lambda event: None)
    reason = manifest.write(folder / "object", digest="0" * 64, source=str(source), source_digest="0" * 64, recipe={}, report=report,
                            created="2026-01-01T00:00:00+00:00")
    assert reason is None, reason
    prepare(folder / "object", folder / "prepared", lambda event: None)
    return report


def planned(folder: Path, context: int | None = None) -> tuple[list[str], dict[str, str], Any]:
    """The worker's arguments and environment, and the model's facts."""
    from appliance.launch import Places
    from appliance.plan import make_plan
    from appliance.probe.host import read_host
    from appliance.probe.model import read_model
    from appliance.settings import Settings

    model = read_model(folder / "object", name="model", digest="0" * 64)
    places = Places(model=str(folder / "object"), cache=str(folder / "cache"), tmp=str(folder), socket=str(folder / "socket"), sockets=str(folder),
                    prepared=str(folder / "prepared"))
    plan = make_plan(read_host("/"), model, Settings(compile=False, context=context), places)
    assert plan.refused is None, plan.refused
    return list(plan.full.argv), dict(plan.full.env), model


def served(argv: list[str], sequences: list[list[int]]) -> tuple[list[list[int]], list[list[float]], str]:
    """Prompts with what was generated, the log-probabilities from the second token on, and what ran."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    sampling = SamplingParams(max_tokens=GENERATED, temperature=0, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    whole, found = [], []
    print("made", flush=True)
    for result in llm.generate([{"prompt_token_ids": ids} for ids in sequences], sampling, use_tqdm=False):
        prompt, generated = list(result.prompt_token_ids), list(result.outputs[0].token_ids)
        got = [entry[token].logprob for token, entry in zip(prompt[1:], result.prompt_logprobs[1:], strict=True)]
        got += [entry[token].logprob for token, entry in zip(generated, result.outputs[0].logprobs, strict=True)]
        whole.append(prompt + generated)
        found.append(got)
    print("generated", flush=True)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    blocked = sum(name.endswith("int4_blocked") for name, _ in model.named_parameters())
    packed = sum(hasattr(module, "int4") for module in model.modules())
    return whole, found, f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}, {packed} int4 modules, {blocked} mapped"


def serve(row: Row, folder: Path) -> dict[str, Any]:
    """One row from nothing to what vLLM says of it."""
    from appliance.quantize.layers import Recipe
    from tests.models.maker import make, tokens

    make(folder / "source", row)
    report = store(folder / "source", folder, Recipe(**row.recipe))
    argv, env, model = planned(folder, row.context)
    os.environ.update({name: value for name, value in env.items() if name not in FIXED})
    sequences = [tokens(row.config["vocab_size"], count, seed=count) for count in row.lengths]
    whole, got, ran = served(argv, sequences)
    tables = {layer["bits"] for layer in report["layers"] if is_table(f"{layer['name']}.weight")} or {16}
    linears = [layer for layer in report["layers"] if not is_table(f"{layer['name']}.weight")]
    return {
        "name": row.name, "architecture": model.architecture, "ran": ran, "linears": len(linears), "table_bits": min(tables),
        "kept": [[kept["name"], kept["reason"]] for kept in report["kept"]], "experts": report["experts"],
        "bits_per_weight": report["bits_per_weight"], "whole": whole, "got": got,
    }


def serve_damaged(row: Row, folder: Path) -> dict[str, Any]:
    """What vLLM says of the row's stored model once one of its scales is wrong."""
    from appliance.kernels.prepare import prepare
    from tests.models.controls import damage, heaviest_group
    from tests.models.maker import tokens

    damaged = folder / "damaged"
    shutil.copytree(folder / "object", damaged / "object")
    damage(damaged / "object", *heaviest_group(damaged / "object"))
    prepare(damaged / "object", damaged / "prepared", lambda event: None)
    argv, env, _ = planned(damaged)
    os.environ.update({name: value for name, value in env.items() if name not in FIXED})
    whole, got, _ = served(argv, [tokens(row.config["vocab_size"], count, seed=count) for count in row.lengths])
    return {"damaged": {"whole": whole, "got": got}}


def broken_reference(row: Row, folder: Path, control: Control) -> Any:
    """The reference with a defect; None where the model has nothing that this one breaks."""
    from tests.models.reference import load

    applied = []

    def change(config: dict[str, Any], weights: dict[str, Any]) -> None:
        config.update(row.reference)
        applied.append(control(config, weights))

    model = load(folder / "object", change)
    return model if applied == [True] else None


def compare(row: Row, found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row's differences: from the reference, and from references that are broken on purpose."""
    from tests.models.controls import CONTROLS, group_scaled, heaviest_group
    from tests.models.reference import load, logprobs, mean_difference, spread

    whole, got = found.pop("whole"), found.pop("got")
    reference = load(folder / "object", lambda config, weights: config.update(row.reference))
    found |= {"difference": mean_difference(got, logprobs(reference, whole)), "spread": spread(reference, whole[-1])}
    controls = dict(CONTROLS)
    if row.outlier != 1.0:
        controls["one scale x 1.1"] = group_scaled(folder / "object", *heaviest_group(folder / "object"))
    broken = {}
    for name, control in controls.items():
        if (model := broken_reference(row, folder, control)) is not None:
            broken[name] = mean_difference(got, logprobs(model, whole))
    if damaged := found.pop("damaged", None):
        broken[SERVED_DAMAGED] = mean_difference(damaged["got"], logprobs(reference, damaged["whole"]))
    return found | {"controls": broken}


def main() -> None:
    os.environ.update(FIXED)
    from importlib import import_module

    from appliance.vllm_plugin import patches
    from appliance.worker import HIDDEN, IMPORTED_BEFORE_FORK

    sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]
    for module in (*IMPORTED_BEFORE_FORK, "vllm", "transformers"):
        import_module(module)
    patches.apply([])
    root = Path(sys.argv[1])
    wanted = sys.argv[2:]
    for number, row in enumerate(ROWS):
        if wanted and row.name not in wanted:
            continue
        folder = root / f"{number:02d}"
        folder.mkdir(parents=True)
        result = in_fork(functools.partial(serve, row, folder), folder / "serve")
        if "error" not in result and row.outlier != 1.0:
            result |= in_fork(functools.partial(serve_damaged, row, folder), folder / "damaged-serve")
        if "error" not in result:  # apart: vLLM changes transformers' own classes in its process
            result = in_fork(functools.partial(compare, row, result, folder), folder / "compare")
        print("\n" + json.dumps({"name": row.name, **result}), flush=True)


def in_fork(work: Callable[[], dict[str, Any]], path: Path) -> dict[str, Any]:
    """The result of `work`, or its error, from a child of this process; its output goes to `path`.log."""
    child = os.fork()
    if child == 0:
        with open(path.with_suffix(".log"), "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            result = work()
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:600]}
        path.with_suffix(".json").write_text(json.dumps(result))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if path.with_suffix(".json").exists():
        found: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        return found
    return {"error": f"the process ended with status {status}"}


if __name__ == "__main__":
    main()
