"""The chat template of a model folder: its text, and whether it renders a conversation.

`read(folder)` is a plain look into files. `check(folder)` renders short conversations with jinja's sandbox, exactly as
transformers does for vLLM, in a child of its own with limits, because a template is a program from a stranger. Runs in
the worker's environment (jinja2 and transformers inside the child). Rules: a user's message must come out, else the
template is broken; system, assistant and tool messages and a list of tools are what it may take; never raises for a
broken template, its reason is the result.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.errors import ModelError, TransientError

LIMIT_S, LIMIT_BYTES = 10, 1 << 30
"""CPU seconds and memory that rendering may take, beyond what the child has taken before."""
START_S = 120
"""For importing on a slow node."""
READY = "ready"
MAX_BYTES = 1 << 20
FILE = "chat_template.jinja"

QUESTION, ANSWER, ORDER, RESULT, TOOL = "Wie spät?", "Fünf Uhr.", "Be brief.", "17:00", "clock_of"
_ASK, _REPLY = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
_CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "abcdefghi", "type": "function", "function": {"name": TOOL, "arguments": {"town": "Ulm"}}}]}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": TOOL, "content": RESULT}
TOOLS = [{"type": "function", "function": {
    "name": TOOL, "description": "Tell the time of a town.", "parameters": {
        "type": "object", "properties": {"town": {"type": "string", "description": "a name"}},
        "required": ["town"]}}}]
TRIALS: Mapping[str, tuple[list[dict[str, Any]], bool, str]] = {
    "user": ([_ASK], False, QUESTION),
    "assistant": ([_ASK, _REPLY, _ASK], False, ANSWER),
    "system": ([{"role": "system", "content": ORDER}, _ASK], False, ORDER),
    "tool": ([_ASK, _CALL, _RESULT], True, RESULT),
    "tools": ([_ASK], True, TOOL),
}
"""What is tried -> messages, whether tools are offered, and the text that must come out."""


def read(folder: Path) -> str | None:
    """The template's text, where transformers looks for it: its own file, then tokenizer_config.json; None: none."""
    try:
        file = folder / FILE
        if file.is_file():
            return file.read_text("utf-8")[:MAX_BYTES] or None
        found = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template")
        if not found and (folder / "chat_template.json").is_file():
            found = json.loads((folder / "chat_template.json").read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if isinstance(found, list):  # several by name; vLLM takes the one named default
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and found else None


def check(folder: Path) -> dict[str, Any] | None:
    """`{roles, tools, fault}` of the folder's template; None where there is none. `fault`: why it cannot be used."""
    text = read(folder)
    if text is None:
        return None
    work = json.dumps({"template": text, "tokens": _tokens(folder), "limits": [LIMIT_S, LIMIT_BYTES]})
    try:
        done = subprocess.run([sys.executable, "-m", __name__], input=work, capture_output=True, text=True,
                              timeout=START_S + 6 * LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        said = done.stdout.splitlines()
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode().splitlines()
    if READY not in said:
        raise TransientError("the chat template could not be tried", why="its child process did not start",
                             do="try again")
    try:
        found: dict[str, Any] = json.loads(said[-1])
    except ValueError:  # killed by its limit, or it ended without a word
        return _broken("it takes too much time or memory")
    return found


def settle(folder: Path, given: str = "") -> dict[str, Any] | None:
    """Put a template given by the operator into the folder and check what is there then; the result of `check`.

    Raises ModelError when the one that was given cannot be used; one that came with the model is a finding only.
    """
    if given:
        (folder / FILE).write_text(given, "utf-8")
    found = check(folder)
    if given and found is not None and found["fault"]:
        raise ModelError("the chat template that was given cannot be used", why=found["fault"],
                         do="correct it, or add the model without it")
    return found


def _broken(why: str) -> dict[str, Any]:
    return {"roles": [], "tools": False, "fault": why}


def _limit(seconds: int, size: int) -> None:
    """Bound what this process takes from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + seconds
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CPU, (until, until))
    resource.setrlimit(resource.RLIMIT_AS, (mapped + size, mapped + size))


def _tokens(folder: Path) -> dict[str, str]:
    """The special tokens by name, which templates write."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name) if isinstance(config, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def trial(template: str, tokens: Mapping[str, str]) -> dict[str, Any]:
    """What this template takes. The one place that runs it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    taken, faults = [], {}
    for name, (messages, offered, wanted) in TRIALS.items():
        try:
            rendered = render_jinja_template([messages], tools=TOOLS if offered else None, chat_template=template,
                                             add_generation_prompt=True, **tokens)
            text = rendered[0][0] if isinstance(rendered, tuple) else rendered[0]
            if wanted in text:
                taken.append(name)
            else:
                faults[name] = "the message does not come out"
        except Exception as error:  # a template raises what it likes
            faults[name] = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if "user" not in taken:
        return _broken(faults["user"])
    return {"roles": [name for name in taken if name != "tools"], "tools": "tools" in taken, "fault": None}


def main() -> None:
    """The child: import, say so, bound itself, render."""
    import transformers.utils.chat_template_utils  # noqa: F401  (before the limits)

    given = json.load(sys.stdin)
    trial("{{ messages[0].content }}", {})  # what is imported late
    print(READY, flush=True)
    _limit(*given["limits"])
    print(json.dumps(trial(given["template"], given["tokens"])))


if __name__ == "__main__":
    main()
