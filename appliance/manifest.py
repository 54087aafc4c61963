"""manifest.json: what a stored object is made from, how, and the size and SHA-256 of each of its files.

Does: compute an object's key, write and read the manifest, compare a folder with it. Does not: know where objects
lie or change one. Rules: a finding is one sentence that begins with the name of the damaged file; only what decides
the contents (source, recipe, format and rule versions) enters the key, nothing of the host or the time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.disk import sha256
from appliance.quantize.format import FORMAT_VERSION

SCHEMA = 1
RECIPE_VERSION = 2
"""Raise it when the rules that fill the open fields of a recipe (group size, table bits) change their answers."""
MANIFEST = "manifest.json"
_FIELDS = {
    "schema": int, "source": str, "source_digest": str, "recipe": dict, "files": dict, "report": dict, "created": str,
}


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
        "files": {name: {"sha256": sha256(path), "bytes": path.stat().st_size} for name, path in files.items()},
        "report": dict(report),
        "created": created,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return None


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
    if manifest["schema"] != SCHEMA:
        return {}, f"{MANIFEST}: schema {manifest['schema']} is not {SCHEMA}, another release wrote it"
    for name, entry in manifest["files"].items():
        known = isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        if not known or name.startswith("/") or ".." in Path(name).parts:
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
    ours = (manifest.get("recipe_version"), manifest.get("format_version")) == (RECIPE_VERSION, FORMAT_VERSION)
    if ours and key(manifest["source_digest"], manifest["recipe"]) != folder.name:
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
