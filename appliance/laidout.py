"""A prepared folder on the disk against its index (`appliance.prepared`): is it whole, and does it serve this object?

Does: read the index, compare sizes and, where asked, contents. Does not: know where such folders lie, or change one.
Rule: a finding is one sentence; what this account may not read is no finding.
"""

from __future__ import annotations

from pathlib import Path

from appliance import disk, prepared
from appliance.prepared import Index


def read(folder: Path, digest: str) -> tuple[Index | None, str]:
    """The index of a folder that serves the object `digest` by its index and sizes, or None and why it does not."""
    try:
        text = (folder / prepared.INDEX).read_text("utf-8")
        size = (folder / prepared.WEIGHTS).lstat().st_size
    except PermissionError:
        raise  # not damage: somebody else may read it
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{folder.name}: {getattr(error, 'strerror', None) or 'not readable as text'}"
    index, broken = prepared.read_index(text)
    if index is None:
        return None, f"{prepared.INDEX}: {broken}"
    reason = prepared.index_refusal(index, source=digest, weights_bytes=size)
    return (None, reason) if reason else (index, "")


def finding(folder: Path, digest: str, *, contents: bool) -> str | None:
    """Why the folder cannot be used for the object `digest`, or None; with `contents` every byte is read."""
    index, reason = read(folder, digest)
    if index is None:
        return reason
    try:
        if contents and disk.sha256(folder / prepared.WEIGHTS) != index.sha256:
            return f"{prepared.WEIGHTS}: contents changed"
    except PermissionError:
        raise
    except OSError as error:
        return f"{prepared.WEIGHTS}: cannot be read ({error.strerror})"
    return None
