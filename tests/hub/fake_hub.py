"""A stand-in for the Hub on loopback: as much of its protocol as a fetch uses, and it can misbehave.

    /api/models/ORG/NAME[/revision/REV]     the listing of a commit, with sizes and checksums
    /ORG/NAME/resolve/COMMIT/FILE           small files at once; LFS files redirect to another origin, /cdn/SHA256

Faults are data: `hub.faults.append({"match": "resolve", "times": 2, "status": 503})`. Kinds: `status` (with `headers`,
`code`), `cut_after` bytes, `flip` a byte, `short` (ends politely too early), `longer`, `ignore_range`, `wrong_range`,
`stall_s`, `loop`, `html`, `packed`. `hub.requests` is what was asked, with its Authorization and Range.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass(kw_only=True)
class Repo:
    """`lfs`: names kept outside of git. `token`: who may read; None: everybody. `gated`: asks for accepted terms."""

    files: dict[str, bytes]
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None
    gated: bool = False
    said: dict[str, Any] = field(default_factory=dict)

    def lfs(self, name: str) -> bool:
        return name.endswith((".safetensors", ".gguf", ".bin"))

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            one: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if self.lfs(name):
                one["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(one)
        return {"id": "org/name", "modelId": "org/name", "sha": self.commit, "siblings": siblings, "tags": [],
                "private": False, "gated": self.gated, "downloads": 1, "likes": 0, **self.said}


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def repo_of(folder: Path, **fields: Any) -> Repo:
    return Repo(files={str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}, **fields)


class FakeHub:
    """A context manager; `endpoint` is its address."""

    def __init__(self, repos: Mapping[str, Repo]) -> None:
        self.repos = dict(repos)
        self.faults: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.sent_bytes = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            hub = outer

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def asked(self, part: str) -> list[dict[str, Any]]:
        return [one for one in self.requests if part in one["path"]]

    def fault(self, path: str) -> dict[str, Any]:
        with self.lock:
            for one in self.faults:
                if one["match"] in path and one.get("times", 1) > 0:
                    one["times"] = one.get("times", 1) - 1
                    return one
        return {}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Clients that go away are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append({"path": path, "range": self.headers.get("Range"), "host": self.headers.get("Host"),
                                  "authorization": self.headers.get("Authorization"), "agent": self.headers.get("User-Agent")})
        fault = self.hub.fault(path)
        if "stall_s" in fault:
            time.sleep(fault["stall_s"])
        if "status" in fault:
            return self._say(fault["status"], b"no", {"X-Error-Code": fault.get("code", ""), **fault.get("headers", {})})
        if "loop" in fault:
            return self._say(302, b"", {"Location": self.path})
        if "html" in fault:
            return self._say(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        if path.startswith("/api/models/"):
            return self._listing(path.removeprefix("/api/models/"))
        if path.startswith("/cdn/"):
            data = next((d for r in self.hub.repos.values() for d in r.files.values()
                         if hashlib.sha256(d).hexdigest() == path.removeprefix("/cdn/")), None)
            return self._say(404, b"") if data is None else self._data(data, fault)
        return self._resolve(path, fault)

    def _listing(self, rest: str) -> None:
        name, _, revision = rest.partition("/revision/")
        repo = self.hub.repos.get(name)
        if repo is None or not self._may(repo):
            return self._say(401 if repo is None else 403 if repo.gated else 401, b"{}",
                             {"X-Error-Code": "GatedRepo" if repo and repo.gated else "RepoNotFound"})
        if (revision or "main") not in (*repo.revisions, repo.commit):
            return self._say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return self._say(200, json.dumps(repo.listing()).encode(), {"Content-Type": "application/json"})

    def _resolve(self, path: str, fault: dict[str, Any]) -> None:
        name, _, rest = path.lstrip("/").partition("/resolve/")
        commit, _, file = rest.partition("/")
        repo = self.hub.repos.get(name)
        if repo is None or not self._may(repo) or commit not in (repo.commit, *repo.revisions):
            return self._say(401, b"", {"X-Error-Code": "RepoNotFound"})
        if file not in repo.files:
            return self._say(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = repo.files[file]
        if repo.lfs(file):
            digest = hashlib.sha256(data).hexdigest()
            return self._say(302, b"", {"Location": f"http://localhost:{self.hub.port}/cdn/{digest}", "X-Repo-Commit": commit,
                                        "X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'})
        return self._data(data, fault, {"ETag": f'"{git_sha1(data)}"', "X-Repo-Commit": commit})

    def _may(self, repo: Repo) -> bool:
        return repo.token is None or self.headers.get("Authorization") == f"Bearer {repo.token}"

    def _data(self, data: bytes, fault: dict[str, Any], headers: Mapping[str, str] | None = None) -> None:
        start, stop, asked = 0, len(data), self.headers.get("Range")
        if asked and "ignore_range" not in fault:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(len(data), int(last) + 1) if last else len(data)
            if start >= len(data):
                return self._say(416, b"")
        body = bytearray(data[start:stop])
        if "flip" in fault and body:
            body[fault["flip"] % len(body)] ^= 1
        if "longer" in fault:
            body += b"x" * fault["longer"]
        if "short" in fault:
            body = body[: fault["short"]]
        extra = dict(headers or {})
        if asked and "ignore_range" not in fault:
            said = start + 1 if "wrong_range" in fault else start
            extra["Content-Range"] = f"bytes {said}-{stop - 1}/{len(data)}"
        if "packed" in fault:
            extra["Content-Encoding"] = "gzip"
        status = 206 if "Content-Range" in extra else 200
        cut = fault.get("cut_after")
        return self._say(status, bytes(body), extra, cut_after=cut)

    def _say(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, cut_after: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body[:cut_after])
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        self.hub.sent_bytes += len(body[:cut_after])
        if cut_after is not None and cut_after < len(body):
            self.close_connection = True
            self.connection.close()
