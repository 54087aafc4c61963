"""Chat templates as they are tried when a model is added, with jinja's sandbox and vLLM's own list of parsers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

from appliance import parsers  # noqa: E402
from appliance.errors import ModelError  # noqa: E402
from appliance.importing import template  # noqa: E402
from appliance.quantize.checkpoint import quantize  # noqa: E402
from appliance.quantize.layers import Recipe, parse_recipe  # noqa: E402
from tests.quantize.models import LLAMA, write_random  # noqa: E402

pytestmark = pytest.mark.worker
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WITH_TOOLS = ("{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
              "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}")
NO_SYSTEM = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
             "{% endif %}{{ m.content }}{% endfor %}")
ALTERNATING = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
               "{{ raise_exception('roles must alternate') }}{% endif %}{{ bos_token }}[INST]{{ m.content }}{% endfor %}")
ROLES = ["user", "assistant", "system", "tool"]


@pytest.mark.parametrize(("text", "roles", "tools"), [
    (CHATML, ROLES, False), (WITH_TOOLS, ROLES, True), (NO_SYSTEM, ["user", "assistant", "tool"], False),
    (ALTERNATING, ["user", "assistant"], False),
    ("{% generation %}{{ messages[-1].content }}{% endgeneration %}", ["user", "tool"], False),
])
def test_what_a_template_takes(text: str, roles: list[str], tools: bool) -> None:
    assert template.trial(text, {"bos_token": "<s>"}) == {"roles": roles, "tools": tools, "fault": None}


@pytest.mark.parametrize(("text", "why"), [
    ("{% for m in messages %}", "TemplateSyntaxError"),
    ("{{ messages[0].content | nofilter }}", "nofilter"),
    ("hello", "the message does not come out"),
    ("{{ raise_exception('no') }}", "no"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}", "SecurityError"),
    ("{{ messages.append(1) }}{{ messages[0].content }}", "SecurityError"),
    ("{% include '/etc/passwd' %}{{ messages[0].content }}", "TypeError"),
    ("{% set x = cycler.__init__.__globals__.os.popen('id').read() %}{{ messages[0].content }}", "SecurityError"),
])
def test_a_broken_or_hostile_template_has_its_reason(text: str, why: str) -> None:
    found = template.trial(text, {})
    assert why in found["fault"]
    assert found["roles"] == []


@pytest.mark.parametrize("text", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}",
    "{{ 'a' * 9999999999 }}{{ messages[0].content }}",
])
def test_a_template_cannot_take_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(template, "LIMIT_S", 2)
    (tmp_path / "chat_template.jinja").write_text(text)
    began = time.monotonic()
    found = template.check(tmp_path)
    assert found is not None
    assert found["fault"]
    assert time.monotonic() - began < 60


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert template.read(tmp_path) is None
    assert template.check(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]}))
    assert template.read(tmp_path) == "a"
    config.write_text(json.dumps({"chat_template": "c"}))
    assert template.read(tmp_path) == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert template.read(tmp_path) == "d"
    config.write_text("[" * 100_000)
    assert template._tokens(tmp_path) == {}


def added(folder: Path, out: Path, given: str = "", own: str | None = None) -> dict[str, Any]:
    write_random(folder, LLAMA)
    if own is not None:
        (folder / "chat_template.jinja").write_text(own)
    recipe = parse_recipe({"grid": "minmax", "chat_template": given})
    return quantize(folder, out, recipe, lambda event: None)


def test_case_013_a_template_is_tried_when_a_model_is_added(tmp_path: Path) -> None:
    report = added(tmp_path / "a", tmp_path / "out-a", own=CHATML)
    assert (report["chat"], report["template"]["roles"]) == (True, ROLES)
    report = added(tmp_path / "b", tmp_path / "out-b", own="{{ broken")
    assert report["chat"] is False
    assert "TemplateSyntaxError" in report["template"]["fault"]
    report = added(tmp_path / "c", tmp_path / "out-c", own="{{ broken", given=NO_SYSTEM)
    assert report["chat"] is True
    assert (tmp_path / "out-c/chat_template.jinja").read_text() == NO_SYSTEM
    with pytest.raises(ModelError, match="the chat template that was given cannot be used"):
        added(tmp_path / "d", tmp_path / "out-d", given="{{ broken")
    assert Recipe().chat_template == ""


def source_of(kind: str, parser: str) -> str:
    """The source text of a parser of vLLM, and of the engine behind it."""
    import importlib
    import inspect

    import vllm.parser

    if kind == "tools":
        from vllm.tool_parsers import ToolParserManager

        found = ToolParserManager.get_tool_parser(parser)
    else:
        from vllm.reasoning import ReasoningParserManager

        found = ReasoningParserManager.get_reasoning_parser(parser)
    text = ""
    for cls in found.__mro__:
        if cls.__module__.startswith("vllm."):
            text += inspect.getsource(importlib.import_module(cls.__module__))
    folder = Path(vllm.parser.__path__[0])
    return text + "".join(file.read_text() for file in folder.glob(f"{parser[:4]}*.py"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_names_are_those_of_this_vllm() -> None:
    vllm_tools = pytest.importorskip("vllm.tool_parsers")
    import vllm.reasoning

    assert set(vllm_tools._TOOL_PARSERS_TO_REGISTER) == set(parsers.TOOL_PARSERS)
    assert set(vllm.reasoning._REASONING_PARSERS_TO_REGISTER) == set(parsers.REASONING_PARSERS)


NOT_IN_THE_PARSER = ("dictionary of argument name and its value", "<｜Assistant｜>", "[TOOL_CALLS]")
"""Words of the family's prompt; the parser of Mistral takes its token from the tokenizer's list."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("kind", "row"), [("tools", row) for row in parsers.TOOLS] + [("reasoning", row) for row in parsers.REASONING],
                         ids=lambda value: value if isinstance(value, str) else value.parser)
def test_a_mark_is_a_word_of_its_parser(kind: str, row: parsers.Row) -> None:
    pytest.importorskip("vllm")
    source = source_of(kind, row.parser)
    for mark in row.marks:
        assert mark in NOT_IN_THE_PARSER or mark in source or mark.strip("<>=|") in source, mark


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["tools", "reasoning"])
def test_the_tokens_that_a_parser_demands_are_listed(kind: str) -> None:
    """Every parser that a template may choose is made with a vocabulary of letters, then with the tokens of the list."""
    pytest.importorskip("vllm")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    needs = parsers.TOOL_TOKENS if kind == "tools" else parsers.REASONING_TOKENS
    rows = parsers.TOOLS if kind == "tools" else parsers.REASONING

    def refuses(parser: str, more: tuple[str, ...]) -> bool:
        letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, additional_special_tokens=[*more])
        make = ToolParserManager.get_tool_parser if kind == "tools" else ReasoningParserManager.get_reasoning_parser
        try:
            make(parser)(tokenizer)
        except (RuntimeError, KeyError) as error:
            return isinstance(error, KeyError) or "could not locate" in str(error)
        return False

    tried = {row.parser for row in rows} | set(needs)
    assert {parser for parser in tried if refuses(parser, ())} == set(needs)
    for parser, tokens in needs.items():
        assert not refuses(parser, tokens), parser


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_parser_of_thinking_that_is_chosen_says_when_it_has_ended() -> None:
    """Else an answer is never held to a schema: vLLM waits for the end of the thinking."""
    pytest.importorskip("vllm")
    from vllm.reasoning import ReasoningParser, ReasoningParserManager

    def tells(parser: str) -> bool:
        return ReasoningParserManager.get_reasoning_parser(parser).is_reasoning_end is not ReasoningParser.is_reasoning_end

    assert all(tells(row.parser) for row in parsers.REASONING)
    assert not tells("granite"), "it may be chosen again"
