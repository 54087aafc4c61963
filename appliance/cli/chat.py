"""`applianctl chat`: a streamed conversation with the running model, over the agent's socket and so without a key.

Rule: an account that may not use the socket goes to the public address, with the key of APPLIANCE_API_KEY or of
`api_key_file`, and is told so in one line.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import click

from appliance import client
from appliance.cli.application import Application
from appliance.errors import ModelError, NotReachable
from appliance.keys import configured_key

PATIENCE_S = 600.0
"""Longest silence within an answer: a long prompt on a slow CPU."""
Connect = Callable[[], tuple[http.client.HTTPConnection, dict[str, str]]]


@click.command()
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--temperature", type=click.FloatRange(0, 5), metavar="T", default=0.0, show_default=True,
              help="0 is greedy: the same question gets the same answer.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer.")
@click.pass_obj
def chat(
    app: Application, prompt: str | None, system: str | None, temperature: float, max_tokens: int | None
) -> None:
    """Ask the running model; without PROMPT an interactive conversation (or the prompt from a pipe)."""
    from appliance import status as status_file

    current = status_file.read(app.service.runtime)
    if not status_file.is_ready(current):
        raise NotReachable("the service is not ready", why=current["sentence"], do="run `applianctl status --wait`")
    connect = way_in(app, current)
    options: dict[str, float] = {"temperature": temperature}
    if max_tokens:
        options["max_tokens"] = max_tokens
    messages = [{"role": "system", "content": system}] if system else []
    if prompt is None and (sys.stdin is None or not sys.stdin.isatty()):
        prompt = sys.stdin.read().strip() if sys.stdin else ""
        if not prompt:
            raise click.UsageError("There is no prompt: give one as argument or through a pipe.")
    if prompt is not None:
        _ask(connect, [*messages, {"role": "user", "content": prompt}], options)
        return
    click.echo("Ctrl-D ends the conversation.", err=True)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo()
            return
        if line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _ask(connect, messages, options)})


def way_in(app: Application, current: Mapping[str, Any]) -> Connect:
    """How to reach the model: the agent's socket, else the public address, which is said."""
    if client.reachable(app.agent_socket):
        return lambda: (client.UnixConnection(app.agent_socket, timeout_s=PATIENCE_S),
                        {"Content-Type": "application/json"})
    address = str(current.get("address") or "")
    parts = urlsplit(address)
    if not parts.hostname:
        raise NotReachable("the service cannot be asked", why=f"{app.agent_socket} is not open to this account",
                           do="use sudo, or join the group `appliance`")
    click.echo(f"applianctl: {app.agent_socket} is not open to this account; asking {address}", err=True)
    key = app.env.get("APPLIANCE_API_KEY")
    if not key and not app.settings_closed:  # else the service says itself whether it wants one
        key = configured_key(app.settings.api_key_file, app.env)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    host, port = ("127.0.0.1" if parts.hostname in ("0.0.0.0", "::") else parts.hostname), parts.port

    def connect() -> tuple[http.client.HTTPConnection, dict[str, str]]:
        if parts.scheme == "https":
            # The node's own certificate, asked from the node itself: the name in it is not this address.
            context = ssl._create_unverified_context()
            return http.client.HTTPSConnection(host, port, timeout=PATIENCE_S, context=context), headers
        return http.client.HTTPConnection(host, port, timeout=PATIENCE_S), headers

    return connect


def _ask(connect: Connect, messages: list[dict[str, str]], options: Mapping[str, object]) -> str:
    """Stream one answer to standard output and return it."""
    body = json.dumps({"model": "default", "messages": messages, "stream": True, **options})
    parts: list[str] = []
    try:
        connection, headers = connect()
        connection.request("POST", "/v1/chat/completions", body=body, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response.status, response.read())
        for part in _deltas(response):
            parts.append(part)
            sys.stdout.write(part)
            sys.stdout.flush()
    except (OSError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
        raise NotReachable("the answer broke off", why=why, do="run `applianctl status`") from None
    click.echo()
    return "".join(parts)


def _deltas(response: http.client.HTTPResponse) -> Iterator[str]:
    """The pieces of a streamed answer. Raises NotReachable when it ends early or cannot be read."""
    for raw in response:
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            error = event.get("error")
            pieces = [choice["delta"].get("content") or "" for choice in event.get("choices") or ()]
            text = "".join(pieces).encode("utf-8", "replace").decode()
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise NotReachable("the answer cannot be read", why="an event of the stream is not a chat completion",
                               do="run `applianctl status`") from None
        if error:
            why = error.get("message", error) if isinstance(error, dict) else error
            raise NotReachable("the worker failed", why=str(why), do="run `applianctl status`")
        yield text
    raise NotReachable("the answer broke off", why="the stream ended before its end mark", do="run `applianctl status`")


def _refusal(status: int, data: bytes) -> ModelError | NotReachable:
    try:
        message = json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = data[:200].decode("utf-8", "replace")
    if status == 400:
        return ModelError("the model refused the request", why=str(message),
                          do="shorten it, or check the model's chat template")
    return NotReachable(f"the service answered status {status}", why=str(message), do="run `applianctl status`")
