"""Replicas that fall silent: what they compute ends with an error, what they have not taken moves to another one."""

from __future__ import annotations

import asyncio

import pytest

from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from deployments.open_stream import OpenStream
from replica.errors import EngineDead
from replica.request import FinishReason, StreamMessage
from tests.unit.deployments.lease_parts import TAKEN, FakeClock, heard, opened, refusal, settled, token


async def one_stream(*replicas: str, **limits_s: float) -> tuple[FakeClock, FakeModelClient, Leases, OpenStream]:
    """An ingress with these replicas and one open request, "a", sent to none of them yet."""
    clock, client = FakeClock(), FakeModelClient(*replicas)
    leases = Leases("lease", clock, **limits_s)
    return clock, client, leases, await opened(leases, client)


async def test_streams_of_a_silent_replica_end_after_the_limit_and_not_before() -> None:
    clock, client, leases, stream = await one_stream("r0", lost_after_s=5)
    client.say("a", TAKEN, token("x"))
    await settled()
    client.silent.add("r0")
    clock.now_s += 5
    await leases.beat()
    assert len(await heard(stream)) == 2
    clock.now_s += 0.1
    await leases.beat()
    with pytest.raises(EngineDead):
        await heard(stream)


async def test_a_message_proves_that_a_replica_lives() -> None:
    clock, client, leases, stream = await one_stream("r0", lost_after_s=5)
    client.say("a", TAKEN)
    await settled()
    client.silent.add("r0")
    clock.now_s += 4
    client.say("a", token("x"))
    await settled()
    clock.now_s += 4
    await leases.beat()
    client.say("a", token("y", FinishReason.STOP), None)
    await settled()
    assert [m.events[0].text for m in (await heard(stream)) if m.events] == ["x", "y"]


async def test_a_request_that_was_sent_waits_for_the_step_of_a_replica_that_answers() -> None:
    clock, client, leases, stream = await one_stream("r0", accept_s=10, lost_after_s=5)
    client.sent_to["a"] = "r0"
    clock.now_s += 100
    await leases.beat()
    assert client.renewed == [("r0", "lease", ("a",))]
    client.say("a", TAKEN)
    await settled()
    assert len(await heard(stream)) == 1


async def test_a_request_that_was_sent_to_a_silent_replica_ends() -> None:
    clock, client, leases, stream = await one_stream("r0", lost_after_s=5)
    client.sent_to["a"] = "r0"
    client.silent.add("r0")
    await leases.beat()
    clock.now_s += 5.1
    await leases.beat()
    with pytest.raises(EngineDead):
        await heard(stream)


async def test_a_request_that_a_silent_replica_has_not_taken_moves_to_another_one() -> None:
    clock, client, leases, stream = await one_stream("r0", "r1", move_after_s=1.5)
    client.sent_to["a"] = "r0"
    client.silent.add("r0")
    await leases.beat()
    clock.now_s += 1.5
    await leases.beat()
    await settled()
    assert client.calls == [("a", ())]
    clock.now_s += 0.1
    await leases.beat()
    await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    client.sent_to["a"] = "r1"
    client.say("a", StreamMessage("r1"), token("x", FinishReason.STOP, replica="r1"), None)
    await settled()
    assert [m.replica_id for m in await heard(stream)] == ["r1", "r1"]
    assert await heard(stream) == []
    leases.close(stream)
    await settled()
    assert (client.aborted, client.forgotten, len(leases), leases.num_background) == ([], ["a"], 0, 0)


async def test_a_request_moves_once_and_ends_when_the_second_replica_is_silent_too() -> None:
    clock, client, leases, stream = await one_stream("r0", "r1", move_after_s=1.5, lost_after_s=5)
    client.silent.update(("r0", "r1"))
    for replica_id in ("r0", "r1"):
        client.sent_to["a"] = replica_id
        await leases.beat()
        clock.now_s += 5.1
        await leases.beat()
        await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    with pytest.raises(EngineDead):
        await heard(stream)


async def test_a_request_that_one_replica_refused_waits_for_the_second_as_long_as_any_other() -> None:
    clock, client, leases, stream = await one_stream("r0", "r1", move_after_s=1.5, lost_after_s=5)
    client.say("a", refusal("r0", "queue_full"))
    await settled()
    client.sent_to["a"] = "r1"
    client.silent.add("r1")
    await leases.beat()
    clock.now_s += 4.9
    await leases.beat()
    await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    client.say("a", StreamMessage("r1"))
    await settled()
    assert [m.replica_id for m in await heard(stream)] == ["r1"]
    clock.now_s += 5.1
    await leases.beat()
    with pytest.raises(EngineDead):
        await heard(stream)


async def test_a_renewal_that_fails_late_says_nothing_of_requests_that_have_left_by_then() -> None:
    clock, client, leases, stream = await one_stream("r0", "r1", move_after_s=1.5, lost_after_s=5)
    client.sent_to["a"] = "r0"
    await leases.beat()
    client.silent.add("r0")
    client.answers["r0"] = asyncio.Event()
    clock.now_s += 5
    round_ = asyncio.create_task(leases.beat())
    await settled()
    client.say("a", refusal("r0", "queue_full"))
    await settled()
    client.sent_to["a"] = "r1"
    clock.now_s += 2
    client.answers["r0"].set()
    await round_
    await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    client.say("a", StreamMessage("r1"), token("x", FinishReason.STOP, replica="r1"), None)
    await settled()
    assert [m.replica_id for m in await heard(stream)] == ["r1", "r1"]


async def test_an_ingress_that_stood_still_judges_nobody_by_it() -> None:
    clock, client, leases, stream = await one_stream("r0", "r1", move_after_s=1.5, lost_after_s=5)
    client.say("a", TAKEN)
    await settled()
    client.silent.add("r0")
    client.answers["r0"] = asyncio.Event()
    round_ = asyncio.create_task(leases.beat())
    await settled()
    clock.now_s += 60
    client.answers["r0"].set()
    await round_
    assert client.distrusted == []
    assert len(await heard(stream)) == 1
    client.silent.clear()
    await leases.beat()
    client.say("a", token("x", FinishReason.STOP), None)
    await settled()
    assert len(await heard(stream)) == 1


async def test_a_stream_that_a_silent_replica_computes_does_not_move() -> None:
    clock, client, leases, stream = await one_stream("r0", "r1", move_after_s=1.5, lost_after_s=5)
    client.say("a", TAKEN)
    await settled()
    client.silent.add("r0")
    clock.now_s += 4.9
    await leases.beat()
    await settled()
    assert client.calls == [("a", ())]
    clock.now_s += 0.2
    await leases.beat()
    assert len(await heard(stream)) == 1
    with pytest.raises(EngineDead):
        await heard(stream)


async def test_a_client_that_leaves_when_its_request_has_moved_leaves_nothing() -> None:
    clock, client, leases, stream = await one_stream("r0", "r1", move_after_s=1.5, accept_s=0.01)
    client.sent_to["a"] = "r0"
    client.silent.add("r0")
    await leases.beat()
    clock.now_s += 1.6
    await leases.beat()
    await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    client.sent_to["a"] = "r1"
    leases.close(stream)
    await leases.shut_down()
    assert (client.aborted, client.forgotten, len(leases), leases.num_background) == ([("r1", "a")], ["a"], 0, 0)


async def test_the_router_hears_of_every_renewal_that_was_not_answered() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    await opened(leases, client)
    client.say("a", TAKEN)
    await settled()
    await leases.beat()
    assert client.distrusted == []
    client.silent.add("r0")
    await leases.beat()
    assert client.distrusted == ["r0"]


async def test_a_replica_that_takes_long_to_answer_a_renewal_delays_no_other_lease() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    for name in ("a", "b"):
        await opened(leases, client, name)
    client.say("a", TAKEN)
    client.say("b", StreamMessage("r1"))
    await settled()
    client.answers["r0"] = asyncio.Event()
    rounds = []
    for _ in range(2):
        rounds.append(asyncio.create_task(leases.beat()))
        await settled()
    assert client.renewed == [("r1", "lease", ("b",)), ("r1", "lease", ("b",))]
    client.answers["r0"].set()
    await asyncio.gather(*rounds)
    assert client.renewed[2:] == [("r0", "lease", ("a",))]
