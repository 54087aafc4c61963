"""Users of a gateway who keep asking while nodes are being hurt, and what became of each request.

A request that ended in an error is lost. It was lost `unbegun` when not one byte of its answer had come: then it could
have been asked of another node. Everything that is neither answered nor refused with a time to come back is lost.
"""

from __future__ import annotations

import collections
import http.client
import itertools
import json
import random
import ssl
import threading
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class End:
    """How one request ended. `kind`: answered, refused, error, cut, silence, unreachable, short; `begun`: a byte of the
    answer had come. Clocks: monotonic."""

    kind: str
    detail: str = ""
    stream: bool
    begun: bool
    began: float
    ended: float

    @property
    def lost(self) -> bool:
        return self.kind not in ("answered", "refused")


@dataclass(kw_only=True)
class Load:
    """`count` users, half of their answers streamed. `tokens`: shortest and longest answer."""

    host: str
    port: int
    key: str
    authority: str | None = None
    count: int = 8
    tokens: tuple[int, int] = (5, 60)
    limit_s: float = 60.0
    prompt: str = "Once upon a time"
    words: int = 1
    """The prompt is said so often: its length counts too."""
    ends: list[End] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tls = ssl.create_default_context(cafile=self.authority) if self.authority else None

    def __enter__(self) -> Load:
        self._over = threading.Event()
        self._began = time.monotonic()
        self._users = [threading.Thread(target=self._use, args=(random.Random(number),), daemon=True) for number in range(self.count)]
        for user in self._users:
            user.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for user in self._users:
            user.join(self.limit_s + 10)

    def _use(self, chance: random.Random) -> None:
        while not self._over.is_set():
            end = self.ask(tokens=chance.randint(*self.tokens), stream=chance.random() < 0.5)
            self.ends.append(end)
            if end.kind != "answered":
                self._over.wait(chance.uniform(0.1, 0.3))

    def ask(self, *, tokens: int = 5, stream: bool = False) -> End:
        """One request on a connection of its own."""
        began = time.monotonic()
        connection = (http.client.HTTPSConnection(self.host, self.port, timeout=self.limit_s, context=self._tls) if self._tls else
                      http.client.HTTPConnection(self.host, self.port, timeout=self.limit_s))
        body = {"model": "default", "prompt": " ".join([self.prompt] * self.words), "max_tokens": tokens, "stream": stream, "ignore_eos": True}
        begun, text = False, b""
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"})
            response = connection.getresponse()
            begun = response.status == 200
            while piece := response.read1(65536):
                text += piece
            kind, detail = _judged(response, text.decode(), tokens, stream=stream)
        except TimeoutError:
            kind, detail = "silence", ""
        except ConnectionRefusedError as error:
            kind, detail = "unreachable", repr(error)
        except (OSError, http.client.HTTPException) as error:
            kind, detail = "cut", repr(error)
        finally:
            connection.close()
        return End(kind=kind, detail=detail, stream=stream, begun=begun, began=began, ended=time.monotonic())

    # -- what came of it

    def kinds(self) -> dict[str, int]:
        return dict(collections.Counter(end.kind for end in self.ends))

    def lost(self, *, unbegun: bool = False) -> list[End]:
        return [end for end in self.ends if end.lost and not (unbegun and end.begun)]

    def longest_gap_s(self) -> float:
        """The longest time in which nobody's answer was completed."""
        moments = [self._began, *sorted(end.ended for end in self.ends if end.kind == "answered")]
        return max((later - before for before, later in itertools.pairwise(moments)), default=float("inf"))

    def slowest_s(self) -> float:
        return max((end.ended - end.began for end in self.ends if end.kind == "answered"), default=float("inf"))


def _judged(response: http.client.HTTPResponse, text: str, tokens: int, *, stream: bool) -> tuple[str, str]:
    if response.status in (429, 503) and response.headers["Retry-After"]:
        return "refused", f"{response.status} {text[:200]}"
    if response.status != 200:
        return "error", f"{response.status} {text[:200]}"
    if not stream:
        count = json.loads(text)["usage"]["completion_tokens"]
        return ("answered", "") if count == tokens else ("short", f"{count} of {tokens} tokens")
    if 'data: {"error"' in text:
        return "error", text[text.index('data: {"error"'):][:200]
    return ("answered", "") if "data: [DONE]" in text else ("cut", "a stream without an end")
