"""API keys: made, listed, revoked by `applianctl key`, checked by the front door.

A key is `sk-appl-` and 256 random bits. `state/keys.json` (0600) holds its SHA-256, a name and the day it was made,
never the key itself, so a copy of the file opens nothing. Rules:

* a key is compared as a hash, with every known key, in constant time;
* the file is looked at on each check (one stat) and read again when it changed: no restart after `key new`;
* a file that cannot be read keeps the keys read before, and at the start lets nobody in: never open by accident;
* one more key may come from `api_key_file` or, as a systemd service, from the credential `api_key`.

Does not: decide whether a key is asked for at all (the front door does), or talk HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, MutableSequence
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance import disk
from appliance.errors import ConfigError, StoreError, UsageError
from appliance.regularfile import read_regular

PREFIX = "sk-appl-"
FILE = "keys.json"
CREDENTIAL = "api_key"
SCHEMA = 1
MAX_KEYS = 1000
MAX_KEY_BYTES = 4096
MOST_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key as the file knows it. `id`: the first 8 hex digits of the hash. `created_at`: UTC, to the second."""

    id: str
    name: str
    sha256: str
    created_at: str


class KeyRing:
    """The keys of one state folder. `extra`: one more key from a file or credential, already read."""

    def __init__(self, file: Path, extra: str | None = None) -> None:
        self.file = file
        self.extra = extra
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[Key, ...] = ()
        self._broken: str | None = None

    @property
    def required(self) -> bool:
        """Whether there is any key; then nobody works without one. An unreadable file counts as keys."""
        self._refresh()
        return bool(self._keys or self.extra or self._broken)

    @property
    def warning(self) -> str | None:
        """What is wrong with the file of keys, if anything."""
        self._refresh()
        return self._broken and f"the API keys in {self.file} cannot be read: {self._broken}"

    def accepts(self, token: str) -> bool:
        """Whether this is one of the keys."""
        self._refresh()
        given = _digest(token[:MAX_KEY_BYTES])
        known = [key.sha256 for key in self._keys] + ([_digest(self.extra)] if self.extra else [])
        # No early end: the time says nothing about which key is near.
        return sum(hmac.compare_digest(given, one) for one in known) > 0

    def list(self) -> tuple[Key, ...]:
        """The keys of the file, oldest first. Raises StoreError when it cannot be read."""
        try:
            return _parse(self._text())
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            forbidden = isinstance(error, PermissionError)
            do = "use sudo" if forbidden else "correct the file, or remove it and make new keys"
            why = getattr(error, "strerror", None) or str(error)
            raise StoreError(f"the API keys in {self.file} cannot be read", why=why, do=do) from None

    def new(self, name: str) -> tuple[str, str]:
        """Make a key; returns its id and the key, which is nowhere else. Raises StoreError."""
        secret = PREFIX + secrets.token_urlsafe(32)
        digest = _digest(secret)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        made = Key(id=digest[:8], name=name, sha256=digest, created_at=now)
        with self._changing() as keys:
            if len(keys) >= MAX_KEYS:
                raise StoreError(f"there are {MAX_KEYS} API keys already", do="revoke some: `applianctl key list`")
            keys.append(made)
        return made.id, secret

    def revoke(self, key_id: str) -> Key:
        """Remove one key, named by its id. Raises UsageError when there is none of that id, and StoreError."""
        with self._changing() as keys:
            for key in keys:
                if key.id == key_id:
                    keys.remove(key)
                    return key
            raise UsageError(f"there is no API key {key_id}", do="see `applianctl key list`")

    def _text(self) -> str:
        return read_regular(self.file, most_bytes=MOST_BYTES).decode("utf-8")

    @contextlib.contextmanager
    def _changing(self) -> Iterator[MutableSequence[Key]]:
        what = f"cannot write the API keys to {self.file}"
        if self.file.parent.exists() and not os.access(self.file.parent, os.W_OK):
            raise StoreError(what, why="the folder is not this account's", do="use sudo")
        with disk.mapped(what, self.file.parent):
            self.file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with disk.locked(self.file.parent):
                keys = [*self.list()]
                yield keys
                text = json.dumps({"schema": SCHEMA, "keys": [asdict(key) for key in keys]}, indent=1) + "\n"
                draft = self.file.with_name(f".{FILE}.{os.getpid()}")
                _make_private(draft)
                disk.replace(self.file, text, draft=draft)

    def _refresh(self) -> None:
        try:
            found = self.file.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                self._broken = None  # could not be looked at for a while, and is what was read before
                return
            self._keys = _parse(self._text())
            self._seen, self._broken = seen, None
        except FileNotFoundError:
            self._keys, self._seen, self._broken = (), None, None
        except (OSError, ValueError) as error:
            self._broken = getattr(error, "strerror", None) or str(error)


def configured_key(api_key_file: str | None, env: Mapping[str, str]) -> str | None:
    """The key of `api_key_file`; not set, the one of systemd's credential `api_key`; None where there is neither.

    Raises ConfigError when the file cannot be read or used.
    """
    path = api_key_file
    if path is None:
        folder = env.get("CREDENTIALS_DIRECTORY")
        if not folder or not (Path(folder) / CREDENTIAL).exists():
            return None
        path = str(Path(folder) / CREDENTIAL)
    try:
        first = read_regular(Path(path), most_bytes=MAX_KEY_BYTES).partition(b"\n")[0]
        key = first.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"the API key in {path} cannot be read", why=why, do="correct api_key_file") from None
    if not key:
        raise ConfigError(f"the API key in {path} cannot be used", why="its first line is empty", do="write one")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"the API key in {path} cannot be used", why="it has characters that no header can carry",
                          do="use letters, digits and -._~+/=")
    return key


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _parse(text: str) -> tuple[Key, ...]:
    """The keys of the file's text. Raises ValueError: a file that is not understood must not count as no keys."""
    try:
        tree = json.loads(text)
        if tree["schema"] != SCHEMA:
            raise ValueError(f"schema {tree['schema']} is not {SCHEMA}")
        keys = tuple(Key(**{name: str(value) for name, value in key.items()}) for key in tree["keys"])
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is not a list of keys") from None
    if any(len(key.sha256) != 64 or not key.sha256.isascii() for key in keys):
        raise ValueError("a hash is not 64 hex digits")
    return keys


def _make_private(draft: Path) -> None:
    """An empty file that only its owner can read, before the text goes in."""
    draft.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
