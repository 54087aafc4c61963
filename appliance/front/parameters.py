"""PURE: which parameters of a request are refused. A gate returns the refusal, or None.

Log-probabilities of the prompt make vLLM compute the logits of every prompt token at once: hundreds of MiB that are not
in the memory plan, so that one client could push the worker out of memory. `prompt_logprobs` asks for them, and so does
`echo` together with log-probabilities.

A body is parsed only when its bytes name one of these, and never above PARSED_BYTES, because a parsed body can take
twenty times its size. What the worker would read and these rules cannot is refused too: a name must not get through by
its spelling.
"""

from __future__ import annotations

import json
import re

NAMES = (b'"prompt_logprobs"', b'"echo"')
ESCAPED_LETTER = re.compile(rb"\\u00[5-7]")
"""The beginning of `_` or a small letter as an escape: no program writes names so, but JSON allows it."""
PARSED_BYTES = 1024**2
CHAT = "/v1/chat/completions"
SETTING = "set `allow_prompt_logprobs: true` to allow it"


def refusal(data: bytes, *, path: str) -> str | None:
    """Why this body may not go to the worker's `path`."""
    if not _suspect(data):
        return None
    if len(data) > PARSED_BYTES:
        return f"a body above {PARSED_BYTES} bytes must not name `prompt_logprobs` or `echo`; {SETTING}"
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError):
        return "the body is not JSON"
    if not isinstance(asked, dict):
        return None  # the worker says what is wrong with it
    if asked.get("prompt_logprobs") is not None:
        return f"`prompt_logprobs` is not allowed here: it takes memory outside the plan; {SETTING}"
    # Chat's `top_logprobs` is 0 when it is not given, and with `echo` 0 asks for the prompt's.
    logprobs = asked.get("top_logprobs", 0) if path == CHAT else asked.get("logprobs")
    if asked.get("echo") and logprobs is not None:
        return f"`echo` with log-probabilities is not allowed here: it takes memory outside the plan; {SETTING}"
    return None


def _suspect(data: bytes) -> bool:
    if json.detect_encoding(data) not in ("utf-8", "utf-8-sig"):
        return True  # the names look otherwise then
    return any(name in data for name in NAMES) or ESCAPED_LETTER.search(data) is not None
