"""Answers that fail though their replica lives: who is asked next, what the reader gets, and who is blamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from deployments.continued_stream import ContinuedStream, Continuing
from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from replica.errors import BrimfulError, EngineDead, EngineFailure, ErrorInfo, error_from_info
from replica.request import FinishReason, GenerationRequest, StreamMessage, TokenEvent
from router.health import ReplicaHealth
from router.types import RouteRequest
from tests.unit.deployments.lease_parts import TAKEN, FakeClock, all_events, refusal, settled
from tests.unit.deployments.test_continued_stream import ERROR, REQUEST, STOP, Site, tokens
from tests.unit.router.loads import report

FAILURES = ["step_failed", "non_finite_logits", "engine_failure"]


def failed(replica_id: str, code: str = "non_finite_logits", index: int = 0) -> StreamMessage:
    return StreamMessage(replica_id, (TokenEvent(index, (), "", 0, ERROR, error=ErrorInfo(code, "no")),))


@pytest.mark.parametrize("code", FAILURES)
async def test_an_answer_that_fails_before_its_first_token_is_asked_of_another_replica(code: str) -> None:
    site = Site()
    await site.say("a", TAKEN, failed("r0", code), None)
    assert site.read() == []
    await settled()
    assert site.client.calls[1:] == [("a~0.1", ("r0",))]
    assert site.client.requests[1] == replace(REQUEST, request_id="a~0.1")
    await site.say("a~0.1", StreamMessage("r1"), tokens("r1", 7), tokens("r1", 8, end=STOP), None)
    assert site.read() == [(0, "<7>", None), (0, "<8>", STOP)]
    assert (site.client.failures, site.client.successes) == ([("a", "r0")], [("a", "r1")])
    assert (site.num_counted, site.client.distrusted, site.client.aborted) == (1, [], [])
    await site.close()


async def test_so_is_one_whose_call_fails_after_it_was_taken() -> None:
    site = Site()
    await site.say("a", TAKEN, EngineFailure("the request failed inside the service"))
    assert site.read() == []
    await settled()
    assert site.client.calls[1:] == [("a~0.1", ("r0",))]
    await site.say("a~0.1", StreamMessage("r1"), tokens("r1", 7, end=STOP), None)
    assert site.read() == [(0, "<7>", STOP)]
    assert (site.client.failures, site.client.successes) == ([("a", "r0")], [("a", "r1")])
    await site.close()


async def test_one_that_fails_at_two_replicas_has_failed() -> None:
    site = Site()
    await site.say("a", TAKEN, failed("r0"), None)
    assert site.read() == []
    await site.say("a~0.1", StreamMessage("r1"), failed("r1"), None)
    assert site.read() == [(0, "", ERROR)]
    await settled()
    assert len(site.client.calls) == 2
    assert site.client.failures == [("a", "r0"), ("a", "r1")]
    await site.close()


async def test_of_several_answers_each_that_failed_is_asked_again_by_itself() -> None:
    site = Site(n=3)
    await site.say("a", TAKEN, tokens("r0", 7), failed("r0", index=1), failed("r0", index=2), tokens("r0", 8, end=STOP))
    assert site.read() == [(0, "<7>", None), (0, "<8>", STOP)]
    await settled()
    parts = [(r.request_id, r.n, r.first_index, r.prior_output_ids) for r in site.client.requests[1:]]
    assert parts == [("a~1.1", 1, 1, ()), ("a~2.1", 1, 2, ())]
    await site.say("a~1.1", StreamMessage("r1"), tokens("r1", 4, index=1, end=STOP), None)
    await site.say("a~2.1", StreamMessage("r2"), tokens("r2", 5, index=2, end=STOP), None)
    assert sorted(site.read()) == [(1, "<4>", STOP), (2, "<5>", STOP)]
    assert site.stream.finished
    await site.close()


async def test_after_the_first_token_the_reader_is_told_and_nobody_blamed() -> None:
    site = Site()
    await site.say("a", TAKEN, tokens("r0", 7), failed("r0"), None)
    assert site.read() == [(0, "<7>", None), (0, "", ERROR)]
    assert (len(site.client.calls), site.client.failures) == (1, [])
    await site.close()


@pytest.mark.parametrize("code", ["unavailable", "queue_timeout", "internal_error", "invalid_value"])
async def test_what_is_no_failure_of_a_replica_is_told_to_the_reader(code: str) -> None:
    site = Site()
    await site.say("a", TAKEN, failed("r0", code), None)
    assert site.read() == [(0, "", ERROR)]
    assert (len(site.client.calls), site.client.failures) == (1, [])
    await site.close()


@pytest.mark.parametrize(("num_replicas", "limit"), [(1, 2), (3, 0)])
async def test_without_another_replica_or_leave_to_ask_it_the_reader_is_told(num_replicas: int, limit: int) -> None:
    site = Site(num_replicas, limit=limit)
    await site.say("a", TAKEN, failed("r0"), None)
    assert site.read() == [(0, "", ERROR)]
    assert len(site.client.calls) == 1
    await site.close()


async def test_when_nobody_takes_the_second_try_the_reader_gets_the_first_failure() -> None:
    site = Site(wait_s=10)
    await site.say("a", TAKEN, failed("r0"), None)
    assert site.read() == []
    await settled()
    site.clock.now_s += 10.1
    await site.say("a~0.1", refusal("r1", "queue_full"))
    with pytest.raises(BrimfulError) as told:
        site.read()
    assert told.value.code == "non_finite_logits"
    assert site.client.failures == [("a", "r0")]
    await site.close()


async def test_a_second_try_may_still_lose_its_replica() -> None:
    site = Site(limit=1)
    await site.say("a", TAKEN, failed("r0"), None)
    assert site.read() == []
    await site.say("a~0.1", StreamMessage("r1"), tokens("r1", 7), EngineDead("gone"))
    assert site.read() == [(0, "<7>", None)]
    await settled()
    assert site.client.calls[2] == ("a~0.2", ("r0", "r1"))
    assert site.client.requests[2].prior_output_ids == (7,)
    await site.say("a~0.2", StreamMessage("r2"), tokens("r2", 8, end=STOP), None)
    assert site.read() == [(0, "<8>", STOP)]
    assert site.client.successes == [("a", "r1"), ("a", "r2")]
    await site.close()


class Judged(FakeModelClient):
    """Replicas chosen as the router would, the first that is left; those in `broken` fail everything, and all of them
    requests whose prompt begins with 13."""

    def __init__(self, *replica_ids: str, broken: str = "") -> None:
        super().__init__(*replica_ids)
        self.health = ReplicaHealth(lambda: 0.0)
        self.health.num_replicas = len(replica_ids)
        self.broken = broken
        self.chosen: list[str] = []

    async def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
        replica_id = self.health.candidates(self.replica_ids, exclude)[0]
        self.chosen.append(replica_id)
        yield StreamMessage(replica_id)
        if replica_id in self.broken or request.prompt_ids[0] == 13:
            yield failed(replica_id)
        else:
            yield tokens(replica_id, 7, end=STOP)

    def failed(self, request_id: str, replica_id: str) -> None:
        self.health.failed(request_id, replica_id)

    def succeeded(self, request_id: str, replica_id: str) -> None:
        self.health.succeeded(request_id, replica_id)


class FailedCalls(FakeModelClient):
    """A client whose calls go where its router sends them. Those to r0 fail before anything is heard of it, and the
    router was told that they are over before their caller learns of it."""

    async def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
        route = RouteRequest(request.request_id, 3, 9)
        replica_id = self.router.choose(route, self.replica_ids, exclude).replica_id
        self.calls.append((request.request_id, exclude))
        self.router.routed(route, replica_id)
        if replica_id == "r0":
            self.router.released(route)
            raise EngineFailure("the request failed inside the service")
        yield StreamMessage(replica_id)
        yield tokens(replica_id, 7, end=STOP)

    def replica_of(self, request_id: str) -> str | None:
        return self.router.replica_of(request_id)

    def last_replica_of(self, request_id: str) -> str | None:
        return self.router.last_replica_of(request_id)

    def forget(self, request_id: str) -> None:
        self.router.ended(request_id)

    def failed(self, request_id: str, replica_id: str) -> None:
        self.router.health.failed(request_id, replica_id)


async def ends(client: FakeModelClient, *requests: GenerationRequest) -> list[FinishReason | str | None]:
    """How each ended, one after the other; the code of the error, if it was one."""
    leases = Leases("lease", FakeClock())
    found: list[FinishReason | str | None] = []
    for request in requests:
        news = asyncio.Event()
        stream = ContinuedStream(leases, client, request, news, Continuing(limit=2, wait_s=10))
        events = await all_events(stream, news, 5)
        error = events[-1].error
        found.append(error_from_info(error).code if error is not None else events[-1].finish_reason)
    return found


async def test_a_call_that_fails_before_it_was_taken_is_asked_of_another_replica_and_the_first_is_told_of() -> None:
    client = FailedCalls("r0", "r1")
    client.router.observe(report("r0"))
    client.router.observe(report("r1", num_running=20))
    assert await ends(client, REQUEST) == [STOP]
    assert client.calls == [("a", ()), ("a~0.1", ("r0",))]
    assert client.router.health.failing() == {"r0"}
    assert len(client.router.ledger) == 0


async def test_no_reader_notices_a_replica_that_fails_everything_and_soon_it_gets_nothing() -> None:
    client = Judged("r0", "r1", "r2", broken="r0")
    assert await ends(client, *(replace(REQUEST, request_id=f"a{number}") for number in range(6))) == [STOP] * 6
    assert client.chosen == ["r0", "r1"] * 3 + ["r1"] * 3
    assert client.health.ejected() == {"r0"}


async def test_requests_that_fail_everywhere_fail_after_two_replicas_and_eject_nobody() -> None:
    client = Judged("r0", "r1", "r2", "r3")
    poison = [replace(REQUEST, request_id=f"p{number}", prompt_ids=(13,)) for number in range(12)]
    assert await ends(client, *poison) == ["non_finite_logits"] * 12
    assert len(client.chosen) == 24
    assert client.health.ejected() == set()
