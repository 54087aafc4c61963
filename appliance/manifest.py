"""manifest.json: what a stored object is made from, how, and the size and digests of each of its files.

Does: compute an object's key, write and read the manifest, compare a folder with it. Does not: know where objects
lie or change one. Rules: a finding is one sentence that begins with the name of the damaged file; only what decides
the contents (source, recipe, format and rule versions) enters the key, nothing of the host or the time; the manifest
carries a checksum over itself, which only those of the first releases lack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance import disk, pieces
from appliance.disk import sha256
from appliance.quantize.format import FORMAT_VERSION

SCHEMA = 1
RECIPE_VERSION = 2
"""Raise it when the rules that fill the open fields of a recipe (group size, table bits) change their answers."""
MANIFEST = "manifest.json"
_FIELDS = {
    "schema": int, "source": str, "source_digest": str, "recipe": dict, "files": dict, "report": dict, "created": str,
}
_FIRST = {*_FIELDS, "digest", "recipe_version", "format_version"}
"""All fields of a manifest without a checksum: with others, it is one whose checksum was damaged."""


def key(source_digest: str, recipe: Mapping[str, Any]) -> str:
    """The digest of an object, 64 hex digits. `recipe` holds JSON values; None is a field left to the rules."""
    parts = {
        "source": source_digest,
        "recipe": dict(recipe),
        "format_version": FORMAT_VERSION,
        "recipe_version": RECIPE_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write(
    folder: Path, *, digest: str, source: str, source_digest: str, recipe: Mapping[str, Any],
    report: Mapping[str, Any], created: str,
) -> str | None:
    """Write manifest.json over the files in `folder`, or say why this folder is no complete model."""
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_symlink() or not p.is_dir()}
    files.pop(MANIFEST, None)
    for name, path in files.items():
        if path.is_symlink() or not path.is_file():
            return f"{name} is not a plain file"
        if path.stat().st_size == 0:
            return f"{name} is empty"
    if "config.json" not in files:
        return "config.json is missing"
    manifest = {
        "schema": SCHEMA,
        "digest": digest,
        "source": source,
        "source_digest": source_digest,
        "recipe": dict(recipe),
        "recipe_version": RECIPE_VERSION,
        "format_version": FORMAT_VERSION,
        "files": {name: _entry(path) for name, path in files.items()},
        "report": dict(report),
        "created": created,
    }
    (folder / MANIFEST).write_text(text(manifest), encoding="utf-8")
    return None


def text(manifest: Mapping[str, Any]) -> str:
    """The text of manifest.json, with its checksum."""
    body = {field: value for field, value in manifest.items() if field != "checksum"}
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1, sort_keys=True) + "\n"


def made_by_these_rules(manifest: Mapping[str, Any]) -> bool:
    """Whether this release would make the same object of the same source: else its key cannot be computed here."""
    return (manifest.get("recipe_version"), manifest.get("format_version")) == (RECIPE_VERSION, FORMAT_VERSION)


def read(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The manifest of an object, or a finding about it. Other fields than the known ones pass."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except PermissionError:
        raise  # not damage: somebody else may read it
    except OSError as error:
        return {}, f"{MANIFEST}: {error.strerror}"
    except (ValueError, RecursionError):
        return {}, f"{MANIFEST}: not readable as JSON"
    for field, kind in _FIELDS.items():
        if not isinstance(manifest, dict) or not isinstance(manifest.get(field), kind):
            return {}, f"{MANIFEST}: `{field}` is missing or wrong"
    checksum = manifest.get("checksum")
    if manifest["schema"] == SCHEMA and checksum is None and manifest.keys() - _FIRST:
        return {}, f"{MANIFEST}: its checksum is missing"
    if manifest["schema"] == SCHEMA and checksum is not None and checksum != _checksum(manifest):
        return {}, f"{MANIFEST}: its checksum is wrong"
    if manifest["schema"] != SCHEMA:
        return {}, f"{MANIFEST}: schema {manifest['schema']} is not {SCHEMA}, another release wrote it"
    for name, entry in manifest["files"].items():
        if not _is_entry(entry) or name.startswith("/") or ".." in Path(name).parts:
            return {}, f"{MANIFEST}: the entry of {name} is wrong"
    return manifest, None


def shape(folder: Path) -> list[str]:
    """Quick findings, from sizes alone: missing, truncated or grown files, a broken manifest."""
    manifest, broken = read(folder)
    if broken:
        return [broken]
    findings = []
    for name, entry in manifest["files"].items():
        try:
            size = (folder / name).lstat().st_size
        except PermissionError:
            raise  # not damage: somebody else may read it
        except OSError as error:
            findings.append(f"{name}: {error.strerror}")
            continue
        if size != entry["bytes"]:
            findings.append(f"{name}: {size} bytes, recorded {entry['bytes']}")
    return findings


def verify(folder: Path) -> list[str]:
    """All findings; reads every byte of the object."""
    manifest, broken = read(folder)
    if broken:
        return [broken]
    findings = shape(folder)
    damaged = {finding.split(":")[0] for finding in findings}
    if made_by_these_rules(manifest) and key(manifest["source_digest"], manifest["recipe"]) != folder.name:
        findings.append(f"{MANIFEST}: its source and recipe do not belong to this digest")
    for name, entry in manifest["files"].items():
        if name in damaged:
            continue
        try:
            actual = sha256(folder / name)
        except PermissionError:
            raise
        except OSError as error:
            findings.append(f"{name}: cannot be read ({error.strerror})")
            continue
        if actual != entry["sha256"]:
            findings.append(f"{name}: contents changed (SHA-256 {actual[:12]}, recorded {entry['sha256'][:12]})")
    return findings


def _entry(path: Path) -> dict[str, Any]:
    found = disk.digests(path)
    entry: dict[str, Any] = {"sha256": found.whole, "bytes": found.bytes}
    return {**entry, "pieces": list(found.pieces)} if found.pieces else entry


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or type(entry.get("bytes")) is not int:
        return False
    listed = entry.get("pieces")
    return listed is None or (isinstance(listed, list) and len(listed) == pieces.count(entry["bytes"])
                              and all(isinstance(one, str) for one in listed))


def _checksum(manifest: Mapping[str, Any]) -> str:
    body = {field: value for field, value in manifest.items() if field != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
