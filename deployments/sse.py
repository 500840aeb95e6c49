"""A replica's events as the bytes of an answer: server-sent events for a stream, one JSON document otherwise.

The stream law, for every choice: chat's role chunk first, then text, then one chunk with a finish reason, then nothing.
After the last choice: the usage chunk if it was asked for, then `data: [DONE]`, once. A failure after the start is one
`data: {"error": ...}` and the end, without [DONE]. So every stream ends in exactly one of the two, which `ended` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from deployments import openai_responses as openai
from deployments.error_map import error_event
from deployments.openai_responses import Answer, Choice
from replica.errors import BrimfulError, EngineFailure, error_from_info
from replica.request import FinishReason, StreamMessage, TokenEvent

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def data_event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class _Choices:
    """All choices of an answer and what came of them."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.choices = [Choice() for _ in range(answer.num_choices)]
        self._num_open = answer.num_choices

    @property
    def complete(self) -> bool:
        return self._num_open == 0

    def take(self, prompt_number: int, message: StreamMessage) -> Iterator[tuple[int, Choice, TokenEvent]]:
        """(number of the choice, the choice, event) for each event. Raises the error of an event that carries one.

        Events of a choice that has ended are dropped: nothing may follow its finish reason.
        """
        for event in message.events:
            number = prompt_number * self.answer.n + event.index
            choice = self.choices[number]
            if choice.finish_reason is not None:
                continue
            failure = event_error(event)
            if failure is not None:
                raise failure
            choice.num_output_tokens = event.num_output_tokens
            choice.num_cached_tokens = max(choice.num_cached_tokens, message.num_cached_tokens)
            choice.finish_reason = event.finish_reason
            choice.stop_reason = event.stop_reason
            self._num_open -= event.finish_reason is not None
            yield number, choice, event


def event_error(event: TokenEvent) -> BrimfulError | None:
    """The error that ends an answer, None for an event of a good one."""
    if event.error is not None:
        return error_from_info(event.error)
    if event.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return None
    return EngineFailure("the answer was aborted before its end")


def broken_off() -> EngineFailure:
    """For an answer of which nothing more comes though it isn't complete."""
    return EngineFailure("the answer broke off before its end")


class AnswerStream(ABC):
    """Turns messages of replicas into the bytes of one event stream. `ended`: nothing more will come."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.ended = False
        self._choices = _Choices(answer)

    def feed(self, prompt_number: int, message: StreamMessage) -> bytes:
        """Bytes to send for `message`, maybe none. The end, good or bad, comes by itself; after it nothing does."""
        if self.ended:
            return b""
        chunks: list[dict[str, Any]] = []
        try:
            for number, _, event in self._choices.take(prompt_number, message):
                chunks += self._chunks(number, event)
        except BrimfulError as error:
            return _events(chunks) + self.fail(error)
        return _events(chunks) + (self._finish() if self._choices.complete else b"")

    def fail(self, error: Exception) -> bytes:
        """The error event that ends the stream; nothing when it has ended already."""
        if self.ended:
            return b""
        self.ended = True
        return data_event(error_event(error))

    def _finish(self) -> bytes:
        self.ended = True
        last = [openai.usage_chunk(self.answer, self._kind, self._choices.choices)] if self.answer.include_usage else []
        return _events(last) + DONE

    @property
    @abstractmethod
    def _kind(self) -> str:
        """The chunks' `object`."""

    @abstractmethod
    def _chunks(self, number: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The chunks of one event of choice `number`."""


class ChatStream(AnswerStream):
    """`/v1/chat/completions` with `stream: true`."""

    _kind = "chat.completion.chunk"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._begun: set[int] = set()

    def _chunks(self, number: int, event: TokenEvent) -> list[dict[str, Any]]:
        chunks = []
        if number not in self._begun:
            self._begun.add(number)
            chunks.append(openai.chat_chunk(self.answer, number, {"role": "assistant", "content": ""}, None, None))
        if event.text:
            chunks.append(openai.chat_chunk(self.answer, number, {"content": event.text}, None, None))
        if event.finish_reason is not None:
            chunks.append(openai.chat_chunk(self.answer, number, {}, event.finish_reason, event.stop_reason))
        return chunks


class CompletionStream(AnswerStream):
    """`/v1/completions` with `stream: true`."""

    _kind = "text_completion"

    def _chunks(self, number: int, event: TokenEvent) -> list[dict[str, Any]]:
        if not event.text and event.finish_reason is None:
            return []
        return [openai.text_chunk(self.answer, number, event.text, event.finish_reason, event.stop_reason)]


class AnswerCollector(ABC):
    """Gathers messages of replicas into one JSON answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._choices = _Choices(answer)
        self._texts: list[list[str]] = [[] for _ in range(answer.num_choices)]

    def feed(self, prompt_number: int, message: StreamMessage) -> None:
        """Raises the `BrimfulError` of an event that failed: then the whole answer has."""
        for number, _, event in self._choices.take(prompt_number, message):
            self._texts[number].append(event.text)

    def body(self) -> bytes:
        """The answer. Raises `EngineFailure` when the replicas' messages ended before it was complete."""
        if not self._choices.complete:
            raise broken_off()
        for choice, pieces in zip(self._choices.choices, self._texts, strict=True):
            choice.text = "".join(pieces)
        return openai.to_json(self._document(self._choices.choices))

    @abstractmethod
    def _document(self, choices: list[Choice]) -> dict[str, Any]: ...


class ChatCollector(AnswerCollector):
    """`/v1/chat/completions` without streaming."""

    def _document(self, choices: list[Choice]) -> dict[str, Any]:
        return openai.chat_completion(self.answer, choices)


class CompletionCollector(AnswerCollector):
    """`/v1/completions` without streaming."""

    def _document(self, choices: list[Choice]) -> dict[str, Any]:
        return openai.text_completion(self.answer, choices)


def _events(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(data_event(openai.to_json(chunk)) for chunk in chunks)
