"""Answers whose replica is lost: which request goes where next, and what the reader gets meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployments.continued_stream import ContinuedStream, Continuing
from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from replica.errors import BrimfulError, EngineDead, ErrorInfo, Unavailable
from replica.request import FinishReason, GenerationRequest, SamplingParams, StreamMessage, TokenEvent
from tests.unit.deployments.lease_parts import TAKEN, FakeClock, refusal, settled

STOP, ERROR = FinishReason.STOP, FinishReason.ERROR
DEAD = ErrorInfo("engine_dead", "dead")
REQUEST = GenerationRequest("a", (1, 2, 3), SamplingParams(max_tokens=9, seed=5, stop=("!",)), lease="lease")


class Site:
    """One ingress process with replicas r0, r1, ... and one request, "a", that is read."""

    def __init__(self, num_replicas: int = 3, *, n: int = 1, limit: int = 2, wait_s: float = 10.0) -> None:
        self.clock = FakeClock()
        self.client = FakeModelClient(*(f"r{number}" for number in range(num_replicas)))
        self.leases = Leases("lease", self.clock, retry_s=0.001)
        self.num_counted = 0
        continuing = Continuing(limit, wait_s, self._count)
        self.stream = ContinuedStream(self.leases, self.client, replace(REQUEST, n=n), asyncio.Event(), continuing)

    def _count(self) -> None:
        self.num_counted += 1

    async def say(self, request_id: str, *answers: StreamMessage | BrimfulError | None) -> None:
        await settled()
        self.client.say(request_id, *answers)
        await settled()

    def read(self) -> list[tuple[int, str, FinishReason | None]]:
        """(index, text, end) of all events since the last call."""
        events = [event for message in self.stream.take_all() for event in message.events]
        return [(event.index, event.text, event.finish_reason) for event in events]

    async def until_sent(self, request_id: str) -> GenerationRequest:
        async with asyncio.timeout(5):
            while request_id not in [request.request_id for request in self.client.requests]:
                await asyncio.sleep(0.001)
        return self.client.requests[-1]

    async def close(self) -> None:
        """Afterwards nothing is left of any request."""
        self.stream.close()
        self.stream.close()
        for request_id in {request_id for request_id, _ in self.client.calls}:
            self.client.say(request_id, None)
        async with asyncio.timeout(5):
            while self.leases.num_background:
                await asyncio.sleep(0.001)
        assert len(self.leases) == 0
        assert {request_id for request_id, _ in self.client.calls} <= set(self.client.forgotten)


def tokens(replica_id: str, *token_ids: int, index: int = 0, end: FinishReason | None = None) -> StreamMessage:
    text = "".join(f"<{token_id}>" for token_id in token_ids)
    return StreamMessage(replica_id, (TokenEvent(index, token_ids, text, len(token_ids), end),))


def died(replica_id: str, *token_ids: int, index: int = 0) -> StreamMessage:
    """The last words of a replica whose engine is dead, with what came before it."""
    event = tokens(replica_id, *token_ids, index=index).events[0]
    return StreamMessage(replica_id, (replace(event, finish_reason=ERROR, error=DEAD),))


async def test_the_rest_is_asked_of_another_replica_with_the_same_seed_and_the_tokens_so_far() -> None:
    site = Site()
    await site.say("a", TAKEN, tokens("r0", 7), tokens("r0", 8, 9), EngineDead("gone"))
    assert site.read() == [(0, "<7>", None), (0, "<8><9>", None)]
    await settled()
    assert site.client.calls[1:] == [("a~0.1", ("r0",))]
    assert site.client.requests[1] == replace(REQUEST, request_id="a~0.1", prior_output_ids=(7, 8, 9))
    await site.say("a~0.1", StreamMessage("r1"), tokens("r1", 4, end=STOP), None)
    assert (site.stream.finished, site.read(), site.stream.finished) == (False, [(0, "<4>", STOP)], True)
    assert (site.num_counted, site.client.aborted) == (1, [])
    await site.close()


async def test_what_came_with_the_news_of_the_death_counts_too() -> None:
    site = Site()
    await site.say("a", TAKEN, tokens("r0", 7), died("r0", 8), None)
    assert site.read() == [(0, "<7>", None), (0, "<8>", None)]
    await settled()
    assert site.client.requests[1].prior_output_ids == (7, 8)
    assert site.client.distrusted == ["r0"]
    await site.say("a~0.1", StreamMessage("r1"), died("r1"), None)
    assert site.read() == []
    await settled()
    assert site.client.calls[2] == ("a~0.2", ("r0", "r1"))
    assert site.client.requests[2].prior_output_ids == (7, 8)
    await site.close()


async def test_a_request_that_was_taken_and_has_no_token_yet_is_sent_on_as_it_was() -> None:
    site = Site()
    await site.say("a", TAKEN, EngineDead("gone"))
    assert site.read() == []
    await settled()
    assert site.client.requests[1] == replace(REQUEST, request_id="a~0.1")
    await site.close()


async def test_of_several_answers_each_unfinished_one_continues_by_itself() -> None:
    site = Site(n=3)
    await site.say("a", TAKEN, tokens("r0", 7), tokens("r0", 8, index=1, end=STOP), tokens("r0", 9, index=2))
    await site.say("a", died("r0", index=2))
    assert site.read() == [(0, "<7>", None), (1, "<8>", STOP), (2, "<9>", None)]
    await site.say("a", tokens("r0", 6), EngineDead("gone"))  # the first still gets what was on its way
    assert site.read() == [(0, "<6>", None)]
    await settled()
    parts = [(r.request_id, r.n, r.first_index, r.prior_output_ids) for r in site.client.requests[1:]]
    assert parts == [("a~2.1", 1, 2, (9,)), ("a~0.1", 1, 0, (7, 6))]
    await site.say("a~0.1", StreamMessage("r1"), tokens("r1", 4, end=STOP), None)
    await site.say("a~2.1", StreamMessage("r2"), tokens("r2", 5, index=2, end=STOP), None)
    assert sorted(site.read()) == [(0, "<4>", STOP), (2, "<5>", STOP)]
    assert (site.stream.finished, site.num_counted) == (True, 2)
    await site.close()


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_when_too_many_replicas_were_lost_the_reader_is_told_after_all_that_came(limit: int) -> None:
    site = Site(limit=limit)
    for number in range(limit + 1):
        name, replica_id = ("a", "r0") if number == 0 else (f"a~0.{number}", f"r{number}")
        await site.say(name, StreamMessage(replica_id), tokens(replica_id, number), EngineDead(f"death {number}"))
        assert site.read() == [(0, f"<{number}>", None)]
    with pytest.raises(EngineDead, match=f"death {limit}"):
        site.read()
    assert (site.num_counted, len(site.client.calls)) == (limit, limit + 1)
    await site.close()


@pytest.mark.parametrize("code", ["step_failed", "non_finite_logits", "unavailable", "queue_timeout"])
async def test_an_answer_that_failed_by_itself_or_was_shut_down_is_not_tried_again(code: str) -> None:
    site = Site()
    event = TokenEvent(0, (), "", 1, ERROR, error=ErrorInfo(code, "no"))
    await site.say("a", TAKEN, tokens("r0", 7), StreamMessage("r0", (event,)), None)
    assert site.read() == [(0, "<7>", None), (0, "", ERROR)]
    await settled()
    assert len(site.client.calls) == 1
    await site.close()


async def test_a_replacement_that_must_be_started_first_is_waited_for() -> None:
    site = Site(num_replicas=1)
    await site.say("a", TAKEN, tokens("r0", 7), EngineDead("gone"))
    site.client.replica_ids.clear()
    assert site.read() == [(0, "<7>", None)]
    for _ in range(3):
        await asyncio.sleep(0.002)
        await site.leases.beat()
    assert (site.read(), len(site.client.calls)) == ([], 1)
    site.client.replica_ids.append("r9")
    await site.until_sent("a~0.1")
    await site.say("a~0.1", StreamMessage("r9"), tokens("r9", 8, end=STOP), None)
    assert site.read() == [(0, "<8>", STOP)]
    await site.close()


async def test_the_wait_for_another_replica_is_bounded_and_the_reader_is_told_how_it_was_lost() -> None:
    site = Site(num_replicas=1, wait_s=10)
    await site.say("a", TAKEN, tokens("r0", 7), EngineDead("gone"))
    site.client.replica_ids.clear()
    assert site.read() == [(0, "<7>", None)]
    site.clock.now_s += 10.1
    await site.leases.beat()
    with pytest.raises(EngineDead, match="gone"):
        site.read()
    await site.close()


@pytest.mark.parametrize("code", ["queue_full", "unavailable", "engine_dead"])
async def test_replicas_that_refuse_are_asked_again_until_one_takes_it(code: str) -> None:
    site = Site()
    await site.say("a", TAKEN, tokens("r0", 7), EngineDead("gone"))
    assert site.read() == [(0, "<7>", None)]
    for replica_id in ("r1", "r2", "r1"):
        await settled()
        num_calls = len(site.client.calls)
        await site.say("a~0.1", refusal(replica_id, code))
        async with asyncio.timeout(5):
            while len(site.client.calls) == num_calls:
                await asyncio.sleep(0.001)
        assert site.client.calls[-1] == ("a~0.1", ("r0", replica_id))
    await site.say("a~0.1", StreamMessage("r2"), tokens("r2", 8, end=STOP), None)
    assert site.read() == [(0, "<8>", STOP)]
    assert site.num_counted == 1
    await site.close()


async def test_refusals_end_when_the_time_is_over() -> None:
    site = Site(wait_s=10)
    await site.say("a", TAKEN, tokens("r0", 7), EngineDead("gone"))
    assert site.read() == [(0, "<7>", None)]
    site.clock.now_s += 10.1
    await site.say("a~0.1", refusal("r1", "queue_full"))
    with pytest.raises(EngineDead, match="gone"):
        site.read()
    await site.close()


async def test_a_replica_that_could_never_take_the_rest_leaves_the_loss_as_the_error() -> None:
    site = Site()
    await site.say("a", TAKEN, tokens("r0", 7), EngineDead("gone"))
    assert site.read() == [(0, "<7>", None)]
    await site.say("a~0.1", refusal("r1", "context_length_exceeded"), None)
    with pytest.raises(EngineDead, match="gone"):
        site.read()
    await site.close()


async def test_a_request_that_nobody_took_fails_as_it_always_did() -> None:
    site = Site(num_replicas=2)
    await site.say("a", refusal("r0", "unavailable"))
    await site.say("a", Unavailable("no"))
    with pytest.raises(Unavailable):
        site.read()
    assert [request_id for request_id, _ in site.client.calls] == ["a", "a"]
    assert site.num_counted == 0
    await site.close()


async def test_a_silent_replica_loses_its_answers_as_soon_as_another_can_continue_them() -> None:
    site = Site(num_replicas=2)
    await site.say("a", TAKEN, tokens("r0", 7))
    site.client.silent.add("r0")
    site.clock.now_s += 1.4
    await site.leases.beat()
    assert (site.read(), len(site.client.calls)) == ([(0, "<7>", None)], 1)
    site.clock.now_s += 0.2
    await site.leases.beat()
    assert site.read() == []
    await settled()
    assert site.client.calls[1] == ("a~0.1", ("r0",))
    await site.say("a", tokens("r0", 8))  # it wakes up: too late
    await site.say("a~0.1", StreamMessage("r1"), tokens("r1", 8, end=STOP), None)
    assert site.read() == [(0, "<8>", STOP)]
    await site.close()


async def test_a_silent_replica_keeps_its_answers_for_longer_while_there_is_no_other() -> None:
    site = Site(num_replicas=1)
    await site.say("a", TAKEN, tokens("r0", 7))
    site.client.silent.add("r0")
    site.clock.now_s += 4.9
    await site.leases.beat()
    site.client.silent.clear()
    await site.say("a", tokens("r0", 8, end=STOP), None)
    assert site.read() == [(0, "<7>", None), (0, "<8>", STOP)]
    assert site.num_counted == 0
    await site.close()


async def test_a_continuation_that_a_silent_replica_has_not_taken_moves_on() -> None:
    site = Site(num_replicas=3)
    await site.say("a", TAKEN, tokens("r0", 7), EngineDead("gone"))
    assert site.read() == [(0, "<7>", None)]
    await settled()
    site.client.sent_to["a~0.1"] = "r1"
    site.client.silent.add("r1")
    await site.leases.beat()
    site.clock.now_s += 1.6
    await site.leases.beat()
    await settled()
    async with asyncio.timeout(5):
        while len(site.client.calls) < 3:
            await asyncio.sleep(0.001)
    assert site.client.calls[2] == ("a~0.1", ("r0", "r1"))
    site.client.sent_to["a~0.1"] = "r2"
    await site.say("a~0.1", StreamMessage("r2"), tokens("r2", 8, end=STOP), None)
    assert site.read() == [(0, "<8>", STOP)]
    assert site.num_counted == 1
    await site.close()


async def test_what_a_continuation_finds_cached_is_not_reported() -> None:
    site = Site()
    await site.say("a", TAKEN, replace(tokens("r0", 7), num_cached_tokens=2), EngineDead("gone"))
    assert [message.num_cached_tokens for message in site.stream.take_all()] == [2]
    await site.say("a~0.1", StreamMessage("r1"), replace(tokens("r1", 8, end=STOP), num_cached_tokens=4), None)
    assert [message.num_cached_tokens for message in site.stream.take_all()] == [0]
    await site.close()


@pytest.mark.parametrize("taken", [False, True])
async def test_a_reader_that_leaves_ends_what_was_continued(taken: bool) -> None:
    site = Site(n=2)
    await site.say("a", TAKEN, tokens("r0", 7), EngineDead("gone"))
    assert site.read() == [(0, "<7>", None)]
    await settled()
    if taken:
        await site.say("a~0.1", StreamMessage("r1"))
        await site.say("a~1.1", StreamMessage("r2"))
    site.stream.close()
    if not taken:
        await site.say("a~0.1", StreamMessage("r1"))
        await site.say("a~1.1", StreamMessage("r2"))
    await settled()
    assert sorted(site.client.aborted) == [("r1", "a~0.1"), ("r2", "a~1.1")]
    await site.close()
