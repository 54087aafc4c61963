"""The agent's socket, as a client sees it: one request, one answer, over HTTP on a unix socket.

Does: GET and POST on `agent.sock`. Does not: know routes, or print. Rules: no key is needed, because the socket's group
is the permission; whatever goes wrong is NotReachable with the reason, "not permitted" named as such.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import NotReachable

LONGEST_ANSWER = 16 << 20


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to a unix socket."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
        except BaseException:
            self.sock.close()
            raise


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; None when it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def message(self) -> str:
        """The error's message in OpenAI's shape, else the beginning of the body."""
        found = self.json()
        error = found.get("error") if isinstance(found, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        return str(text or self.body[:200].decode("utf-8", "replace")).strip()


def ask(path: Path, method: str, route: str, body: Mapping[str, Any] | None = None, *,
        timeout_s: float = 10.0) -> Answer:
    """One request to the agent. Raises NotReachable when nobody answers in time."""
    try:
        connection = UnixConnection(path, timeout_s=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, route, body=data, headers={"Content-Type": "application/json"} if data else {})
            response = connection.getresponse()
            return Answer(status=response.status, body=response.read(LONGEST_ANSWER))
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(path, error) from None


def command(path: Path, name: str) -> None:
    """Hand a command (`appliance.board.COMMANDS`) to the running agent. Raises NotReachable when none takes it."""
    answer = ask(path, "POST", f"/control/{name}", {})
    if answer.status not in (200, 202):
        raise NotReachable(f"the agent refused `{name}`", why=f"status {answer.status}: {answer.message()}",
                           do="run `applianctl status`")


def unreachable(path: Path, error: Exception) -> NotReachable:
    """What an OSError on the agent's socket means."""
    if isinstance(error, PermissionError):
        return NotReachable("the service cannot be asked", why=f"{path} is not open to this account",
                            do="use sudo, or join the group `appliance`")
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return NotReachable("the service is not running", why=f"nobody listens on {path}", do="run `applianctl start`")
    if isinstance(error, TimeoutError):
        return NotReachable("the service does not answer", why=f"no answer on {path} in time",
                            do="run `applianctl doctor`")
    return NotReachable("the service does not answer", why=str(error) or type(error).__name__,
                        do="run `applianctl doctor`")


def reachable(path: Path) -> bool:
    """Whether somebody listens on the socket and this account may talk to it."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            probe.connect(str(path))
    except OSError:
        return False
    return True
