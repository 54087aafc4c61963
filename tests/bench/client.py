"""One client for all servers: the same requests, as token ids, timed from outside.

Prompts are random token ids: their length is exact on every server, and no two share a prefix that a cache could keep.
Answers are greedy, of a fixed length, and their length is checked. The client costs the machine some CPU time, the same
for every server: whole answers are one read; streamed ones are only used for one stream at a time.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

FIRST_ID, LAST_ID = 1000, 48000
"""Ordinary tokens of SmolLM2's vocabulary; none of them is special."""
TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Times of one streamed answer from the request on."""

    first_s: float
    last_s: float
    chunks: int


def prompt(tokens: int, seed: int) -> list[int]:
    """A prompt of exactly this many token ids."""
    chosen = random.Random(seed)
    return [chosen.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]


def complete(port: int, ids: list[int], tokens: int) -> float:
    """Seconds for a whole answer of exactly `tokens` tokens."""
    began = time.perf_counter()
    connection = _ask(port, ids, tokens, stream=False)
    answer = json.loads(connection.getresponse().read())
    seconds = time.perf_counter() - began
    connection.close()
    if answer.get("usage", {}).get("completion_tokens") != tokens:
        raise SystemExit(f"the server on port {port} did not answer with {tokens} tokens: {str(answer)[:500]}")
    return seconds


def stream(port: int, ids: list[int], tokens: int) -> Streamed:
    """Times of a streamed answer of `tokens` tokens."""
    began = time.perf_counter()
    connection = _ask(port, ids, tokens, stream=True)
    first = last = 0.0
    chunks = 0
    for _ in _events(connection.getresponse()):
        last = time.perf_counter() - began
        first = first or last
        chunks += 1
    connection.close()
    if chunks < tokens // 2:
        raise SystemExit(f"the server on port {port} streamed {chunks} pieces for {tokens} tokens")
    return Streamed(first_s=first, last_s=last, chunks=chunks)


def together(port: int, streams: int, prompt_tokens: int, tokens: int, seed: int) -> float:
    """Tokens per second in all of `streams` requests that begin together, prompts included."""
    prompts = [prompt(prompt_tokens, seed * 100 + user) for user in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        began = time.perf_counter()
        list(pool.map(lambda ids: complete(port, ids, tokens), prompts))
        return streams * tokens / (time.perf_counter() - began)


def _ask(port: int, ids: list[int], tokens: int, *, stream: bool) -> http.client.HTTPConnection:
    # `cache_prompt` is llama-server's; vLLM ignores what it does not know.
    body: dict[str, Any] = {"model": "default", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                            "stream": stream, "cache_prompt": False}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The pieces of an answer that carry tokens. A token may be without text, so text is not looked at."""
    for line in response:
        if line.startswith(b"data: {") and b'"choices":[{' in line.replace(b" ", b""):
            yield line
