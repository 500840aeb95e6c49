"""Several requests read as one answer: in order, all or an error, and nothing left behind."""

from __future__ import annotations

import asyncio

import pytest

from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from deployments.open_call import OpenCall
from replica.errors import EngineDead, EngineFailure, ErrorInfo, StepFailed, Unavailable
from replica.request import FinishReason, GenerationRequest, SamplingParams, StreamMessage, TokenEvent

TAKEN = StreamMessage("r0")


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1,), SamplingParams(max_tokens=4))


def token(text: str, reason: FinishReason | None = None, error: ErrorInfo | None = None) -> StreamMessage:
    return StreamMessage("r0", (TokenEvent(0, (7,), text, 1, reason, None, error),))


def texts(came: list[tuple[int, StreamMessage]]) -> list[tuple[int, str]]:
    return [(number, message.events[0].text) for number, message in came]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_messages_of_all_requests_arrive_with_their_number_until_all_have_ended() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", lambda: 0.0)
    with OpenCall(leases, client, [request("a"), request("b")]) as call:
        await settled()
        client.say("a", TAKEN)
        client.say("b", TAKEN, token("b1"))
        assert texts(await call.read()) == [(1, "b1")]
        client.say("a", token("a1", FinishReason.STOP), None)
        assert texts(await call.read()) == [(0, "a1")]
        client.say("b", token("b2", FinishReason.LENGTH), None)
        assert texts(await call.read()) == [(1, "b2")]
        assert await call.read() == []
    await settled()
    assert (client.aborted, len(leases)) == ([], 0)


async def test_the_failure_of_one_request_comes_after_what_was_said_and_aborts_the_others() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", lambda: 0.0)
    with pytest.raises(StepFailed), OpenCall(leases, client, [request("a"), request("b")]) as call:
        await settled()
        client.say("a", TAKEN, token("a1"), token("", FinishReason.ERROR, ErrorInfo("step_failed", "no")), None)
        client.say("b", TAKEN, token("b1"))
        await settled()
        assert texts(await call.read()) == [(0, "a1"), (1, "b1")]
        await call.read()
    await settled()
    assert client.aborted == [("r0", "b")]


async def test_the_death_of_a_replica_ends_the_call() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", lambda: 0.0)
    with pytest.raises(EngineDead), OpenCall(leases, client, [request("a")]) as call:
        await settled()
        client.say("a", TAKEN, EngineDead("gone"))
        await call.read()


async def test_an_abort_that_nobody_here_asked_for_is_an_error() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", lambda: 0.0)
    with pytest.raises(EngineFailure), OpenCall(leases, client, [request("a")]) as call:
        await settled()
        client.say("a", TAKEN, token("", FinishReason.ABORT), None)
        await call.read()


async def test_leaving_early_aborts_every_request() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", lambda: 0.0)
    with OpenCall(leases, client, [request("a"), request("b")]):
        await settled()
        client.say("a", TAKEN)
        client.say("b", TAKEN)
        await settled()
    await settled()
    assert client.aborted == [("r0", "a"), ("r0", "b")]


async def test_without_a_replica_nothing_stays_open() -> None:
    client, leases = FakeModelClient(), Leases("lease", lambda: 0.0)
    with pytest.raises(Unavailable), OpenCall(leases, client, [request("a"), request("b")]):
        raise AssertionError("must not be entered")
    assert len(leases) == 0
