"""The text that is scored, as windows of token ids.

Without a file it is the language reference that every Python carries (`pydoc_data.topics`): plain technical English,
nothing to ship, nothing to download. Rules: figures compare only where the text's digest is the same, so it is always
reported; every window begins as the tokenizer begins a prompt (a begin token where it has one).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ModelError, UsageError

if TYPE_CHECKING:
    import torch

WINDOW = 512
"""Tokens of a window; the second half is scored, so that each scored token has at least 256 before it."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """`digest`: the first 12 hex digits of the SHA-256 of the text in UTF-8."""

    name: str
    words: str
    digest: str


def read_text(path: Path | None) -> Text:
    """A file's text, or Python's language reference. Raises UsageError when the file cannot be read as UTF-8."""
    if path is None:
        name, words = "the language reference of Python", _reference()
    else:
        try:
            name, words = str(path), path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"{path} cannot be read", why=why, do="give a plain text file") from None
    return Text(name=name, words=words, digest=hashlib.sha256(words.encode()).hexdigest()[:12])


def _reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError("there is no default text", why="this Python was installed without pydoc_data",
                         do="give --text FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(text: Text, folder: Path, tokens: int) -> torch.Tensor:
    """Token ids [n, 512] of about `tokens` scored tokens, spread over the whole text.

    Raises UsageError when the text does not fill one window, ModelError when the tokenizer cannot be read.
    """
    import torch
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ModelError("the tokenizer cannot be read", why=str(error)[:120], do="verify the model") from None
    begin = tokenizer.encode("").ids[:1]
    own = WINDOW - len(begin)
    ids = tokenizer.encode(text.words, add_special_tokens=False).ids
    available = len(ids) // own
    if available == 0:
        raise UsageError(f"{text.name} is too short", why=f"it has {len(ids)} tokens, one window needs {own}",
                         do="give a longer text")
    wanted = min(available, max(1, round(tokens / (WINDOW // 2))))
    starts = [own * (i * available // wanted) for i in range(wanted)]
    return torch.tensor([begin + ids[start : start + own] for start in starts])
