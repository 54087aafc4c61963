"""PURE: bundle.json, the first member of a model bundle: which model it is, and size and SHA-256 of every other member.

Does: write and read its text. Does not: touch a file. Rules: the text is the same for the same model; what is read
comes from strangers, so its size, the number of members and their names are bounded, and only kinds of files that are
data are let through; a bundle of a newer schema is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from appliance import prepared
from appliance.errors import ModelError
from appliance.manifest import MANIFEST

SCHEMA = 1
KIND = "appliance-model-bundle"
FIRST, SIGNATURE = "bundle.json", "bundle.json.sig"
MODEL, LAYOUT = "model/", "prepared/"
"""Where the members lie: the stored object, and its layout for the kernels."""
MOST_BYTES, MOST_MEMBERS, MOST_SIGNATURE_BYTES = 4 << 20, 10_000, 16 << 10
MOST_MODEL_BYTES = 1 << 50
MOST_READ_BYTES, MOST_OTHER_BYTES = 16 << 20, 256 << 20
"""Of the files that are read as a whole here; of tokenizers and the like."""
_READ = (MODEL + MANIFEST, MODEL + "config.json", LAYOUT + prepared.INDEX)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
_LAYOUT_FILES = (prepared.INDEX, prepared.WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file: `name` with its folder in the bundle."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Content:
    """`members` in the order of the file; `layout`: the id of the prepared layout that is with it."""

    digest: str
    name: str
    layout: str | None
    members: tuple[Member, ...]

    @property
    def bytes(self) -> int:
        return sum(member.bytes for member in self.members)


def text(content: Content) -> bytes:
    """The bytes of bundle.json."""
    body = {"kind": KIND, "schema": SCHEMA, **asdict(content)}
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def parse(data: bytes) -> Content:
    """Read bundle.json. Raises ModelError."""
    try:
        raw = json.loads(data.decode())
        kind, schema = raw["kind"], raw["schema"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise refused(f"its {FIRST} is not readable") from None
    if kind != KIND or type(schema) is not int:
        raise refused(f"its {FIRST} is of another kind")
    if schema > SCHEMA:
        raise refused(f"a newer release made it (schema {schema}, this one reads {SCHEMA})",
                      "import it with that release")
    try:
        members = tuple(_member(one) for one in raw["members"])
        content = Content(digest=str(raw["digest"]), name=str(raw["name"]), layout=raw["layout"], members=members)
    except (KeyError, TypeError):
        raise refused(f"a field of its {FIRST} is missing or wrong") from None
    if refusal := _refusal(content):
        raise refused(refusal)
    return content


def member_refusal(name: str) -> str | None:
    """Why no bundle holds a file of this name, or None."""
    folder, _, file = name.partition("/")
    if not _NAME.fullmatch(file):
        return "its name is not plain"
    if folder + "/" == LAYOUT:
        return None if file in _LAYOUT_FILES else "it is no part of a layout"
    if folder + "/" != MODEL:
        return "its folder is unknown"
    return None if file.endswith(_SUFFIXES) else "it is no kind of file that a model needs"


def _member(raw: Mapping[str, Any]) -> Member:
    size, sha256 = raw["bytes"], raw["sha256"]
    if type(size) is not int or not isinstance(sha256, str) or not isinstance(raw["name"], str):
        raise TypeError
    return Member(name=raw["name"], bytes=size, sha256=sha256)


def _refusal(content: Content) -> str | None:
    names = [member.name for member in content.members]
    if not re.fullmatch(r"[0-9a-f]{64}", content.digest):
        return "its digest is none"
    if content.layout is not None and not (isinstance(content.layout, str) and _NAME.fullmatch(content.layout)):
        return "the name of its layout is not plain"
    if len(names) > MOST_MEMBERS or len(set(names)) != len(names):
        return "it lists too many files, or one twice"
    for member in content.members:
        if reason := member_refusal(member.name):
            return f"it holds {member.name[:100]!r}: {reason}"
        if not 0 < member.bytes <= MOST_MODEL_BYTES:
            return f"the size of {member.name} is impossible"
        most = MOST_READ_BYTES if member.name in _READ else MOST_OTHER_BYTES
        if not member.name.endswith((".safetensors", prepared.WEIGHTS)) and member.bytes > most:
            return f"{member.name} is larger than such a file can be"
    if content.bytes > MOST_MODEL_BYTES:
        return "its size is impossible"
    if MODEL + MANIFEST not in names or MODEL + "config.json" not in names:
        return "it does not hold a whole model"
    if sorted(name for name in names if name.startswith(LAYOUT)) != (
            [LAYOUT + file for file in sorted(_LAYOUT_FILES)] if content.layout else []):
        return "its layout is not whole"
    return None


def refused(why: str, do: str = "copy it again, or export it again") -> ModelError:
    """What is said of a file that is no bundle, or a damaged one."""
    return ModelError("the bundle cannot be used", why=why, do=do)
