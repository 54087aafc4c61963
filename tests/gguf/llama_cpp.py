"""llama.cpp as a reference: convert a folder, quantize a file, ask for log-probabilities and tokens.

Uses the build of tests/bench/build_llama (made when missing) and the converter in its sources.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import build_llama

CONVERT = """
import sys
sys.path[:0] = [{gguf!r}, {root!r}]
import runpy
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: {pre!r}
sys.argv = ["convert_hf_to_gguf.py", {folder!r}, "--outfile", {file!r}, "--outtype", {kind!r}, "--model-name", {name!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
"""The converter knows tokenizers by a hash of what they make of a text; a tiny one of our own it has to be told."""

LETTER = 69
"""The id of a token of one ASCII character in both kinds of tokenizer that `models` makes."""


def convert(folder: Path, file: Path, *, kind: str = "f32", pre: str = "smollm", name: str = "tiny") -> None:
    """A Hugging Face folder as a GGUF file, by llama.cpp's own converter."""
    root = build_llama.fetch(None)
    code = CONVERT.format(gguf=str(root / "gguf-py"), root=str(root), pre=pre, folder=str(folder), file=str(file),
                          name=name, kind=kind, script=str(root / "convert_hf_to_gguf.py"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace", check=False,
                          env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


def quantize(source: Path, target: Path, kind: str, *options: str) -> None:
    """`--pure`: every matrix in this type; without it the mixture that users get by that name."""
    done = subprocess.run([str(build_llama.binary("llama-quantize", "native")), *options, str(source), str(target),
                           kind], capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@dataclass(frozen=True, kw_only=True)
class Server:
    port: int

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=json.dumps(body).encode(),
                                         headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def logprobs(self, ids: list[int], vocab: int) -> list[float]:
        """Log-probability of every token after `ids`."""
        # The probabilities are those before sampling; a plain letter is drawn, as an end token would end the answer.
        body = {"prompt": ids, "n_predict": 1, "n_probs": vocab, "temperature": 0.0, "cache_prompt": False,
                "logit_bias": [[LETTER, 1000.0]]}
        found = self.ask("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        by_id = {one["id"]: one["logprob"] for one in found}
        assert len(by_id) == vocab, len(by_id)
        return [by_id[i] for i in range(vocab)]

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        return found


@contextmanager
def serving(file: Path) -> Iterator[Server]:
    """llama-server with this file, its cache in fp32."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(
        [str(build_llama.binary("llama-server", "native")), "-m", str(file), "--port", str(port), "-c", "256", "-np",
         "1", "-t", "2", "--no-warmup", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--offline"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise AssertionError(process.communicate()[1][-3000:]) from None
                time.sleep(0.1)
        yield Server(port=port)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
