"""The models of the serving benchmark, in each server's own form, from one source.

    python -m tests.bench.models          makes all of the peers' files (about 2.5 GB on disk while it works)

Peers: GGUF files in build/bench/models, Q4_K_M and Q4_0, made by llama-quantize. SmolLM2 comes from the same Q4_1 file
that the appliance serves (re-quantized; there is no better source in the package, and speed does not depend on it);
the random models come from an f16 file of the same shape. Ours: objects in the bench's own store. Files are kept and
used again. Needs the peers' build (build_llama) and the worker's Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from appliance import jobs
from appliance.library import resolve
from appliance.settings import Settings
from tests.bench import build_llama
from tests.bench.random_llama import SHAPES

FOLDER = build_llama.REPOSITORY / "build/bench/models"
QUANTS = ("Q4_K_M", "Q4_0")
PEER_MODELS = ("smollm2", "1b")


def worker_python() -> str:
    return jobs.find_worker_python(Settings())


def smollm2_gguf() -> Path:
    """The embedded default model's file."""
    return Path(resolve("smollm2", env=os.environ))


def peer_file(model: str, quant: str) -> Path:
    """A GGUF file of `model` in `quant`, made if it is not there."""
    target = FOLDER / f"{model}-{quant}.gguf"
    if target.exists():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = smollm2_gguf() if model == "smollm2" else random_f16(model)
    draft = target.with_suffix(".draft")
    with open(FOLDER / "quantize.log", "a") as log:
        subprocess.run([str(build_llama.binary("llama-quantize", "native")), "--allow-requantize", str(source),
                        str(draft), quant], check=True, stdout=log, stderr=subprocess.STDOUT)
    draft.rename(target)
    return target


def random_f16(model: str) -> Path:
    """The f16 GGUF file of a random model, made if it is not there."""
    target = FOLDER / f"{model}-f16.gguf"
    if not target.exists():
        draft = target.with_suffix(".draft")
        run_module("tests.bench.random_llama", model, "gguf", str(draft), "--tokenizer", str(smollm2_gguf()))
        draft.rename(target)
    return target


def source_folder(model: str, tokenizer: Path) -> Path:
    """A Hugging Face folder of a random model with the tokenizer of the stored object `tokenizer`."""
    target = FOLDER / f"{model}-source"
    if not target.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        draft = FOLDER / f"{model}-draft"
        shutil.rmtree(draft, ignore_errors=True)
        run_module("tests.bench.random_llama", model, "safetensors", str(draft))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer / name, draft / name)
        draft.rename(target)
    return target


def run_module(*args: str) -> None:
    """One module of the tests with the worker's Python."""
    subprocess.run([worker_python(), "-m", *args], check=True, cwd=build_llama.REPOSITORY)


def kv_bytes_per_token(model: str) -> int:
    """Key/value cache of one token in 16-bit values; the same for every server."""
    if model == "smollm2":
        return 2 * 30 * 3 * 64 * 2
    shape = SHAPES[model]
    return 2 * shape.layers * shape.kv_heads * shape.head * 2


def main() -> None:
    build_llama.build("native")
    for model in PEER_MODELS:
        for quant in QUANTS:
            file = peer_file(model, quant)
            print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
        (FOLDER / f"{model}-f16.gguf").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
