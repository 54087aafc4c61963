"""Users of the service who keep asking, and what became of each request. Used where the service is being hurt.

A request has ended well when it was answered in full, refused with a time to come back, or ended with an error the
client can read, all before its deadline. Everything else is a violation: no connection on the public port, an answer
that is cut without a word, an answer with fewer tokens, silence.
"""

from __future__ import annotations

import collections
import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

WELL = ("answered", "refused", "error")


@dataclass(kw_only=True)
class Users:
    """`count` threads; `limit_s`: when a request must have ended. `longest`: tokens of the longest answer."""

    port: int
    count: int
    limit_s: float
    seed: int = 0
    longest: int = 80
    prompt: str = "Once upon a time"
    also: tuple[str, ...] = ()
    """Outcomes that are right as well, because of what is done to the worker."""
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __enter__(self) -> Users:
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(self.seed * 1000 + n),), daemon=True)
                         for n in range(self.count)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(self.limit_s + 10)
            if thread.is_alive():
                self.violations.append("a client hangs")

    def _run(self, chance: random.Random) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            outcome = ask(self.port, tokens=chance.randint(1, self.longest), stream=chance.random() < 0.5, limit_s=self.limit_s,
                          prompt=self.prompt)
            seconds = time.monotonic() - began
            word = outcome.split(":")[0]
            self.outcomes[word] += 1
            self.seconds.append(seconds)
            if seconds > self.limit_s or word not in (*WELL, *self.also):
                self.violations.append(f"{outcome} after {seconds:.1f} s")
            if word != "answered":
                self._ended.wait(chance.uniform(0.05, 0.2))


def ask(port: int, *, tokens: int, stream: bool, limit_s: float, prompt: str = "x") -> str:
    """One request; the first word of what is returned is its outcome."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s + 2)
    body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except TimeoutError:
        return "silence"
    except ConnectionRefusedError:
        return "unreachable"
    except (OSError, http.client.HTTPException) as error:
        return f"cut: {error!r}"
    finally:
        connection.close()
    if response.status != 200:
        return _error(response, text)
    return _streamed(text, tokens) if stream else _whole(text, tokens)


def _error(response: http.client.HTTPResponse, text: str) -> str:
    try:
        sentence = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"garbage: status {response.status}: {text[:80]!r}"
    if response.status in (429, 503):
        return f"refused: {sentence}" if response.headers["Retry-After"] else f"hopeless: {response.status} without Retry-After"
    return f"error: {response.status} {sentence}"


def _whole(text: str, tokens: int) -> str:
    try:
        count = json.loads(text)["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return f"garbage: {text[:80]!r}"
    return "answered" if count == tokens else f"short: {count} of {tokens} tokens"


def _streamed(text: str, tokens: int) -> str:
    events: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            try:
                events.append(json.loads(line[6:]))
            except ValueError:
                return f"garbage: {line[:80]!r}"
    if any("error" in event for event in events):
        return f"error: {events[-1]['error']['message']}"
    if "data: [DONE]" not in text:
        return f"cut: a stream without an end after {len(events)} pieces"
    count = sum(bool(event["choices"]) and bool(event["choices"][0]["text"]) for event in events)
    # Of real text a token may have nothing to show yet.
    return "answered" if tokens // 2 <= count <= tokens else f"short: {count} of {tokens} pieces"
