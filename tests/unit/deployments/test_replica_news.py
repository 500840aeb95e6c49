"""Reading streams by polls: order, acknowledgements, failures of either call, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments import replica_news
from deployments.replica_news import ReplicaNews
from replica.errors import BrimfulError, EngineDead, EngineFailure
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


class Call(AsyncIterator[StreamMessage]):
    """A submitting call that says what it is told to; None ends it."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[StreamMessage | BaseException | None] = asyncio.Queue()

    async def __anext__(self) -> StreamMessage:
        said = await self.said.get()
        if isinstance(said, BaseException):
            raise said
        if said is None:
            raise StopAsyncIteration
        return said


class Site:
    """`ReplicaNews` over polls that are answered with what they are told to. `asked`: (replica, acknowledged)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.answers: dict[str, asyncio.Queue[NewsBatch | Exception | None]] = {}
        self.loads: list[LoadReport] = []
        self.news = ReplicaNews(self._poll, self.loads.append, _known)

    def answer(self, answer: NewsBatch | Exception | None, replica_id: str = "r0") -> None:
        self.answers.setdefault(replica_id, asyncio.Queue()).put_nowait(answer)

    async def _poll(self, replica_id: str, lease: str, acknowledged: int) -> NewsBatch | None:
        assert lease == "me"
        self.asked.append((replica_id, acknowledged))
        answer = await self.answers.setdefault(replica_id, asyncio.Queue()).get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def open(self, request_id: str, taken_by: str | None = "r0", n: int = 1) -> tuple[Call, Stream]:
        call = Call()
        if taken_by is not None:
            call.said.put_nowait(StreamMessage(taken_by))
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


def _known(error: Exception) -> BrimfulError:
    return error if isinstance(error, BrimfulError) else EngineFailure(str(error))


def news(request_id: str, text: str, reason: FinishReason | None = None, index: int = 0) -> StreamNews:
    return StreamNews(request_id, (TokenEvent(index, (7,), text, 1, reason),))


def batch(number: int, *said: StreamNews, replica_id: str = "r0") -> NewsBatch:
    return NewsBatch(replica_id, number, said, REPORT)


STOP = FinishReason.STOP


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_poll_at_a_time_brings_the_news_of_all_streams_at_a_replica_and_stops_by_itself() -> None:
    site = Site()
    (call_a, a), (call_b, b) = site.open("a"), site.open("b")
    await turn()
    assert site.asked == [("r0", 0)]
    site.answer(batch(5, news("a", "x"), news("b", "y", STOP)))
    await turn()
    assert site.asked == [("r0", 0), ("r0", 5)]
    site.answer(batch(6, news("a", "z", STOP)))
    for call in (call_a, call_b):
        call.said.put_nowait(None)
    await turn()
    assert (a.texts, b.texts, a.error, b.error) == (["", "x", "z"], ["", "y"], None, None)
    assert (len(site.asked), site.news.num_open, site.loads) == (2, 0, [REPORT, REPORT])
    site.open("c")
    await turn()
    assert site.asked[2] == ("r0", 6), "a later reader acknowledges what came last"


async def test_news_that_overtake_the_answer_of_the_call_come_after_it() -> None:
    site = Site()
    site.open("other")
    call, late = site.open("late", taken_by=None)
    await turn()
    site.answer(batch(1, news("late", "x"), news("late", "y", STOP)))
    await turn()
    assert late.texts == []
    call.said.put_nowait(StreamMessage("r0"))
    await turn()
    assert late.texts == ["", "x", "y"]
    assert late.reading.done()


async def test_news_of_a_replica_that_did_not_take_the_request_are_no_part_of_its_stream() -> None:
    site = Site()
    site.open("other")
    call, moved = site.open("moved", taken_by=None)
    await turn()
    site.answer(batch(1, news("moved", "old")))
    await turn()
    call.said.put_nowait(StreamMessage("r1"))
    site.answer(batch(2, news("moved", "older", STOP)))
    site.answer(batch(1, news("moved", "new", STOP), replica_id="r1"), "r1")
    await turn()
    assert moved.texts == ["", "new"]


async def test_a_refusal_is_all_and_no_poll_is_sent() -> None:
    site = Site()
    call, refused = site.open("a", taken_by=None)
    call.said.put_nowait(StreamMessage("r0", (TokenEvent(0, (), "no", 0, FinishReason.REJECTED),)))
    await turn()
    assert (refused.texts, site.asked, site.news.num_open) == (["no"], [], 0)


async def test_a_stream_of_several_sequences_ends_with_the_last_of_them() -> None:
    site = Site()
    _, stream = site.open("a", n=2)
    site.answer(batch(1, news("a", "x", STOP)))
    await turn()
    assert not stream.reading.done()
    site.answer(batch(2, news("a", "y", STOP, index=1)))
    await turn()
    assert stream.reading.done()


async def test_a_call_that_fails_ends_its_stream_at_once_and_no_other() -> None:
    site = Site()
    (call, a), (_, b) = site.open("a"), site.open("b")
    await turn()
    call.said.put_nowait(EngineDead("gone"))
    await turn()
    assert isinstance(a.error, EngineDead)
    site.answer(batch(1, news("b", "y", STOP)))
    await turn()
    assert (b.texts, b.error) == (["", "y"], None)


async def test_a_poll_that_finds_the_replica_dead_ends_all_its_streams() -> None:
    site = Site()
    (_, a), (_, b), (_, other) = site.open("a"), site.open("b"), site.open("c", "r1")
    await turn()
    site.answer(EngineDead("gone"))
    await turn()
    assert isinstance(a.error, EngineDead)
    assert isinstance(b.error, EngineDead)
    assert (other.reading.done(), site.news.num_open) == (False, 1 + 1 + 3)


async def test_a_poll_that_is_not_answered_is_sent_again() -> None:
    site = Site()
    site.open("a")
    for answer in (batch(3, news("a", "x")), None, None):
        site.answer(answer)
    await turn()
    assert site.asked == [("r0", 0), ("r0", 3), ("r0", 3), ("r0", 3)]


async def test_a_replica_that_answers_no_poll_loses_its_streams() -> None:
    """Its renewals may be answered all the while: nobody else would end them."""
    site = Site()
    _, a = site.open("a")
    for _ in range(replica_news.MAX_FAILED_POLLS):
        site.answer(None)
    await turn()
    assert isinstance(a.error, EngineDead)  # it is as good as lost: others may continue its streams
    assert len(site.asked) == replica_news.MAX_FAILED_POLLS


async def test_a_call_that_is_cancelled_from_elsewhere_ends_its_stream_at_once() -> None:
    site = Site()
    call, a = site.open("a")
    await turn()
    call.said.put_nowait(asyncio.CancelledError())
    await turn()
    assert isinstance(a.error, EngineFailure)
    assert a.reading.done()


async def test_of_replicas_that_nobody_reads_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_news, "MAX_REMEMBERED", 1)
    site = Site()
    site.open("busy", "r0")
    await turn()
    site.answer(batch(9, news("busy", "x")))
    for number in (1, 2, 3):
        site.open(f"s{number}", f"r{number}")
        site.answer(batch(number, news(f"s{number}", "y", STOP), replica_id=f"r{number}"), f"r{number}")
        await turn()
    site.open("again", "r1")
    site.open("known", "r3")
    site.answer(None)
    await turn()
    assert sorted(site.asked[-3:]) == [("r0", 9), ("r1", 0), ("r3", 3)]


async def test_failing_polls_are_repeated_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_news, "RETRY_S", 0.0)
    site = Site()
    _, a = site.open("a")
    for _ in range(replica_news.MAX_FAILED_POLLS - 1):
        site.answer(EngineFailure("no"))
    site.answer(batch(1, news("a", "x")))
    await turn()
    assert a.texts == ["", "x"]
    for _ in range(replica_news.MAX_FAILED_POLLS):
        site.answer(EngineFailure("no"))
    await turn()
    assert isinstance(a.error, EngineDead)
    assert (a.error.message, len(site.asked)) == ("no", 2 * replica_news.MAX_FAILED_POLLS)


async def test_a_reader_that_breaks_leaves_nobody_waiting() -> None:
    site = Site()
    _, a = site.open("a")
    site.answer(RuntimeError("our own bug"))
    await turn()
    assert isinstance(a.error, EngineFailure)


async def test_a_call_that_is_over_and_a_later_poll_without_the_end_end_the_stream() -> None:
    """The replica has forgotten it: its lease lapsed while this process stood still."""
    site = Site()
    call, a = site.open("a")
    await turn()
    call.said.put_nowait(None)
    site.answer(NewsBatch("r0"))  # sent before the call was over: says nothing
    await turn()
    assert not a.reading.done()
    site.answer(NewsBatch("r0"))
    await turn()
    assert (a.reading.done(), a.texts, a.error) == (True, [""], None)


async def test_the_last_news_may_come_after_the_call_is_over() -> None:
    site = Site()
    call, a = site.open("a")
    await turn()
    call.said.put_nowait(None)
    await turn()
    site.answer(None)
    site.answer(batch(1, news("a", "x", STOP)))
    await turn()
    assert a.texts == ["", "x"]


async def test_a_consumer_that_leaves_leaves_nothing_behind() -> None:
    site = Site()
    call, a = site.open("a")
    await turn()
    a.reading.cancel()
    await turn()
    site.answer(batch(1, news("a", "x")))
    call.said.put_nowait(None)
    await turn()
    assert (site.news.num_open, len(site.asked)) == (0, 1)
