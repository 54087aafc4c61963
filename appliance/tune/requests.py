"""Requests to an OpenAI server on a unix socket, timed: whole answers, streamed ones, several at once.

Prompts are token ids, so that their length is exact and no two share a prefix that a cache keeps; answers are greedy
and of a fixed length. Raises NotReachable when the server refuses or is not there.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.client import UnixConnection, unreachable
from appliance.errors import NotReachable
from appliance.tune.quiet import TimeIsUp

TIMEOUT_S = 600.0
ROUTE = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Moments of one streamed answer, in seconds from its request: one for each piece; and what the server counted."""

    pieces_s: tuple[float, ...]
    tokens: int
    prompt_tokens: int

    @property
    def first_s(self) -> float:
        return self.pieces_s[0]

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first, per second."""
        span = self.pieces_s[-1] - self.pieces_s[0]
        return (self.tokens - 1) / span if span > 0 else 0.0

    @property
    def between_s(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Who is asked: its socket, the model's name, and the token ids that prompts may consist of. `until` (monotonic):
    no answer is waited for any longer."""

    socket: Path
    model: str
    ids: tuple[int, int]
    until: float = math.inf

    def prompt(self, tokens: int, seed: int) -> list[int]:
        chosen = random.Random(seed)
        return [chosen.randint(*self.ids) for _ in range(tokens)]

    def stream(self, prompt_tokens: int, tokens: int, seed: int) -> Streamed:
        """One streamed answer of exactly `tokens` tokens. Raises TimeIsUp, and NotReachable for all else."""
        began = time.perf_counter()
        body = {"stream": True, "stream_options": {"include_usage": True}}
        moments: list[float] = []
        usage: dict[str, Any] = {}
        try:
            connection = self._ask(prompt_tokens, tokens, seed, body)
            try:
                for event in _events(connection.getresponse()):
                    if event.get("choices"):
                        moments.append(time.perf_counter() - began)
                    usage = event.get("usage") or usage
                    if time.monotonic() >= self.until:
                        raise TimeIsUp
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= self.until:
                raise TimeIsUp from None
            raise unreachable(self.socket, error) from None
        if not moments:
            raise NotReachable("the answer was empty", why="no piece of it carried a token", do="see the worker's log")
        return Streamed(pieces_s=tuple(moments), tokens=int(usage.get("completion_tokens", len(moments))),
                        prompt_tokens=int(usage.get("prompt_tokens", prompt_tokens)))

    def together(self, streams: int, prompt_tokens: int, tokens: int, seed: int) -> tuple[float, list[Streamed]]:
        """Streamed answers that begin together: tokens per second of all, and each of them."""
        with ThreadPoolExecutor(streams) as pool:
            began = time.perf_counter()
            answers = list(pool.map(lambda user: self.stream(prompt_tokens, tokens, seed * 1000 + user),
                                    range(streams)))
            return sum(answer.tokens for answer in answers) / (time.perf_counter() - began), answers

    def prefill_tok_s(self, prompt_tokens: int, seed: int) -> float:
        """Prompt tokens per second, to the first token of the answer."""
        answer = self.stream(prompt_tokens, 1, seed)
        return answer.prompt_tokens / answer.first_s

    def _ask(self, prompt_tokens: int, tokens: int, seed: int, more: dict[str, Any]) -> http.client.HTTPConnection:
        body = {"model": self.model, "prompt": self.prompt(prompt_tokens, seed), "max_tokens": tokens,
                "temperature": 0, "ignore_eos": True, **more}
        connection = UnixConnection(self.socket, timeout_s=min(TIMEOUT_S, max(0.1, self.until - time.monotonic())))
        connection.request("POST", ROUTE, json.dumps(body), {"Content-Type": "application/json"})
        return connection


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != 200:
        raise NotReachable("the request was refused", why=f"status {response.status}: {response.read(300)!r}",
                           do="run `applianctl status`")
    for line in response:
        if line.startswith(b"data: {"):
            found = json.loads(line[6:])
            if "error" in found:
                raise NotReachable("the answer broke off", why=str(found["error"])[:300], do="see the worker's log")
            yield found


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
