"""What the child that speaks with the Hub is told to do, as JSON on its command line. Holds no secret."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from appliance.errors import UsageError
from appliance.hub.reference import Reference


@dataclass(frozen=True, kw_only=True)
class Order:
    """`folder`: where files come to lie. `known`: where other fetches lie, so that nothing comes twice.
    `settled`: what is stored already, as references and as digests of contents; with these the survey ends.

    `tries` without one new byte end a transfer, `wait_s` lies before the second try and doubles; `silence_s`: how long
    a connection may say nothing.
    """

    endpoint: str
    repo: str
    revision: str
    file: str | None
    folder: str
    known: str | None = None
    settled: tuple[str, ...] = ()
    rate_bytes_s: int | None = None
    tries: int = 6
    wait_s: float = 1.0
    silence_s: float = 30.0

    @property
    def reference(self) -> Reference:
        return Reference(repo=self.repo, revision=self.revision, file=self.file)

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read_order(text: str) -> Order:
    """The inverse of `Order.text`. Raises UsageError."""
    try:
        return Order(**json.loads(text))
    except (ValueError, TypeError):
        raise UsageError("the order cannot be read", why="it is not the JSON object of an order") from None
