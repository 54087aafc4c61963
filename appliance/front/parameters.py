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
from collections.abc import Mapping
from typing import Any

NAMES = (b'"prompt_logprobs"', b'"echo"')
ESCAPED_LETTER = re.compile(rb"\\u00[5-7]")
"""The beginning of `_` or a small letter as an escape: no program writes names so, but JSON allows it."""
SEVERAL = re.compile(rb'"prompt"\s*:\s*\[|"n"\s*:\s*\d{1,}')
"""A list of prompts, or more than one choice."""
PARSED_BYTES = 1024**2
CHAT = "/v1/chat/completions"
TEMPLATED = (CHAT, "/v1/responses")
"""Paths whose messages a chat template makes into a prompt."""
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


def chat_refusal(path: str, status: Mapping[str, Any]) -> str | None:
    """Why the model that is served cannot chat; it can complete a prompt all the same."""
    if path not in TEMPLATED or status.get("chat") is not False:
        return None
    fault = status.get("chat_fault")
    why = f"has a chat template that cannot be used ({fault})" if fault else "has no chat template"
    return (f"the model {status.get('model')} {why}: use /v1/completions, or add the model again with "
            "`applianctl model add SOURCE --chat-template FILE`")


def tools_refusal(data: bytes, path: str, status: Mapping[str, Any]) -> str | None:
    """Why the model that is served cannot choose among tools; vLLM's own answer names arguments that no client has."""
    if path != CHAT or status.get("tools") != "none" or b'"tools"' not in data or len(data) > PARSED_BYTES:
        return None
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError):
        return None  # the worker says what is wrong with it
    if not isinstance(asked, dict) or not asked.get("tools") or asked.get("tool_choice", "auto") != "auto":
        return None
    return (f"the model {status.get('model')} writes tool calls in no form that is known here: set `tool_choice` to "
            "`required` or to a function, or the setting `tools` to a parser of vLLM")


def sequences(data: bytes, *, most: int) -> int:
    """How many answers this body asks for at once, prompts times `n`: each takes a seat. One that is too large to be
    parsed and may ask for several counts as `most`."""
    if not (SEVERAL.search(data) or ESCAPED_LETTER.search(data)):
        return 1
    if len(data) > PARSED_BYTES:
        return most
    try:
        asked = json.loads(data)
        prompts, choices = asked.get("prompt"), asked.get("n")
    except (ValueError, RecursionError, AttributeError):
        return 1  # the worker says what is wrong with it
    several = isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list))
    return (len(prompts) if several else 1) * (choices if isinstance(choices, int) and choices > 1 else 1)


def sequences_refusal(wanted: int, *, most: int) -> str | None:
    """Why a request may not ask for so many answers at once."""
    if wanted > most:
        return f"{wanted} answers are asked for at once (prompts times `n`); one request may have {most}"
    return None


def _suspect(data: bytes) -> bool:
    if json.detect_encoding(data) not in ("utf-8", "utf-8-sig"):
        return True  # the names look otherwise then
    return any(name in data for name in NAMES) or ESCAPED_LETTER.search(data) is not None
