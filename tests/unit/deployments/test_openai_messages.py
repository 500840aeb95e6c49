"""Chat messages: which are taken, and what templates get of them."""

from __future__ import annotations

import pytest

from replica.errors import InvalidRequest
from tests.unit.deployments.openai_bodies import USER, chat


def content_of(content: object, **message: object) -> str:
    return chat(messages=[{"role": "user", "content": content, **message}]).messages[0].content


def test_text_parts_are_their_texts_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert content_of(parts) == content_of("ab") == "ab"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content"),
        ({"role": "wizard", "content": "a"}, "messages[1].role"),
        ({"content": "a"}, "messages[1].role"),
        ({"role": "tool", "content": "a"}, "messages[1]"),
        ({"role": "user", "content": "a", "tool_call_id": "c1"}, "messages[1]"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[1]"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "user", "content": "a", "more": 1}, "messages[1].more"),
        ("text", "messages[1]"),
        (None, "messages[1]"),
    ],
)
def test_messages_that_make_no_sense_are_refused_where_they_do_not(message: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(messages=[USER, message])
    assert error.value.param == param


@pytest.mark.parametrize("messages", [[], {}, "hello", None, 5, [USER] * 4097])
def test_messages_are_a_list_of_some(messages: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(messages=messages)
    assert error.value.param == "messages"


def test_the_history_of_an_answer_of_ours_is_taken_back() -> None:
    answer: dict[str, object] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert chat(messages=[USER, answer, USER]).messages[1].for_template() == {"role": "assistant", "content": "hi"}


def test_tool_calls_reach_the_template_with_arguments_as_an_object() -> None:
    odd = {"id": "c2", "function": {"name": "g", "arguments": "[" * 100_000}}
    request = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [CALL, odd]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
        ]
    )
    first, second = (message.for_template() for message in request.messages)
    assert first["content"] == ""
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == [{"x": 1}, "[" * 100_000]
    assert second == {"role": "tool", "content": "2", "name": "f", "tool_call_id": "c1"}
