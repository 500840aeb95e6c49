"""Reading streams by polls: order, acknowledgements, failures of either call, and what is left behind: nothing."""

from __future__ import annotations

import asyncio

import pytest

from deployments import replica_news
from replica.errors import EngineDead, EngineFailure
from replica.request import MAX_BATCHES, FinishReason, NewsBatch, StreamMessage, TokenEvent
from tests.unit.deployments.news_site import REPORT, STOP, Site, batch, news, turn


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
    assert (a.texts, b.texts, a.error, b.error) == (["", "1", "x", "z"], ["", "1", "y"], None, None)
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
    call.take("r0")
    await turn()
    assert late.texts == ["", "1", "x", "y"]
    assert late.reading.done()


async def test_news_of_a_replica_that_did_not_take_the_request_are_no_part_of_its_stream() -> None:
    site = Site()
    site.open("other")
    call, moved = site.open("moved", taken_by=None)
    await turn()
    site.answer(batch(1, news("moved", "old")))
    await turn()
    call.take("r1")
    site.answer(batch(2, news("moved", "older", STOP)))
    site.answer(batch(1, news("moved", "new", STOP), replica_id="r1"), "r1")
    await turn()
    assert moved.texts == ["", "1", "new"]


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
    assert (b.texts, b.error) == (["", "1", "y"], None)


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


async def test_the_next_poll_is_sent_once_the_messages_of_all_batches_were_passed_on() -> None:
    site = Site(message_s=0.01)
    for name, replica_id in (("a", "r0"), ("b", "r0"), ("c", "r1")):
        site.open(name, replica_id)
    await turn()
    now = asyncio.get_running_loop().time
    began_s = now()
    site.answer(batch(1, news("a", "x"), news("b", "y")))
    site.answer(batch(1, news("c", "z"), replica_id="r1"), "r1")
    await turn()
    assert len(site.asked) == 2
    at_s: dict[str, float] = {}
    while len(at_s) < 2:
        await asyncio.sleep(0.001)
        for replica_id, acknowledged in site.asked[2:]:
            assert acknowledged == 1
            at_s.setdefault(replica_id, now() - began_s)
    assert at_s["r0"] >= 0.02
    assert at_s["r1"] >= 0.03


async def test_a_reader_that_waits_for_its_batches_asks_for_ever_more_of_them_at_once() -> None:
    site = Site()
    _, a = site.open("a")
    for number in range(1, 1 + 1 + 2 + 4 + 8 + MAX_BATCHES + 1):
        await turn()
        site.answer(batch(number, news("a", "x")))
    await turn()
    assert site.num_wanted == [1, 2, 4, 8, MAX_BATCHES, MAX_BATCHES]
    assert [acknowledged for _, acknowledged in site.asked] == [0, 1, 3, 7, 15, 31]
    assert len(a.texts) == 2 + 32


async def test_a_reader_that_rests_longer_than_it_waits_asks_for_one_batch_at_a_time() -> None:
    site = Site(message_s=0.02)
    site.open("a")
    for number in (1, 2, 3):
        site.answer(batch(number, news("a", "x")))
    while len(site.asked) < 4:
        await asyncio.sleep(0.001)
    assert site.num_wanted == [1, 1, 1, 1]


async def test_a_reader_leaves_a_poll_when_nobody_is_open_there_any_more() -> None:
    site = Site()
    _, a = site.open("a")
    site.answer(batch(1, news("a", "x")))
    await turn()
    site.answer(batch(2, news("a", "y", STOP)))
    await turn()
    assert (a.reading.done(), site.num_wanted, site.num_polls_open, site.news.num_open) == (True, [1, 2], 0, 1)


async def test_a_poll_that_breaks_off_is_followed_by_one_that_acknowledges_what_came() -> None:
    site = Site()
    _, a = site.open("a")
    site.answer(batch(1, news("a", "x")))
    await turn()
    site.answer(batch(2, news("a", "y")))
    site.answer(None)
    await turn()
    assert (site.asked[-1], site.num_wanted) == (("r0", 2), [1, 2, 1])
    assert a.texts == ["", "1", "x", "y"]


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
    assert a.texts == ["", "1", "x"]
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
    assert (a.reading.done(), a.texts, a.error) == (True, ["", "1"], None)


async def test_the_last_news_may_come_after_the_call_is_over() -> None:
    site = Site()
    call, a = site.open("a")
    await turn()
    call.said.put_nowait(None)
    await turn()
    site.answer(None)
    site.answer(batch(1, news("a", "x", STOP)))
    await turn()
    assert a.texts == ["", "1", "x"]


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
