"""`ReplicaNews` over calls and polls that say what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from deployments.replica_news import ReplicaNews
from replica.errors import BrimfulError, EngineFailure
from replica.request import (
    FinishReason,
    GenerationRequest,
    LoadReport,
    NewsBatch,
    SamplingParams,
    StreamMessage,
    StreamNews,
    TokenEvent,
)

REPORT = LoadReport("r0", "e", 1, 0.0, 0, 0, 0, 0, 8, 8, 0, 4, 4, 16)
STOP = FinishReason.STOP


class Call(AsyncIterator[StreamMessage]):
    """A submitting call that says what it is told to; None ends it."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[StreamMessage | BaseException | None] = asyncio.Queue()

    def take(self, replica_id: str, reason: FinishReason | None = None) -> None:
        """Says that the replica took the request, and its first news."""
        self.said.put_nowait(StreamMessage(replica_id))
        self.begin(replica_id, reason)

    def begin(self, replica_id: str, reason: FinishReason | None = None) -> None:
        self.said.put_nowait(StreamMessage(replica_id, (TokenEvent(0, (7,), "1", 1, reason),)))

    async def __anext__(self) -> StreamMessage:
        said = await self.said.get()
        if isinstance(said, BaseException):
            raise said
        if said is None:
            raise StopAsyncIteration
        return said


class Site:
    """`ReplicaNews` over polls that are answered with what they are told to. `asked`: (replica, acknowledged), and
    `num_wanted` how many batches; a poll is over after one without news. `num_polls_open`: whose reader hasn't left."""

    def __init__(self, message_s: float = 0.0) -> None:
        self.asked: list[tuple[str, int]] = []
        self.num_wanted: list[int] = []
        self.num_polls_open = 0
        self.answers: dict[str, asyncio.Queue[NewsBatch | Exception | None]] = {}
        self.loads: list[LoadReport] = []
        self.news = ReplicaNews(self._poll, self.loads.append, known_error, message_s)

    def answer(self, answer: NewsBatch | Exception | None, replica_id: str = "r0") -> None:
        self.answers.setdefault(replica_id, asyncio.Queue()).put_nowait(answer)

    async def _poll(
        self, replica_id: str, lease: str, acknowledged: int, num_batches: int
    ) -> AsyncGenerator[NewsBatch | None, None]:
        assert lease == "me"
        self.asked.append((replica_id, acknowledged))
        self.num_wanted.append(num_batches)
        self.num_polls_open += 1
        try:
            for _ in range(num_batches):
                answer = await self.answers.setdefault(replica_id, asyncio.Queue()).get()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                if answer is None or not answer.number:
                    return
        finally:
            self.num_polls_open -= 1

    def open(self, request_id: str, taken_by: str | None = "r0", n: int = 1) -> tuple[Call, Stream]:
        call = Call()
        if taken_by is not None:
            call.take(taken_by)
        request = GenerationRequest(request_id, (1,), SamplingParams(9), n=n, lease="me")
        return call, Stream(self.news.read(request, call))


class Stream:
    """What a consumer got: texts of messages ("" says that it was taken), and what the stream ended with."""

    def __init__(self, messages: AsyncIterator[StreamMessage]) -> None:
        self.texts: list[str] = []
        self.error: BrimfulError | None = None
        self.reading = asyncio.create_task(self._read(messages))

    async def _read(self, messages: AsyncIterator[StreamMessage]) -> None:
        try:
            async for message in messages:
                self.texts.append("".join(event.text for event in message.events))
        except BrimfulError as error:
            self.error = error


def known_error(error: Exception) -> BrimfulError:
    return error if isinstance(error, BrimfulError) else EngineFailure(str(error))


def news(request_id: str, text: str, reason: FinishReason | None = None, index: int = 0) -> StreamNews:
    return StreamNews(request_id, (TokenEvent(index, (7,), text, 1, reason),))


def batch(number: int, *said: StreamNews, replica_id: str = "r0") -> NewsBatch:
    return NewsBatch(replica_id, number, said, REPORT)


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
