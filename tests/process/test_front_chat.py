"""A model that cannot chat: one clear line at the door, and completions all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.house import House, built

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
ASKED = {"/v1/chat/completions": MESSAGES, "/v1/responses": {"input": "Hello"}}


@pytest.fixture
def house() -> Iterator[House]:
    with built() as made:
        yield made


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("fault", "why"), [("", "has no chat template: use /v1/completions"),
                                            ("UndefinedError: x", "cannot be used (UndefinedError: x)")])
def test_case_013_chat_is_refused_with_the_fix(house: House, path: str, fault: str, why: str) -> None:
    house.work()
    house.open(model="mine", chat=False, chat_fault=fault)
    answer = house.ask("POST", path, ASKED[path])
    assert (answer.status, answer.code) == (400, "no_chat_template")
    message = answer.json()["error"]["message"]
    assert why in message
    assert "--chat-template FILE" in message
    assert "\n" not in message
    assert house.complete(max_tokens=2).status == 200
    assert house.metric("vllm:num_requests_running") == 0


@pytest.mark.parametrize(("choice", "known", "status"), [
    (None, "none", 400), ("auto", "none", 400), ("required", "none", 200), ("none", "none", 200),
    ({"type": "function", "function": {"name": "f"}}, "none", 200), ("auto", "hermes", 200), (None, None, 200),
])
def test_a_free_choice_among_tools_needs_a_parser(house: House, choice: object, known: str | None, status: int) -> None:
    house.work()
    house.open(model="mine", chat=True, tools=known)
    body = MESSAGES | {"tools": [{"type": "function", "function": {"name": "f"}}]} | ({"tool_choice": choice} if choice else {})
    answer = house.ask("POST", "/v1/chat/completions", body)
    assert answer.status == status
    assert status == 200 or answer.code == "no_tool_parser"


def test_a_model_with_a_template_chats(house: House) -> None:
    house.work()
    house.open(model="mine", chat=True, chat_fault="")
    assert house.ask("POST", "/v1/chat/completions", MESSAGES).status == 200
