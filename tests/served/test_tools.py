"""Tools and structured output with real vLLM and the openai client.

SmolLM2 is too weak to call a tool or to think by itself, so its answers are held to a form: by `tool_choice`, by a JSON
schema, or by a choice of texts that the parser then has to read. What needs a start of its own is `heavy` (`make
test-models`); the rest shares the server of the other tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.served.conftest import Served, environment, run_applianctl, serve

pytestmark = pytest.mark.served
QUESTION: list[Any] = [{"role": "user", "content": "What time is it in Ulm?"}]
TOWN = {"type": "object", "properties": {"town": {"type": "string", "maxLength": 12}}, "required": ["town"],
        "additionalProperties": False}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "clock_of", "description": "Tell the time.", "parameters": TOWN}}]
NAMED: Any = {"type": "function", "function": {"name": "clock_of"}}
CALL = '<tool_call>\n{"name": "clock_of", "arguments": {"town": "Ulm"}}\n</tool_call>'
TEMPLATE = ("{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} Answer with <tool_call>{...}</tool_call>"
            "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def client_of(service: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.base_url, api_key="none", timeout=600, max_retries=0)


def town_of(text: str) -> str:
    value = json.loads(text)
    assert list(value) == ["town"]
    return str(value["town"])


def test_an_answer_follows_a_schema(served: Served) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN, "strict": True}}
    done = client_of(served).chat.completions.create(model="default", messages=QUESTION, response_format=schema,
                                                     max_tokens=60, temperature=0)
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(town_of(done.choices[0].message.content or ""), str)
    text = ""
    for part in client_of(served).chat.completions.create(model="default", messages=QUESTION, response_format=schema,
                                                          max_tokens=60, temperature=0, stream=True):
        text += part.choices[0].delta.content or "" if part.choices else ""
    assert text == done.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_that_must_be_called_is_called_without_a_parser(served: Served, choice: Any) -> None:
    shown = served.applianctl("model", "show").stdout
    assert "tool calls     none: the chat template shows no tool format" in shown
    assert served.status()["tools"] == "none"
    done = client_of(served).chat.completions.create(model="default", messages=QUESTION, tools=TOOLS, tool_choice=choice,
                                                     max_tokens=80, temperature=0)
    calls: Any = done.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["clock_of"]
    town_of(calls[0].function.arguments)


def test_a_free_choice_without_a_parser_is_told(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(served).chat.completions.create(model="default", messages=QUESTION, tools=TOOLS, max_tokens=8)
    assert "writes tool calls in no form that is known here" in str(caught.value)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The default model with a template of its own, whose tool calls vLLM can read."""
    home = tmp_path_factory.mktemp("hermes") / "home"
    home.mkdir()
    file = home / "template.jinja"
    file.write_text(TEMPLATE)
    (home / "appliance.yaml").write_text("")
    added = run_applianctl(home, "model", "add", "smollm2", "--name", "caller", "--chat-template", str(file))
    assert added.returncode == 0, added.stderr
    service = serve(home, settings="model: caller\n")
    yield service
    service.stop()


@pytest.mark.heavy
def test_the_parser_of_the_template_reads_a_call(hermes: Served) -> None:
    assert hermes.status()["tools"] == "hermes"
    assert "tool calls     hermes: the chat template writes <tool_call>" in hermes.applianctl("model", "show").stdout
    done = client_of(hermes).chat.completions.create(
        model="default", messages=QUESTION, tools=TOOLS, tool_choice="auto", max_tokens=60, temperature=0,
        extra_body={"structured_outputs": {"choice": [CALL]}})
    calls: Any = done.choices[0].message.tool_calls
    assert done.choices[0].finish_reason == "tool_calls"
    assert [(call.function.name, town_of(call.function.arguments)) for call in calls] == [("clock_of", "Ulm")]
    answered = [*QUESTION, done.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": calls[0].id, "content": "17:00"}]
    again = client_of(hermes).chat.completions.create(model="default", messages=answered, tools=TOOLS, max_tokens=8,
                                                      temperature=0)
    assert again.choices[0].message.content is not None


@pytest.mark.heavy
def test_a_parser_of_thinking_tells_it_from_the_answer(tmp_path: Path) -> None:
    service = serve(tmp_path / "home", settings="reasoning: qwen3\n")
    try:
        assert "reasoning      qwen3: set by the operator" in service.applianctl("model", "show").stdout
        free: Any = client_of(service).chat.completions.create(model="default", messages=QUESTION, max_tokens=30, temperature=0)
        # Of a model that does not think this parser takes all for thinking, which `reasoning: none` is for.
        assert free.choices[0].message.reasoning
        held = client_of(service).chat.completions.create(
            model="default", messages=QUESTION, max_tokens=60, temperature=0, extra_body={
                "structured_outputs": {"choice": ["<think>\nIt is summer.\n</think>\n\n17:00"]}, "include_reasoning": False})
        assert (held.choices[0].message.content or "").strip() == "17:00"
    finally:
        service.stop()


def test_case_013_a_template_that_fails_is_told_at_add(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "appliance.yaml").write_text("")
    file = tmp_path / "bad.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}")
    done = run_applianctl(home, "model", "add", "smollm2", "--name", "bad", "--chat-template", str(file))
    assert done.returncode == 65, done.stderr
    assert "the chat template that was given cannot be used: TemplateSyntaxError" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("applianctl: ")]) == 1
    assert "No model" in run_applianctl(home, "model", "list").stdout
    assert environment(home)["HOME"] == str(home)
