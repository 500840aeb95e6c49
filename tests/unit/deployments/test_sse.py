"""Bytes of answers: the stream law, errors, usage; read by hand and by the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from deployments.openai_responses import Answer, model_card, model_list, to_json
from deployments.sse import MEDIA_TYPE, AnswerStream, ChatCollector, ChatStream, CompletionCollector, CompletionStream
from replica.errors import EngineFailure, ErrorInfo, QueueFull, StepFailed
from replica.request import FinishReason, StreamMessage, TokenEvent

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
STREAMS = {"chat.completion.chunk": ChatStream, "text_completion": CompletionStream}


def answer(n: int = 1, prompts: tuple[int, ...] = (7,), include_usage: bool = False) -> Answer:
    return Answer("chatcmpl-1", 123, "m", n, prompts, include_usage)


def message(*events: TokenEvent, cached: int = 0) -> StreamMessage:
    return StreamMessage("replica", events, None, cached)


def token(
    text: str, count: int, end: FinishReason | None = None, index: int = 0, stop: str | int | None = None
) -> TokenEvent:
    return TokenEvent(index, (1,), text, count, end, stop)


TAKEN = message()
HELLO = [TAKEN, message(token("Hel", 1), cached=4), message(token("", 2), token("lo", 3)), message(token("!", 4, STOP))]


def events(stream: AnswerStream, messages: list[StreamMessage], prompt: int = 0) -> list[Any]:
    """Everything sent, parsed strictly; "[DONE]" stands for itself."""
    sent = b"".join(stream.feed(prompt, m) for m in messages).decode()
    assert sent.endswith("\n\n") or not sent
    blocks = sent.split("\n\n")[:-1]
    assert all(block.startswith("data: ") and len(block.splitlines()) == 1 for block in blocks)
    return [block[6:] if block[6:] == "[DONE]" else json.loads(block[6:]) for block in blocks]


def test_a_chat_stream_is_role_text_one_finish_and_done() -> None:
    *chunks, done = events(ChatStream(answer()), HELLO)
    assert done == "[DONE]"
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo"}, None),
        ({"content": "!"}, None),
        ({}, "stop"),
    ]
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        ("chatcmpl-1", "chat.completion.chunk", 123, "m")
    }
    assert not any("usage" in c for c in chunks)


def test_a_completion_stream_ends_in_one_chunk_with_a_finish_reason() -> None:
    *chunks, done = events(CompletionStream(answer()), HELLO)
    assert done == "[DONE]"
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("Hel", None),
        ("lo", None),
        ("!", "stop"),
    ]


@pytest.mark.parametrize("kind", STREAMS)
def test_usage_comes_once_when_asked_for_after_the_finish_and_before_done(kind: str) -> None:
    *chunks, usage, done = events(STREAMS[kind](answer(include_usage=True)), HELLO)
    assert done == "[DONE]"
    assert (usage["choices"], usage["object"]) == ([], kind)
    assert usage["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert [c["usage"] for c in chunks] == [None] * len(chunks)


@pytest.mark.parametrize("kind", STREAMS)
def test_several_choices_and_prompts_end_together_once(kind: str) -> None:
    stream = STREAMS[kind](answer(n=2, prompts=(3, 5), include_usage=True))
    sent = events(stream, [message(token("a", 1, STOP), token("b", 1, index=1), cached=2)], prompt=1)
    sent += events(stream, [message(token("c", 1, LENGTH, index=1), cached=1)], prompt=0)
    sent += events(stream, [message(token("d", 2, LENGTH, index=1), cached=2)], prompt=1)
    ended = [stream.ended]
    sent += events(stream, [message(token("e", 6, STOP), cached=1)], prompt=0)
    assert [*ended, stream.ended] == [False, True]
    assert sent.count("[DONE]") == 1
    *chunks, usage, done = sent
    assert done == "[DONE]"
    finishes = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert finishes == [2, 1, 3, 0]
    texts = {i: "".join(text_of(c) for c in chunks if c["choices"][0]["index"] == i) for i in range(4)}
    assert texts == {0: "e", 1: "c", 2: "a", 3: "bd"}
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (8, 10)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def text_of(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


@pytest.mark.parametrize("kind", STREAMS)
def test_nothing_follows_a_choices_finish(kind: str) -> None:
    stream = STREAMS[kind](answer(n=2))
    before = events(stream, [message(token("a", 1, STOP))])
    assert len(before) > 0
    assert events(stream, [message(token("late", 2), token("late", 3, STOP))]) == []
    assert events(stream, [message(token("b", 1, STOP, index=1))])[-1] == "[DONE]"
    assert events(stream, [message(token("later", 9))]) == []
    assert stream.fail(RuntimeError("late")) == b""


FAILED = ErrorInfo("step_failed", "the model failed on this request")


@pytest.mark.parametrize("kind", STREAMS)
def test_an_error_event_ends_the_stream_after_what_came_before_it(kind: str) -> None:
    stream = STREAMS[kind](answer(n=2, include_usage=True))
    failure = TokenEvent(1, (), "", 0, FinishReason.ERROR, None, FAILED)
    *before, last = events(stream, [message(token("a", 1), failure, token("b", 2))])
    assert "".join(map(text_of, before)) == "a"
    assert last == {"error": {"message": FAILED.message, "type": "server_error", "param": None, "code": "step_failed"}}
    assert stream.ended
    assert events(stream, [message(token("c", 3, STOP))]) == []
    assert stream.fail(ValueError()) == b""


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("end", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.REJECTED])
def test_a_bad_end_without_a_reason_is_an_error_too(kind: str, end: FinishReason) -> None:
    (last,) = events(STREAMS[kind](answer()), [message(token("", 0, end))])
    assert last["error"]["code"] == "engine_failure"


def test_failing_a_stream_from_outside_tells_only_what_is_meant_for_clients() -> None:
    stream = ChatStream(answer())
    assert json.loads(stream.fail(KeyError("secret"))[6:])["error"]["message"] == (
        "the server failed to handle this request"
    )
    assert stream.fail(QueueFull("full")) == b""


def test_characters_that_some_clients_take_for_line_ends_are_escaped() -> None:
    text = "a\u2028b\u2029c\x85d\r\ne🌶"
    chunks = events(CompletionStream(answer()), [message(token(text, 1, STOP))])
    assert chunks[0]["choices"][0]["text"] == text
    assert b"\\u2028" in to_json({"text": text})


# --- one JSON document


def collected(collector: ChatCollector | CompletionCollector, *messages: StreamMessage) -> Any:
    for one in messages:
        collector.feed(0, one)
    return json.loads(collector.body())


def test_a_collected_chat_equals_the_concatenated_stream() -> None:
    whole = collected(ChatCollector(answer()), *HELLO)
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    streamed = events(ChatStream(answer(include_usage=True)), HELLO)
    assert whole["usage"] == streamed[-2]["usage"]
    assert "".join(text_of(c) for c in streamed[:-2]) == "Hello!"


def test_what_ended_a_choice_is_told() -> None:
    whole = collected(
        CompletionCollector(answer(n=2)), message(token("a", 1, STOP, 0, "END"), token("b", 1, STOP, 1, 42))
    )
    assert [(c["finish_reason"], c["stop_reason"]) for c in whole["choices"]] == [("stop", "END"), ("stop", 42)]


def test_a_failed_event_fails_the_collected_answer() -> None:
    collector = ChatCollector(answer())
    with pytest.raises(StepFailed, match="failed on this request"):
        collector.feed(0, message(token("a", 1), TokenEvent(0, (), "", 1, FinishReason.ERROR, None, FAILED)))


def test_an_answer_that_broke_off_is_no_answer() -> None:
    collector = ChatCollector(answer())
    collector.feed(0, message(token("a", 1)))
    with pytest.raises(EngineFailure, match="broke off"):
        collector.body()


# --- the official client


def client(body: bytes, media_type: str = "application/json") -> openai.OpenAI:
    """An official client whose server answers everything with `body`."""

    def answer_all(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": media_type}, content=body)

    http = httpx.Client(transport=httpx.MockTransport(answer_all))
    return openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def stream_bytes(stream: AnswerStream, messages: list[StreamMessage]) -> bytes:
    return b"".join(stream.feed(0, m) for m in messages)


def test_the_official_client_reads_a_chat_stream() -> None:
    body = stream_bytes(ChatStream(answer(include_usage=True)), HELLO)
    chunks = list(client(body, MEDIA_TYPE).chat.completions.create(model="m", messages=[], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    last = chunks[-1].usage
    assert last is not None
    assert last.prompt_tokens_details is not None
    assert (last.total_tokens, last.prompt_tokens_details.cached_tokens) == (11, 4)


def test_the_official_client_reads_a_completion_stream() -> None:
    body = stream_bytes(CompletionStream(answer()), HELLO)
    chunks = list(client(body, MEDIA_TYPE).completions.create(model="m", prompt="x", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello!"


def test_the_official_client_raises_an_error_event() -> None:
    stream = ChatStream(answer())
    body = stream_bytes(stream, HELLO[:2]) + stream.fail(StepFailed("it failed"))
    with pytest.raises(openai.APIError, match="it failed"):
        list(client(body, MEDIA_TYPE).chat.completions.create(model="m", messages=[], stream=True))


def test_the_official_types_accept_whole_answers_strictly() -> None:
    chat, text = ChatCollector(answer()), CompletionCollector(answer())
    assert collected(chat, *HELLO)
    assert collected(text, *HELLO)
    assert ChatCompletion.model_validate_json(chat.body()).choices[0].message.content == "Hello!"
    assert Completion.model_validate_json(text.body()).choices[0].text == "Hello!"


def test_the_official_client_lists_models() -> None:
    body = to_json(model_list([model_card("m", 123, 2048)]))
    assert [model.id for model in client(body).models.list()] == ["m"]
