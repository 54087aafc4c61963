"""Does the worker answer? Deep health by a real generation over its socket, its counters, and who holds a taken port.

vLLM's `/health` reads two flags and says yes while its engine hangs; so `answer` asks for a token of a completion.
Every call here waits for the worker, up to its time limit: the loop runs them in the background.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from appliance.client import UnixConnection
from appliance.errors import ConfigError, TransientError

PROMPT = "The capital of France is"
ENGINE_HEADER = "X-data-parallel-rank"
LONGEST_METRICS = 4 << 20
MARKS = ("generation_tokens_total", "prompt_tokens_total", "request_success_total", "kv_cache_usage_perc",
         "iteration_tokens_total_count")
"""Figures of vLLM that move when its engine does; the cache's use moves even during a long prompt."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The worker answered that its queue is full: it lives, and has no room for a probe."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the worker's `/metrics` say. `generated`: tokens since its start; `marks`: all that moves when the engine
    makes progress; `engines`: the marks of each engine by its number."""

    generated: float
    marks: tuple[float, ...]
    engines: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


def listening(worker: Path, *, timeout_s: float = 2.0) -> bool:
    """Whether `/health` answers 200 on the worker's socket. Not a proof that the engine works."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = UnixConnection(worker, timeout_s=timeout_s)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        finally:
            connection.close()
    return False


def counters(worker: Path, *, timeout_s: float = 5.0) -> Counters | None:
    """The worker's figures; None when it does not tell them in time."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = UnixConnection(worker, timeout_s=timeout_s)
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            return parse_counters(response.read(LONGEST_METRICS).decode("utf-8", "replace"))
        finally:
            connection.close()
    return None


def parse_counters(text: str) -> Counters:
    """Sum each of MARKS over its labels in Prometheus' text format."""
    sums = dict.fromkeys(MARKS, 0.0)
    engines: dict[int, dict[str, float]] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)(?:\{([^}]*)\})? ([0-9.eE+-]+)$", text, re.MULTILINE):
        if name in sums:
            with contextlib.suppress(ValueError):
                sums[name] += float(value)
                if engine := re.search(r'\bengine="(\d{1,4})"', labels):
                    own = engines.setdefault(int(engine[1]), dict.fromkeys(MARKS, 0.0))
                    own[name] += float(value)
    return Counters(generated=sums["generation_tokens_total"], marks=tuple(sums.values()),
                    engines={engine: tuple(own.values()) for engine, own in engines.items()})


def answer(worker: Path, *, model: str, timeout_s: float, tokens: int = 1,
           engine: int | None = None) -> Answer | Busy | str:
    """Generate `tokens` tokens; returns the answer, `Busy`, or one sentence why there is none. `engine`: the number of
    the one that is asked, of several."""
    began = time.monotonic()
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
    try:
        connection = UnixConnection(worker, timeout_s=timeout_s)
        try:
            connection.request("POST", "/v1/completions", body=body, headers={
                "Content-Type": "application/json", **({} if engine is None else {ENGINE_HEADER: str(engine)})})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"the connection failed: {error or type(error).__name__}"
    if response.status in (429, 503):
        return Busy(sentence=f"the queue is full (status {response.status})")
    if response.status != 200:
        return f"the worker answered status {response.status}: {data[:200].decode('utf-8', 'replace')}"
    try:
        reply = json.loads(data)
        count = int(reply["usage"]["completion_tokens"])
        text = str(reply["choices"][0]["text"])
    except (ValueError, KeyError, IndexError, TypeError):
        return "the worker's answer is not a completion"
    if count < tokens:
        return f"the worker generated {count} of {tokens} tokens"
    return Answer(text=text, tokens=count, seconds=time.monotonic() - began)


def check_port(host: str, port: int) -> None:
    """Whether this address could be listened on. Raises what `listening_socket` raises."""
    listening_socket(host, port, backlog=1).close()


def listening_socket(host: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that listens on this address; `::` takes IPv4 too. Raises TransientError when it is taken, naming the
    holder where it can be seen, and ConfigError when it can never be bound here.

    Connections in TIME_WAIT do not count: a restart may bind at once.
    """
    what = f"cannot listen on {host}:{port}"
    made: socket.socket | None = None
    try:
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((host, port))
        made.listen(backlog)
    except OSError as error:
        if made is not None:
            made.close()
        if error.errno == errno.EADDRINUSE:
            raise TransientError(what, why=f"port {port} is taken" + _holder(port),
                                 do="stop the other program or set listen.port") from None
        if error.errno == errno.EACCES:
            raise ConfigError(what, why=f"binding port {port} is not permitted to this account",
                              do="set listen.port to 1024 or more") from None
        raise ConfigError(what, why=error.strerror or str(error),
                          do="set listen.host to an address of this machine") from None
    return made


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
