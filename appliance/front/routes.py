"""PURE: the paths that exist, on which side, and what stands behind each.

An allow-list: what is not here is answered 404 by the door and never reaches the worker. vLLM serves more than this,
several of them able to do work or to change its state (`/invocations`, `/generative_scoring`, `/scale_elastic_ep`,
`/inference/v1/generate`, `/v1/messages`, ...); its retrieving and cancelling of stored responses is closed because
nothing is stored. The worker is asked with the path written here, not with the client's spelling, and without the
client's query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What answers. GENERATE takes a seat; LIGHT is work of the worker without its engine and has seats of its own."""

    GENERATE = "generate"
    LIGHT = "light"
    MODELS = "models"
    LIVE = "live"
    READY = "ready"
    STATUS = "status"
    METRICS = "metrics"
    CONTROL = "control"


@dataclass(frozen=True, kw_only=True)
class Route:
    """`path`: what the worker is asked for. `name`: the last part of the client's path, where it is a variable."""

    kind: Kind
    path: str
    name: str = ""


OPEN = {"/livez": Kind.LIVE, "/readyz": Kind.READY}
"""Answered to everybody, with words only: a gateway must see them, and they tell nothing."""
GET = {**OPEN, "/status": Kind.STATUS, "/metrics": Kind.METRICS, "/v1/models": Kind.MODELS}
POST = {
    "/v1/chat/completions": Kind.GENERATE,
    "/v1/completions": Kind.GENERATE,
    "/v1/responses": Kind.GENERATE,
    "/tokenize": Kind.LIGHT,
    "/detokenize": Kind.LIGHT,
}
METHODS: Mapping[str, Mapping[str, Kind]] = {"GET": GET, "HEAD": OPEN, "POST": POST}
MODEL = "/v1/models/"
CONTROL = "/control/"


def find(method: str, path: str, *, own_socket: bool) -> Route | tuple[str, ...]:
    """The route, or the methods that this path allows (none: there is no such path). `own_socket`: asked on the
    agent's own socket, where commands are taken."""
    kind = METHODS.get(method, {}).get(path)
    if kind:
        return Route(kind=kind, path=path)
    if path.startswith(MODEL) and path != MODEL:
        return Route(kind=Kind.MODELS, path=MODEL[:-1], name=path.removeprefix(MODEL)) if method == "GET" else ("GET",)
    if own_socket and path.startswith(CONTROL) and path != CONTROL:
        name = path.removeprefix(CONTROL)
        return Route(kind=Kind.CONTROL, path=path, name=name) if method == "POST" else ("POST",)
    return tuple(other for other, paths in METHODS.items() if path in paths)
