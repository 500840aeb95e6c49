"""The stream law for any order of events: stream and document tell the same, every stream ends once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.openai_responses import Answer
from deployments.sse import ChatCollector, ChatStream, CompletionCollector, CompletionStream
from replica.errors import BrimfulError, ErrorInfo
from replica.request import FinishReason, StreamMessage, TokenEvent

KINDS = {"chat": (ChatStream, ChatCollector), "completions": (CompletionStream, CompletionCollector)}
ENDS = [None, None, None, None, FinishReason.STOP, FinishReason.LENGTH]
EVENTS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.text(max_size=3), st.sampled_from([*ENDS, "error"]))


def event(index: int, text: str, count: int, end: Any) -> TokenEvent:
    if end == "error":
        return TokenEvent(index, (), "", count, FinishReason.ERROR, None, ErrorInfo("step_failed", "no"))
    return TokenEvent(index, (1,), text, count, end)


@pytest.mark.parametrize("kind", KINDS)
@given(news=st.lists(EVENTS, max_size=30), include_usage=st.booleans())
def test_every_stream_obeys_the_law(kind: str, news: list[tuple[int, int, str, Any]], include_usage: bool) -> None:
    answer = Answer("id", 1, "m", 2, (3, 4, 5), include_usage)
    stream, collector = KINDS[kind][0](answer), KINDS[kind][1](answer)
    sent, failed = b"", False
    for count, (prompt, index, text, end) in enumerate(
        [*news, *((p, k, "", FinishReason.STOP) for p in range(3) for k in (0, 1))]
    ):
        message = StreamMessage("r", (event(index, text, count, end),))
        sent += stream.feed(prompt, message)
        try:
            if not failed:
                collector.feed(prompt, message)
        except BrimfulError:
            failed = True
    assert stream.ended
    *chunks, last = [block.removeprefix("data: ") for block in sent.decode().split("\n\n")[:-1]]
    documents = [json.loads(chunk) for chunk in chunks]
    if failed:
        assert json.loads(last)["error"]["code"] == "step_failed"
        return
    assert last == "[DONE]"
    whole = json.loads(collector.body())
    if include_usage:
        usage = documents.pop()
        assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    choices = [document["choices"][0] for document in documents]
    for expected in whole["choices"]:
        own = [choice for choice in choices if choice["index"] == expected["index"]]
        assert [choice["finish_reason"] for choice in own][-1] == expected["finish_reason"]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        if kind == "chat":
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("content", "") for c in own) == expected["message"]["content"]
        else:
            assert "".join(c["text"] for c in own) == expected["text"]
