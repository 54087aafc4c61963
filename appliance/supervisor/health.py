"""Does the worker answer? Deep health by a real generation, and the holder of a taken port.

vLLM's `/health` reads two flags and says yes while its engine hangs; so `answer` asks for two tokens of a completion.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
import ssl
import time
from dataclasses import dataclass

import psutil

from appliance.errors import ConfigError, TransientError


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the worker listens. `key`: API key to send, or None."""

    host: str
    port: int
    tls: bool = False
    key: str | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.tls:
            # The worker's own certificate on loopback: the name in it is the node's, not 127.0.0.1.
            context = ssl._create_unverified_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The worker answered that its queue is full: it lives, and has no room for a probe."""

    sentence: str


def listening(endpoint: Endpoint, *, timeout_s: float = 2.0) -> bool:
    """Whether `/health` answers 200. Not a proof that the engine works."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = endpoint.connect(timeout_s)
        try:
            connection.request("GET", "/health", headers=endpoint.headers())
            return connection.getresponse().status == 200
        finally:
            connection.close()
    return False


def answer(endpoint: Endpoint, *, model: str, timeout_s: float, tokens: int = 2) -> Answer | Busy | str:
    """Generate `tokens` tokens; returns the answer, `Busy`, or one sentence why there is none."""
    began = time.monotonic()
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0,
                       "ignore_eos": True})
    try:
        connection = endpoint.connect(timeout_s)
        try:
            connection.request("POST", "/v1/completions", body=body, headers=endpoint.headers())
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
    """Try to bind this address. Raises TransientError when it is taken, naming the holder where it can be seen, and
    ConfigError when it can never be bound here.

    Connections in TIME_WAIT do not count: a restart may bind at once.
    """
    what = f"cannot listen on {host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TransientError(what, why=f"port {port} is taken" + _holder(port),
                                 do="stop the other program or set listen.port") from None
        if error.errno == errno.EACCES:
            raise ConfigError(what, why=f"binding port {port} is not permitted to this account",
                              do="set listen.port to 1024 or more") from None
        raise ConfigError(what, why=error.strerror or str(error),
                          do="set listen.host to an address of this machine") from None


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
