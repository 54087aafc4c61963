"""PURE: who may come in. A gate returns the refusal, or None.

With keys: `Authorization: Bearer KEY` on every path, existing or not, but `/livez` and `/readyz`. Without keys the
service listens on loopback only, where a web page in a browser of this machine is the stranger to keep out:

* a name that resolves to 127.0.0.1 (DNS rebinding) shows in the Host header: it must name this machine;
* a page of another origin shows in the Origin header: it must be the service's own.

Programs send no Origin and the address they were given as Host. The agent's own socket has neither check: who may open
it is decided by its mode and group.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from appliance.settings import is_loopback

BEARER = "bearer "


def key_refusal(authorization: str | None, accepts: Callable[[str], bool]) -> str | None:
    """Why a request with this Authorization header may not come in, where a key is asked for."""
    if authorization is None:
        return "an API key is needed: send the header `Authorization: Bearer KEY`"
    if authorization[: len(BEARER)].lower() != BEARER:
        return "the Authorization header is not `Bearer KEY`"
    if not accepts(authorization[len(BEARER):].strip()):
        return "this API key is not known here"
    return None


def stranger_refusal(host: str | None, origin: str | None, *, listen_host: str) -> str | None:
    """Why a request with these headers may not come in, where no key is asked for."""
    if host is not None and not _names_this_machine(_name(host), listen_host):
        return "the Host header does not name this machine: without an API key only local requests are answered"
    if origin is not None and (host is None or _origin_host(origin) != host.lower()):
        return "web pages of other origins are not answered without an API key"
    return None


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # as `http://[::1`
        return ""


def _names_this_machine(name: str, listen_host: str) -> bool:
    return is_loopback(name) or name.lower() == listen_host.lower()


def _name(host: str) -> str:
    """`[::1]:8000` -> `::1`, `localhost:8000` -> `localhost`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
