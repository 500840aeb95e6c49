"""Mailboxes of a replica: when a poll is answered, with what, and what becomes of news that nobody fetches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from replica.mailboxes import TOKEN_BYTES, Mailboxes
from replica.model_card import TextBundle
from replica.request import MAX_BATCHES, FinishReason, LoadReport, NewsBatch
from replica.stream import Stream
from replica.text.tokenizer import Tokenizer
from tests.fake_replica import request_of, write_model

LONG_S = 60.0
REPORT = LoadReport("r", "e", 1, 0.0, 0, 0, 0, 0, 8, 8, 0, 4, 4, 16)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    card = write_model(tmp_path)
    return Tokenizer(TextBundle.load(Path(card.folder)).tokenizer_json, card)


def mailboxes(wait_s: float = LONG_S) -> Mailboxes:
    return Mailboxes("r", lambda lease: REPORT, wait_s=wait_s)


def stream_of(tokenizer: Tokenizer, request_id: str = "a", lease: str = "me") -> Stream:
    return Stream(request_of(request_id, lease=lease), f"1:{request_id}", tokenizer, 0.0)


def begun(boxes: Mailboxes, tokenizer: Tokenizer, request_id: str = "a", lease: str = "me") -> Stream:
    """A stream whose first news were said."""
    stream = stream_of(tokenizer, request_id, lease)
    boxes.add(stream)
    boxes.begin(stream)
    return stream


def say(stream: Stream, token: int, reason: FinishReason | None = None) -> None:
    stream.answers[0].push(token, reason)
    stream.wake()


def told(batch: NewsBatch) -> dict[str, list[int]]:
    return {news.request_id: [token for event in news.events for token in event.token_ids] for news in batch.news}


async def poll_of(boxes: Mailboxes, lease: str, acknowledged: int) -> NewsBatch:
    """What a poll for one batch brings."""
    (batch,) = [batch async for batch in boxes.poll(lease, acknowledged)]
    return batch


async def polling(boxes: Mailboxes, acknowledged: int = 0) -> asyncio.Task[NewsBatch]:
    """A poll that waits."""
    task = asyncio.create_task(poll_of(boxes, "me", acknowledged))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_what_is_there_is_the_answer_at_once_for_all_streams_of_the_lease(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    a, b, other = begun(boxes, tokenizer, "a"), begun(boxes, tokenizer, "b"), begun(boxes, tokenizer, "c", "other")
    for stream, token in ((b, 1), (a, 2), (other, 3), (b, 4)):
        say(stream, token)
    batch = await poll_of(boxes, "me", 0)
    assert (told(batch), batch.number, batch.load) == ({"b": [1, 4], "a": [2]}, 1, REPORT)
    assert told(await poll_of(boxes, "other", 0)) == {"c": [3]}


async def test_a_waiting_poll_is_answered_by_the_next_news_and_what_came_with_them(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    a, b = begun(boxes, tokenizer, "a"), begun(boxes, tokenizer, "b")
    poll = await polling(boxes)
    say(a, 1)
    say(b, 2)  # of the same step
    assert told(await poll) == {"a": [1], "b": [2]}


async def test_what_a_stream_says_before_it_begins_is_no_answer_and_comes_afterwards(tokenizer: Tokenizer) -> None:
    boxes, stream = mailboxes(), stream_of(tokenizer)
    boxes.add(stream)
    say(stream, 1)
    poll = await polling(boxes)
    assert [event.token_ids for event in stream.take()] == [(1,)]
    say(stream, 2)
    boxes.begin(stream)
    assert told(await poll) == {"a": [2]}


async def test_a_stream_whose_end_was_said_before_it_begins_is_over(tokenizer: Tokenizer) -> None:
    boxes, stream = mailboxes(wait_s=0.01), stream_of(tokenizer)
    fetched = boxes.add(stream)
    say(stream, 1, FinishReason.LENGTH)
    stream.take()
    assert boxes.holds(stream.request)
    boxes.begin(stream)
    assert (fetched.is_set(), boxes.holds(stream.request)) == (True, False)
    assert await poll_of(boxes, "me", 0) == NewsBatch("r")


async def test_a_poll_without_news_is_answered_after_a_while_and_needs_no_acknowledgement(tokenizer: Tokenizer) -> None:
    boxes = mailboxes(wait_s=0.01)
    stream = begun(boxes, tokenizer)
    say(stream, 1)
    first = await poll_of(boxes, "me", 0)
    assert await poll_of(boxes, "me", first.number) == NewsBatch("r")
    say(stream, 2)
    assert told(await poll_of(boxes, "me", first.number)) == {"a": [2]}


async def test_a_batch_is_given_again_until_it_is_acknowledged(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    stream = begun(boxes, tokenizer)
    say(stream, 1)
    lost = await poll_of(boxes, "me", 0)
    say(stream, 2)
    assert await poll_of(boxes, "me", 0) is lost
    assert told(await poll_of(boxes, "me", lost.number)) == {"a": [2]}


async def test_a_newer_poll_sends_the_waiting_one_home_without_news(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    stream = begun(boxes, tokenizer)
    older, newer = await polling(boxes), await polling(boxes)
    assert await older == NewsBatch("r")
    say(stream, 1)
    assert told(await newer) == {"a": [1]}


async def test_a_poll_for_several_batches_brings_each_as_soon_as_it_is_made(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    stream = begun(boxes, tokenizer)
    poll = boxes.poll("me", 0, 3)
    for token in (1, 2, 3):
        waiting = asyncio.ensure_future(anext(poll))
        await asyncio.sleep(0)
        assert not waiting.done()
        say(stream, token)
        batch = await waiting
        assert (told(batch), batch.number) == ({"a": [token]}, token)
    say(stream, 4)
    assert await anext(poll, None) is None


async def test_a_poll_for_several_batches_is_over_when_there_is_no_news_for_a_while(tokenizer: Tokenizer) -> None:
    boxes = mailboxes(wait_s=0.01)
    say(begun(boxes, tokenizer), 1)
    assert [told(batch) async for batch in boxes.poll("me", 0, 9)] == [{"a": [1]}, {}]


async def test_all_batches_after_the_acknowledged_one_are_given_again_in_order(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    stream = begun(boxes, tokenizer)
    made = []
    poll = boxes.poll("me", 0, 4)
    for token in (1, 2, 3):
        say(stream, token)
        made.append(await anext(poll))
    await poll.aclose()
    again = boxes.poll("me", made[0].number, 3)
    assert [await anext(again), await anext(again)] == made[1:]
    say(stream, 4)
    assert told(await anext(again)) == {"a": [4]}
    assert await anext(again, None) is None
    say(stream, 5)
    assert [told(batch) async for batch in boxes.poll("me", made[1].number)] == [{"a": [3]}, {"a": [4]}]


async def test_a_poll_whose_reader_asked_anew_takes_no_more_news(tokenizer: Tokenizer) -> None:
    """It may be that nobody told the replica that its reader has gone."""
    boxes = mailboxes()
    stream = begun(boxes, tokenizer)
    older = boxes.poll("me", 0, 9)
    say(stream, 1)
    first = await anext(older)
    newer = await polling(boxes, first.number)
    say(stream, 2)
    assert [batch async for batch in older] == [NewsBatch("r")]
    assert told(await newer) == {"a": [2]}


async def test_no_poll_brings_more_new_batches_than_allowed(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    stream = begun(boxes, tokenizer)
    num = 0
    say(stream, 1)
    async for _ in boxes.poll("me", 0, 10 * MAX_BATCHES):
        say(stream, 1)
        num += 1
    assert num == MAX_BATCHES


async def test_what_does_not_fit_into_a_batch_comes_with_the_next_one_at_once(tokenizer: Tokenizer) -> None:
    boxes = Mailboxes("r", lambda lease: REPORT, wait_s=LONG_S, max_batch_bytes=2 * TOKEN_BYTES)
    streams = [begun(boxes, tokenizer, name) for name in "abc"]
    for token, stream in enumerate(streams):
        say(stream, token)
    first = await poll_of(boxes, "me", 0)
    assert told(first) == {"a": [0], "b": [1]}
    say(streams[0], 7)
    assert told(await poll_of(boxes, "me", first.number)) == {"c": [2], "a": [7]}


async def test_long_text_fills_a_batch_as_many_tokens_do(tokenizer: Tokenizer) -> None:
    boxes = Mailboxes("r", lambda lease: REPORT, wait_s=LONG_S, max_batch_bytes=TOKEN_BYTES + 1)
    streams = [begun(boxes, tokenizer, name) for name in "abc"]
    for token, stream in enumerate(streams):
        stream.answers[0]._text = "é"
        say(stream, token)
    assert list(told(await poll_of(boxes, "me", 0))) == ["a"]


async def test_a_second_stream_of_an_id_takes_the_place_of_the_first_whose_call_ends(tokenizer: Tokenizer) -> None:
    boxes, first, second = mailboxes(), stream_of(tokenizer), stream_of(tokenizer)
    fetched = boxes.add(first)
    boxes.add(second)
    assert fetched.is_set()
    for stream in (first, second):
        boxes.begin(stream)
    say(second, 4)
    say(first, 3)
    assert told(await poll_of(boxes, "me", 0)) == {"a": [4]}


async def test_the_end_of_a_stream_is_fetched_when_it_was_taken(tokenizer: Tokenizer) -> None:
    boxes, stream = mailboxes(), stream_of(tokenizer)
    fetched = boxes.add(stream)
    boxes.begin(stream)
    say(stream, 1)
    batch = await poll_of(boxes, "me", 0)
    assert (boxes.holds(stream.request), fetched.is_set()) == (True, False)
    say(stream, 2, FinishReason.LENGTH)
    await poll_of(boxes, "me", batch.number)
    assert (boxes.holds(stream.request), fetched.is_set()) == (False, True)


async def test_a_stream_that_was_removed_says_nothing_more(tokenizer: Tokenizer) -> None:
    boxes = mailboxes(wait_s=0.01)
    stream = begun(boxes, tokenizer)
    say(stream, 1)
    boxes.remove(stream)
    boxes.remove(stream)
    say(stream, 2)
    boxes.begin(stream)
    assert await poll_of(boxes, "me", 0) == NewsBatch("r")


async def test_removing_a_stream_leaves_a_later_one_of_the_same_id(tokenizer: Tokenizer) -> None:
    boxes, old, new = mailboxes(), stream_of(tokenizer), stream_of(tokenizer)
    boxes.add(old)
    boxes.remove(old)
    boxes.add(new)
    boxes.begin(new)
    boxes.remove(old)
    say(new, 1)
    assert told(await poll_of(boxes, "me", 0)) == {"a": [1]}


async def test_what_nobody_polls_for_is_dropped_when_finished_and_its_mailbox_forgotten(tokenizer: Tokenizer) -> None:
    boxes, ended, going = mailboxes(wait_s=0.01), stream_of(tokenizer, "ended"), stream_of(tokenizer, "going")
    fetched = boxes.add(ended)
    boxes.add(going)
    for stream in (ended, going):
        boxes.begin(stream)
    say(ended, 1, FinishReason.ABORT)
    say(going, 2)
    boxes.age(4.0, 5.0)
    assert not fetched.is_set()
    boxes.age(1.0, 5.0)
    assert (fetched.is_set(), len(boxes)) == (True, 1)
    assert told(await poll_of(boxes, "me", 0)) == {"going": [2]}
    boxes.remove(going)
    boxes.age(4.0, 5.0)
    assert len(boxes) == 1, "it was polled"
    boxes.age(1.0, 5.0)
    assert len(boxes) == 0


async def test_a_mailbox_whose_poll_waits_is_not_forgotten(tokenizer: Tokenizer) -> None:
    boxes = mailboxes()
    poll = await polling(boxes)
    boxes.age(10.0, 5.0)
    stream = begun(boxes, tokenizer)
    say(stream, 1)
    assert told(await poll) == {"a": [1]}


async def test_a_reader_has_the_whole_time_to_poll_from_when_its_stream_begins(tokenizer: Tokenizer) -> None:
    """Before that it had nothing to poll for, however long the prefill took."""
    boxes, stream = mailboxes(), stream_of(tokenizer)
    boxes.add(stream)
    boxes.age(4.0, 5.0)
    say(stream, 1, FinishReason.LENGTH)
    boxes.age(4.0, 5.0)
    assert boxes.holds(stream.request), "it has yet to begin"
    boxes.begin(stream)
    boxes.age(4.0, 5.0)
    assert told(await poll_of(boxes, "me", 0)) == {"a": [1]}
