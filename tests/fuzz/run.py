"""`python -m tests.fuzz.run KIND FIRST COUNT`: the child that reads cases, under a memory limit and against the clock.

Each case goes the way of a real `model add`: inspected, estimated, and (where torch is at hand) opened, planned and
outlined, every tenth that is accepted quantized whole. It may end accepted or as a ModelError; anything else is a
failure, as is one case of more than SECONDS, memory beyond the limit, or an acceptance that an oracle contradicts:
the `safetensors` library for headers, transformers' own model for shapes, the file system for places.
Prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from appliance.errors import ModelError
from appliance.importing import gguf_header
from appliance.importing.safetensors import ELEMENT_BYTES, read_header
from appliance.importing.source import inspect, merge_headers, read_config
from appliance.library import estimate_bytes
from appliance.probe.model import read_model
from tests.fuzz import cases

SECONDS = 10.0
ROOM_BYTES = 1 << 30
DEEP = importlib.util.find_spec("torch") is not None


def main() -> int:
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    home = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        print(json.dumps(run(kind, first, count, home)))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


def run(kind: str, first: int, count: int, home: Path) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest = 0.0
    warm(kind, home)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))  # only the soft one: children set their own
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, too_slow)
    for number in range(first, first + count):
        place = home / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, data in cases.make(kind, number).items():
            (place / name).write_bytes(data)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        began = time.monotonic()
        try:
            said = one(kind, place, home / "out", number)
        except ModelError as error:
            said = "refused"
            if error.exit_code != 65 or "\n" in error.line or not (error.why or error.do) or len(error.line) > 2000:
                failures.append({"case": number, "what": f"a line that is none: {error.line[:300]}"})
        except BaseException as error:
            said = "failed"
            failures.append({"case": number, "what": f"{type(error).__name__}: {str(error)[:300]}"})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        slowest = max(slowest, time.monotonic() - began)
        seen[said] += 1
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    return {"kind": kind, "first": first, "count": count, "deep": DEEP, **seen, "slowest_s": round(slowest, 3), "grown_mb": grown_kb // 1024,
            "failures": failures}


def warm(kind: str, home: Path) -> None:
    """The whole model is accepted; and what is loaded once does not count as memory of a case."""
    whole = {"gguf": lambda: {"model.gguf": cases.gguf_file(*cases.gguf_parts())}, "int4": lambda: cases.int4_folder()[0]}.get(kind, lambda: cases.folder()[0])()
    place = home / "whole"
    place.mkdir()
    for name, data in whole.items():
        (place / name).write_bytes(data)
    assert one(kind, place, home / "out", 0) == "accepted", "the model that the cases are made from"


def too_slow(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def one(kind: str, place: Path, out: Path, number: int) -> str:
    shutil.rmtree(out, ignore_errors=True)
    if kind == "gguf":
        path = place / "model.gguf"
        found = inspect(path)
        header_holds(path)
    else:
        path = place
        found = inspect(path)
        for file in found.files:
            assert file.resolve().is_relative_to(place.resolve()), f"{file} is outside"
        estimate_bytes(found, table_bits=None)
        headers_hold(found.weights)
    if found.kind == "cpu_int4":
        read_model(path, name="x", digest="0" * 64)
    if not DEEP:
        return "accepted"
    from appliance.quantize.checkpoint import quantize
    from appliance.quantize.layers import parse_recipe

    outline = found.kind != "cpu_int4" and number % 10 != 0
    try:
        quantize(path, out, parse_recipe({}), lambda _event: None, outline=outline)
    except ModelError:
        raise
    shapes_hold(found.kind, path, out)
    read_model(out, name="x", digest="0" * 64)
    assert "auto_map" not in (out / "config.json").read_text()
    if (out / "tokenizer_config.json").exists() and kind in ("safetensors", "index", "config"):
        assert "auto_map" not in (out / "tokenizer_config.json").read_text()
    return "accepted"


def headers_hold(files: tuple[Path, ...]) -> None:
    for file in files:
        size = file.stat().st_size
        spans = []
        for name, entry in read_header(file).items():
            assert math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype] == entry.bytes, name
            spans.append((entry.offset, entry.offset + entry.bytes))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "tensors share bytes"
        assert not spans or spans[-1][1] == size
        if DEEP:
            from safetensors import safe_open

            with safe_open(file, "pt") as oracle:
                ours = {name: list(entry.shape) for name, entry in read_header(file).items()}
                assert {name: oracle.get_slice(name).get_shape() for name in oracle.keys()} == ours  # noqa: SIM118


def header_holds(path: Path) -> None:
    size, spans = path.stat().st_size, []
    for name, tensor in gguf_header.read_header(path).tensors.items():
        _, values, block = next(one for one in gguf_header.TYPES.values() if one[0] == tensor.kind)
        assert math.prod(tensor.shape) // values * block == tensor.bytes, name
        assert tensor.offset + tensor.bytes <= size, name
        spans.append((tensor.offset, tensor.offset + tensor.bytes))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "tensors share bytes"


def shapes_hold(kind: str, path: Path, out: Path) -> None:
    """What is written has the shapes of transformers' own model of this configuration."""
    import torch
    import transformers

    config = json.loads((out / "config.json").read_text())
    name = config["architectures"][0]
    if kind == "cpu_int4" or name not in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        return
    config.pop("quantization_config")
    model_class = getattr(transformers, name)
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype")}
    try:
        theirs = model_class.config_class(**fields)
        with torch.device("meta"):
            expected = {name: list(p.shape) for name, p in model_class(theirs).named_parameters()}
    except Exception:  # a configuration that transformers itself refuses fails at the first start, with its own words
        return
    if kind == "safetensors":
        ours = {name: list(e.shape) for name, (_, e) in merge_headers(path, {f: read_header(f) for f in inspect(path).weights}).items()}
        if read_config(path).get("tie_word_embeddings"):
            ours.pop("lm_head.weight", None)
            expected.pop("lm_head.weight", None)
    else:
        ours = written_shapes(out)
    wrong = {name: (ours.get(name), shape) for name, shape in expected.items() if ours.get(name) != shape}
    assert not wrong, f"accepted with inconsistent shapes: {dict(list(wrong.items())[:3])}"


def written_shapes(out: Path) -> dict[str, list[int]]:
    found = {}
    for file in out.glob("*.safetensors"):
        entries = read_header(file)
        for name, entry in entries.items():
            if name.endswith(".weight_packed"):
                module = name.removesuffix(".weight_packed")
                groups = entries[f"{module}.weight_scale"].shape[1]
                columns = entry.shape[1] if entry.shape[1] // groups == 32 and module.rpartition(".")[2] in ("embed_tokens", "lm_head") else 2 * entry.shape[1]
                found[f"{module}.weight"] = [entry.shape[0], columns]
            elif not name.endswith((".weight_scale", ".weight_zero")):
                found[name] = list(entry.shape)
    return found


if __name__ == "__main__":
    sys.exit(main())
