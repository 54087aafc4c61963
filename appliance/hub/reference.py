"""PURE: what `hf:org/name[@revision][:file]` means.

After the colon stands a file of the repository (`model-q8_0.gguf`) or a quantization name as users of llama.cpp and
Ollama write it (`Q8_0`); without it the repository's safetensors files are meant. Does not: ask the Hub whether any of
it exists. Rules: nothing passes that could leave a folder or a URL's place.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from appliance.errors import UsageError

SCHEME = "hf:"
DEFAULT_REVISION = "main"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,95})"
_SHAPE = re.compile(rf"hf:(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/+-]{{0,199}}))?"
                    r"(?::(?P<file>[A-Za-z0-9_][A-Za-z0-9._/+ -]{0,254}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One model of the Hub. `file`: a GGUF file, or a quantization name; None: the safetensors folder."""

    repo: str
    revision: str = DEFAULT_REVISION
    file: str | None = None

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never means anything else tomorrow."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str, file: str | None) -> Reference:
        """The same model with what was found: the commit, and the file's full name."""
        return dataclasses.replace(self, revision=commit, file=file)

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}@{self.revision}" + (f":{self.file}" if self.file else "")


def is_hub(source: str) -> bool:
    """Whether a SOURCE names the Hub and not a path."""
    return source.startswith(SCHEME)


def parse(source: str) -> Reference:
    """Read a SOURCE that begins with `hf:`. Raises UsageError with the right form."""
    found = _SHAPE.fullmatch(source)
    parts = source.removeprefix(SCHEME).replace("@", "/").replace(":", "/").split("/")
    if found is None or any(part.strip(".") == "" or part != part.strip() for part in parts):
        raise UsageError(f"{source!r} does not name a model of the Hub",
                         do="write hf:org/name, hf:org/name@revision, or hf:org/name:Q8_0 for a GGUF file")
    return Reference(repo=found["repo"], revision=found["revision"] or DEFAULT_REVISION, file=found["file"])


def suggested_name(reference: Reference) -> str:
    """What the model is called where no name was given, before it is made a valid one."""
    name = reference.repo.partition("/")[2]
    if reference.file is None:
        return name
    file = reference.file.rpartition("/")[2].removesuffix(".gguf")
    return file if file != reference.file else f"{name}-{file}"
