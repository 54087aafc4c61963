"""Bytes from the Hub: one listing, one range, one file that continues where it stopped. Runs in the child.

`huggingface_hub` gives addresses, headers, sessions, redirects, proxies and names of errors; the loop is ours, because
it must keep every byte that came (its own keeps whole blocks of 10 MB), check what came, and be slowed down. Rules: a
file gets its name only when size and checksum are right; a try that brought something costs no try; an answer that
waiting helps (429, 5xx, a cut or silent connection) is tried again, any other ends at once; an address that is asked
with a token does not hand it on to another origin.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError, ConfigError, ModelError, NotReachable, TransientError
from appliance.hub.orders import Order
from appliance.hub.selection import Listing, RemoteFile, read_listing

LONGEST_WAIT_S = 300.0
PART = ".part"
KEPT = "what has come is kept: run the same command again"
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class Hub:
    """One endpoint. `on_bytes` hears of each new byte, `on_wait(seconds, why)` of each pause."""

    def __init__(self, order: Order, token: str | None, *, on_wait: Callable[[float, str], None],
                 sleep: Callable[[float], None] = time.sleep) -> None:
        self._order = order
        self._token = token
        self._on_wait = on_wait
        self._sleep = sleep
        self._pace = Pace(order.rate_bytes_s, sleep=sleep)

    def listing(self) -> Listing:
        """What the repository holds at the revision, pinned to its commit."""
        from huggingface_hub import HfApi

        order = self._order

        def ask() -> Any:
            api = HfApi(endpoint=order.endpoint, token=self._token or False)
            return api.model_info(order.repo, revision=order.revision, files_metadata=True, timeout=order.silence_s)

        found = self._patiently(ask)
        siblings = [{"name": one.rfilename, "bytes": one.size, "git_sha1": one.blob_id,
                     "sha256": one.lfs.sha256 if one.lfs else None} for one in found.siblings or ()]
        return read_listing(order.repo, found.sha, siblings)

    def range(self, listing: Listing, file: RemoteFile, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a file; fewer where it ends before."""
        stop = min(stop, file.bytes)
        if stop <= start:
            return b""

        def ask() -> bytes:
            got = bytearray()
            with self._get(listing, file, start=start, stop=stop) as response:
                self._check(response, file, start, stop - start)
                for block in response.iter_raw():
                    got += block
                    self._pace.took(len(block))
                    if len(got) >= stop - start:  # one that knows no ranges would send all of it
                        return bytes(got[: stop - start])
            raise _Cut("the connection ended early")

        return bytes(self._patiently(ask))

    def download(self, listing: Listing, file: RemoteFile, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Bring `file` to `target`, going on with what an earlier try left beside it. Raises what cannot be helped."""
        part = target.with_name(target.name + PART)
        for attempt in (1, 2):
            self._complete(listing, file, part, on_bytes)
            if _checksum_fits(part, file, on_block=lambda: on_bytes(0)):
                _publish(part, target)
                return
            size = part.stat().st_size
            part.unlink()
            on_bytes(-size)
            if attempt == 1:
                self._on_wait(0.0, f"{file.name} arrived damaged and is fetched again")
        raise TransientError(f"{file.name} of hf:{listing.repo} arrives damaged",
                             why="its checksum was wrong twice", do="try later or another hub.endpoint; " + KEPT)

    def _complete(self, listing: Listing, file: RemoteFile, part: Path, on_bytes: Callable[[int], None]) -> None:
        with open(part, "ab") as out:
            if out.tell() > file.bytes:
                on_bytes(file.bytes - out.tell())
                out.truncate(file.bytes)
                out.seek(0, os.SEEK_END)

            def go_on() -> None:
                start = out.tell()
                if start == file.bytes:
                    return
                with self._get(listing, file, start=start, stop=None) as response:
                    again = start if response.status_code == 200 else 0
                    self._check(response, file, start - again, file.bytes - start + again)
                    if again:  # it knows no ranges: all of it comes once more
                        on_bytes(-again)
                        out.truncate(0)
                        out.seek(0)
                    for block in response.iter_raw():
                        if out.tell() + len(block) > file.bytes:
                            raise _Spoiled(f"{file.name} is longer than the {file.bytes} bytes of the listing")
                        out.write(block)
                        on_bytes(len(block))
                        self._pace.took(len(block))
                if out.tell() < file.bytes:
                    raise _Cut("the connection ended early")

            self._patiently(go_on, progress=out.tell)
            out.flush()
            os.fsync(out.fileno())

    def _get(self, listing: Listing, file: RemoteFile, *, start: int, stop: int | None) -> Any:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session

        url = hf_hub_url(listing.repo, file.name, revision=listing.commit, endpoint=self._order.endpoint)
        headers = build_hf_headers(token=self._token or False)
        headers["Accept-Encoding"] = "identity"  # ranges and checksums are those of the file, not of its packing
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        return get_session().stream("GET", url, headers=headers, timeout=self._order.silence_s)

    def _check(self, response: Any, file: RemoteFile, start: int, count: int) -> None:
        """Raises unless these are `count` bytes of the file from `start` on, as far as the answer's head tells."""
        from huggingface_hub.utils import hf_raise_for_status

        hf_raise_for_status(response)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _Spoiled("the answer is packed although that was not asked for")
        length = response.headers.get("Content-Length")
        expected = file.bytes if response.status_code == 200 else count
        if length is not None and length != str(expected):
            raise _Spoiled(f"{length} bytes are sent where {file.name} has {expected}")
        if response.status_code == 200 and start == 0:
            return
        said = response.headers.get("Content-Range", "")
        if response.status_code != 206 or not said.startswith(f"bytes {start}-"):
            raise _Spoiled(f"a part of {file.name} was asked for, and something else was sent")

    def _patiently(self, ask: Callable[[], Any], *, progress: Callable[[], int] = lambda: 0) -> Any:
        """Call until it succeeds; raises the error of the tree when waiting does not help or did not help."""
        failures, wait, reached = 0, self._order.wait_s, progress()
        while True:
            try:
                return ask()
            except ApplianceError:
                raise
            except Exception as error:
                known = _judged(error, self._order)
            if isinstance(known, ApplianceError):
                raise known
            asked_s, why = known
            if progress() > reached:
                failures, wait = 0, self._order.wait_s
            reached = max(reached, progress())
            failures += 1
            if failures >= self._order.tries:
                raise _given_up(self._order, why)
            pause = min(max(wait, asked_s), LONGEST_WAIT_S)
            self._on_wait(pause, why)
            self._sleep(pause)
            wait = min(2 * wait, 60.0)


class Pace:
    """Sleeps so that at most `rate_bytes_s` pass on average; a pause of the sender is not caught up."""

    def __init__(self, rate_bytes_s: int | None, *, sleep: Callable[[float], None] = time.sleep,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._sleep, self._clock = rate_bytes_s, sleep, clock
        self._due = clock()

    def took(self, count: int) -> None:
        """Bytes have come: wait until they were due."""
        if self._rate:
            self._due = max(self._due, self._clock() - 1.0) + count / self._rate
            if (early := self._due - self._clock()) > 0:
                self._sleep(early)


class _Cut(Exception):
    """A connection that ended before its time."""


class _Spoiled(Exception):
    """An answer that cannot be what was asked for."""


def _judged(error: Exception, order: Order) -> ApplianceError | tuple[float, str]:
    """The error to end with, or how long the server asks to wait and why another try may help."""
    import httpx2
    from huggingface_hub import errors

    name = f"hf:{order.repo}"
    if isinstance(error, _Cut):
        return 0.0, str(error)
    if isinstance(error, _Spoiled):
        return 0.0, str(error)
    if isinstance(error, (errors.GatedRepoError, errors.DisabledRepoError)):
        return ConfigError(f"{name} is not open to this node", why="its owner gives access on request",
                           do="accept its terms on its page, then set hub.token_file to a token of that account")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{name} has no revision {order.revision!r}", do="see its branches and tags on its page")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ModelError(f"{name} has lost a file of its listing", do="try another revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(f"{name} was not found at {order.endpoint}", why="there is no such model, or it is private",
                          do="check the name; a private one needs hub.token_file")
    if isinstance(error, errors.HFValidationError):
        return ModelError(f"{name} is no name of a model", do="write hf:org/name")
    response = getattr(error, "response", None)
    if response is not None:
        return _judged_status(response, name, order)
    if isinstance(error, httpx2.TooManyRedirects):
        return NotReachable(f"{order.endpoint} redirects in a circle", do="check hub.endpoint and the proxy")
    if isinstance(error, httpx2.UnsupportedProtocol):
        return NotReachable(f"{order.endpoint} leads to an address of an unknown kind", do="check hub.endpoint")
    if isinstance(error, httpx2.ConnectError) and "CERTIFICATE" in str(error).upper():
        return NotReachable(f"the certificate of {order.endpoint} is not trusted", why=_short(error),
                            do="check the clock, hub.endpoint, and SSL_CERT_FILE for a proxy's own authority")
    if isinstance(error, httpx2.TransportError):
        return 0.0, f"{type(error).__name__}: {_short(error)}" if _short(error) else type(error).__name__
    if isinstance(error, OSError):
        raise error  # the disk's
    if isinstance(error, (ValueError, TypeError, KeyError, AttributeError, httpx2.HTTPError, httpx2.InvalidURL)):
        return NotReachable(f"{order.endpoint} does not speak the Hub's protocol", why=_short(error),
                            do="check hub.endpoint, and whether a login page stands before the network")
    raise error


def _judged_status(response: Any, name: str, order: Order) -> ApplianceError | tuple[float, str]:
    status = int(response.status_code)
    if status in _AGAIN:
        return _retry_after(response.headers), f"the Hub answers {status}"
    if status in (401, 403):
        return ConfigError(f"{name} is not open to this node", why=f"the Hub answers {status}",
                           do="check hub.token_file: the token may be missing, wrong or without the right to read it")
    if status == 407:
        return NotReachable("the proxy asks for a login", do="put it into HTTPS_PROXY")
    if status == 416:
        return 0.0, "the Hub refuses to go on from here"
    if status == 404:
        return ModelError(f"{name} was not found at {order.endpoint}", do="check the name and the revision")
    return NotReachable(f"{order.endpoint} does not serve {name}", why=f"it answers {status}", do="check hub.endpoint")


def _retry_after(headers: Mapping[str, str]) -> float:
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, float(headers.get("Retry-After") or 0))
    return 0.0


def _given_up(order: Order, why: str) -> ApplianceError:
    if why.startswith(("ConnectError", "ConnectTimeout", "ProxyError")):
        return NotReachable(f"{order.endpoint} cannot be reached", why=why.partition(": ")[2] or why,
                            do="check the network and the proxy; " + KEPT)
    return TransientError(f"hf:{order.repo} does not come through", why=why, do=KEPT)


def _checksum_fits(path: Path, file: RemoteFile, *, on_block: Callable[[], None]) -> bool:
    """SHA-256 of the contents, or SHA-1 of the git blob, against the listing's. `on_block`: it may take minutes."""
    hasher = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
    for block in _blocks(path):
        hasher.update(block)
        on_block()
    return hasher.hexdigest() == (file.sha256 or file.git_sha1)


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(4 << 20):
            yield block


def _publish(part: Path, target: Path) -> None:
    from appliance.disk import fsync

    part.replace(target)
    fsync(target.parent)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
