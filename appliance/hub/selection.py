"""PURE: which files of a repository are needed, from its listing.

Safetensors repositories: config, tokenizer, templates, and the weight files of the index. GGUF repositories: the file
that was named, with all its parts. Never: pickled weights, ONNX, code, other folders. Rules: a choice that is not
plain is refused with the names to choose from; every file has a size and a checksum, or the listing is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from appliance.errors import ModelError
from appliance.hub.reference import Reference
from appliance.importing.source import EXTRAS, INDEX, MOST_BYTES, OTHER_BYTES

CONFIG = "config.json"
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_QUANT = re.compile(r"(?i)(?:^|[-._/])((?:UD-)?[IT]?Q\d(?:_[0-9a-z]+)*|MXFP4(?:_MOE)?|BF16|F16|F32)(?=[-._/]|$)")
_NOT_A_MODEL = re.compile(r"(?i)mmproj|imatrix")


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a commit. `sha256` of its contents where it is stored as LFS, else `git_sha1` of it as a blob."""

    name: str
    bytes: int
    sha256: str | None
    git_sha1: str | None

    @property
    def local_name(self) -> str:
        return PurePosixPath(self.name).name


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a repository holds at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    def by_name(self) -> dict[str, RemoteFile]:
        return {file.name: file for file in self.files}


def read_listing(repo: str, commit: object, siblings: Iterable[Mapping[str, Any]]) -> Listing:
    """Take over what the Hub says of a commit, leaving out files that could never be wanted. Raises ModelError."""
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise _cannot(repo, "its listing names no commit", "check hub.endpoint")
    files = []
    for raw in siblings:
        name = raw.get("name")
        if not isinstance(name, str) or not _safe(name) or not _wanted(name):
            continue
        size, sha256, git = raw.get("bytes"), raw.get("sha256"), raw.get("git_sha1")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise _cannot(repo, f"its listing gives no size of {name}", "check hub.endpoint")
        if not _hexadecimal(sha256, 64) and not _hexadecimal(git, 40):
            raise _cannot(repo, f"its listing gives no checksum of {name}", "check hub.endpoint")
        if name in EXTRAS or name in MOST_BYTES:
            most = MOST_BYTES.get(name, OTHER_BYTES)
            if size > most:
                raise _cannot(repo, f"{name} has {size} bytes; at most {most} are allowed", "use another model")
        files.append(RemoteFile(name=name, bytes=size, sha256=sha256 if _hexadecimal(sha256, 64) else None,
                                git_sha1=git if _hexadecimal(git, 40) else None))
    return Listing(repo=repo, commit=commit, files=tuple(sorted(files, key=lambda file: file.name)))


def gguf_files(listing: Listing, wanted: str) -> tuple[RemoteFile, ...]:
    """The file that `wanted` (a name or a quantization) stands for, with its other parts. Raises ModelError."""
    models = [file for file in listing.files if file.name.endswith(".gguf") and not _NOT_A_MODEL.search(file.name)]
    exact = [file for file in models if wanted in (file.name, file.local_name)]
    matching = exact or [file for file in models if quant_of(file.name) == wanted.upper()]
    stems = sorted({_stem(file.name) for file in matching})
    if not matching:
        known = sorted({quant_of(file.name) or file.name for file in models})
        why = f"it has {', '.join(known[:20])}" if known else "it has no GGUF file"
        raise _cannot(listing.repo, f"no GGUF file is called {wanted!r}; {why}", "name one of them after the colon")
    if len(stems) > 1:
        raise _cannot(listing.repo, f"{wanted} means {len(stems)} files: {', '.join(stems[:5])}",
                      "give the file's whole name after the colon")
    parts = [file for file in models if _stem(file.name) == stems[0]]
    split = SPLIT.fullmatch(parts[0].name)
    if split:
        parts = [file for file in parts if SPLIT.fullmatch(file.name)]
        if len(parts) != int(split[3]):
            raise _cannot(listing.repo, f"{len(parts)} of {int(split[3])} parts of {stems[0]} are there", "use another")
    return tuple(parts)


def small_files(listing: Listing) -> tuple[RemoteFile, ...]:
    """Config, index, tokenizer and templates of a safetensors repository. Raises ModelError when it is none."""
    there = listing.by_name()
    if CONFIG not in there or not any(name.endswith(".safetensors") for name in there):
        ggufs = sorted({quant_of(name) or name for name in there if name.endswith(".gguf")})
        if ggufs:
            raise _cannot(listing.repo, f"it holds GGUF files: {', '.join(ggufs[:20])}",
                          f"name one after the colon, such as hf:{listing.repo}:{_best(ggufs)}")
        if CONFIG in there:
            raise _cannot(listing.repo, "it has no .safetensors files (pickled weights can run code and are not used)",
                          "use a repository with .safetensors files")
        raise _cannot(listing.repo, f"it has no {CONFIG}", "use a repository of a language model")
    return tuple(there[name] for name in (CONFIG, INDEX, *EXTRAS) if name in there)


def weight_files(listing: Listing, index: object) -> tuple[RemoteFile, ...]:
    """The weight files that `index` (the parsed index, None where there is none) names. Raises ModelError."""
    there = listing.by_name()
    if index is None:
        found = [file for file in listing.files
                 if file.name.endswith(".safetensors") and not file.name.startswith("consolidated")]
        whole = [file for file in found if file.name == "model.safetensors"]
        return tuple(whole or found)
    mapped = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(mapped, Mapping) or not mapped or not all(isinstance(name, str) for name in mapped.values()):
        raise _cannot(listing.repo, f"{INDEX} has no weight_map", "use another repository")
    names = sorted(set(mapped.values()))
    odd = [name for name in names if not name.endswith(".safetensors") or "/" in name]
    missing = [name for name in names if name not in there]
    if odd:
        raise _cannot(listing.repo, f"{INDEX} names {odd[0]!r}, which is no weight file of it", "use another one")
    if missing:
        raise _cannot(listing.repo, f"{len(missing)} weight files of its index are not there, first {missing[0]}",
                      "use another revision")
    return tuple(there[name] for name in names)


def contents_of(files: Iterable[RemoteFile]) -> str:
    """One digest for what is in these files, whatever commit they are of: a new model card is no new model."""
    said = sorted((file.local_name, file.sha256 or file.git_sha1) for file in files)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def gguf_choice(listing: Listing, reference: Reference) -> tuple[RemoteFile, ...]:
    """The GGUF files a reference with a file means; empty for one without."""
    return gguf_files(listing, reference.file) if reference.file is not None else ()


def quant_of(name: str) -> str | None:
    """`Q4_K_M` of `Model-Q4_K_M-00001-of-00002.gguf`; None where the name does not say."""
    found: list[str] = _QUANT.findall(_stem(name))
    return found[-1].upper() if found else None


def _best(quants: list[str]) -> str:
    """The closest to the original among those that are offered: it is quantized once more here."""
    order = ("BF16", "F16", "Q8_0", "F32", "Q6_K", "Q4_0", "Q4_1")
    return next((quant for quant in order if quant in quants), quants[0])


def _stem(name: str) -> str:
    split = SPLIT.fullmatch(name)
    return split[1] if split else name.removesuffix(".gguf")


def _wanted(name: str) -> bool:
    """Weight files, and of the rest only what is taken over; folders only around GGUF files."""
    if name.endswith(".gguf"):
        return True
    return name in (CONFIG, INDEX, *EXTRAS) or ("/" not in name and name.endswith(".safetensors"))


def _safe(name: str) -> bool:
    parts = name.split("/")
    return len(name) <= 400 and name.isprintable() and "\\" not in name and all(part.strip(". ") for part in parts)


def _hexadecimal(text: object, length: int) -> bool:
    return isinstance(text, str) and re.fullmatch(rf"[0-9a-f]{{{length}}}", text) is not None


def _cannot(repo: str, why: str, do: str) -> ModelError:
    return ModelError(f"hf:{repo} cannot be used", why=why, do=do)
