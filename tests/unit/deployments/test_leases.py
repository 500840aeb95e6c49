"""Open streams: nobody is left waiting, and no replica keeps a request that nobody listens to."""

from __future__ import annotations

import asyncio

import pytest

from deployments.leases import Leases, OpenStream
from deployments.model_client_fake import FakeModelClient
from replica.errors import EngineDead, EngineFailure, ErrorInfo, QueueFull, Unavailable
from replica.request import FinishReason, GenerationRequest, SamplingParams, StreamMessage, TokenEvent

TAKEN = StreamMessage("r0")


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(request_id: str = "a", n: int = 1) -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=4), n=n)


def token(text: str, reason: FinishReason | None = None, index: int = 0, replica: str = "r0") -> StreamMessage:
    return StreamMessage(replica, (TokenEvent(index, (7,), text, 1, reason),))


def refusal(replica: str, code: str) -> StreamMessage:
    event = TokenEvent(0, (), "", 0, FinishReason.REJECTED, error=ErrorInfo(code, "no", retry_after_s=1.0))
    return StreamMessage(replica, (event,))


async def opened(leases: Leases, client: FakeModelClient, request_id: str = "a", n: int = 1) -> OpenStream:
    stream = leases.open(client, request(request_id, n))
    await settled()
    return stream


async def settled() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_reads_everything_in_order_and_then_ends() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", TAKEN, token("x"), token("y", FinishReason.STOP), None)
    await settled()
    assert [m.events[0].text for m in (await stream.read()) if m.events] == ["x", "y"]
    assert await stream.read() == []
    leases.close(stream)
    await settled()
    assert (client.aborted, client.forgotten, len(leases)) == ([], ["a"], 0)


async def test_closing_an_unfinished_stream_aborts_it_at_its_replica() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", TAKEN, token("x"))
    await settled()
    leases.close(stream)
    leases.close(stream)
    await settled()
    assert client.aborted == [("r0", "a")]
    assert client.forgotten == ["a"]


async def test_one_finished_sequence_of_two_still_needs_the_abort() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client, n=2)
    client.say("a", TAKEN, token("x", FinishReason.STOP, index=1))
    await settled()
    leases.close(stream)
    await settled()
    assert client.aborted == [("r0", "a")]


async def test_the_abort_of_a_request_that_nobody_took_yet_waits_for_who_takes_it() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    leases.close(stream)
    await settled()
    assert client.aborted == []
    client.say("a", TAKEN)
    await settled()
    assert client.aborted == [("r0", "a")]


async def test_every_replica_is_told_once_a_beat_which_streams_have_a_listener() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    streams = [await opened(leases, client, name) for name in ("a", "b", "c")]
    client.say("a", TAKEN)
    client.say("b", StreamMessage("r1"))
    client.say("c", TAKEN)
    await settled()
    await leases.beat()
    assert sorted(client.renewed) == [("r0", "lease", ("a", "c")), ("r1", "lease", ("b",))]
    leases.close(streams[0])
    leases.close(streams[1])
    await settled()
    await leases.beat()
    assert client.renewed[2:] == [("r0", "lease", ("c",))]


async def test_streams_of_a_silent_replica_end_after_the_limit_and_not_before() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0"), Leases("lease", clock, lost_after_s=5)
    stream = await opened(leases, client)
    client.say("a", TAKEN, token("x"))
    await settled()
    client.silent.add("r0")
    clock.now_s += 5
    await leases.beat()
    assert len(await stream.read()) == 2
    clock.now_s += 0.1
    await leases.beat()
    with pytest.raises(EngineDead):
        await stream.read()


async def test_a_message_proves_that_a_replica_lives() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0"), Leases("lease", clock, lost_after_s=5)
    stream = await opened(leases, client)
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
    assert [m.events[0].text for m in (await stream.read()) if m.events] == ["x", "y"]


async def test_without_a_running_replica_nothing_is_sent() -> None:
    client, leases = FakeModelClient(), Leases("lease", FakeClock())
    with pytest.raises(Unavailable) as caught:
        leases.open(client, request())
    assert caught.value.retry_after_s == 5.0
    assert (client.calls, len(leases)) == ([], 0)


async def test_a_request_that_waits_for_a_replica_ends_when_the_last_one_is_gone() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.replica_ids.clear()
    await leases.beat()
    with pytest.raises(Unavailable):
        await stream.read()


async def test_a_request_that_no_replica_takes_ends() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0"), Leases("lease", clock, accept_s=10)
    stream = await opened(leases, client)
    clock.now_s += 10.1
    await leases.beat()
    with pytest.raises(Unavailable):
        await stream.read()


async def test_a_request_that_was_sent_waits_for_the_step_of_a_replica_that_answers() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0"), Leases("lease", clock, accept_s=10, lost_after_s=5)
    stream = await opened(leases, client)
    client.sent_to["a"] = "r0"
    clock.now_s += 100
    await leases.beat()
    assert client.renewed == [("r0", "lease", ("a",))]
    client.say("a", TAKEN)
    await settled()
    assert len(await stream.read()) == 1


async def test_a_request_that_was_sent_to_a_silent_replica_ends() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0"), Leases("lease", clock, lost_after_s=5)
    stream = await opened(leases, client)
    client.sent_to["a"] = "r0"
    client.silent.add("r0")
    await leases.beat()
    clock.now_s += 5.1
    await leases.beat()
    with pytest.raises(EngineDead):
        await stream.read()


async def test_a_request_that_a_silent_replica_has_not_taken_moves_to_another_one() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", clock, move_after_s=1.5)
    stream = await opened(leases, client)
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
    assert [m.replica_id for m in await stream.read()] == ["r1", "r1"]
    assert await stream.read() == []
    leases.close(stream)
    await settled()
    assert (client.aborted, client.forgotten, len(leases), leases.num_background) == ([], ["a"], 0, 0)


async def test_a_request_moves_once_and_ends_when_the_second_replica_is_silent_too() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", clock, move_after_s=1.5, lost_after_s=5)
    stream = await opened(leases, client)
    client.silent.update(("r0", "r1"))
    for replica_id in ("r0", "r1"):
        client.sent_to["a"] = replica_id
        await leases.beat()
        clock.now_s += 5.1
        await leases.beat()
        await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    with pytest.raises(EngineDead):
        await stream.read()


async def test_a_stream_that_a_silent_replica_computes_does_not_move() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", clock, move_after_s=1.5, lost_after_s=5)
    stream = await opened(leases, client)
    client.say("a", TAKEN)
    await settled()
    client.silent.add("r0")
    clock.now_s += 4.9
    await leases.beat()
    await settled()
    assert client.calls == [("a", ())]
    clock.now_s += 0.2
    await leases.beat()
    assert len(await stream.read()) == 1
    with pytest.raises(EngineDead):
        await stream.read()


async def test_a_client_that_leaves_when_its_request_has_moved_leaves_nothing() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", clock, move_after_s=1.5, accept_s=0.01)
    stream = await opened(leases, client)
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


@pytest.mark.parametrize("code", ["queue_full", "unavailable", "engine_dead"])
async def test_a_refusal_is_tried_once_at_another_replica(code: str) -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", refusal("r0", code))
    await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    client.say("a", StreamMessage("r1"), token("x", FinishReason.STOP, replica="r1"), None)
    await settled()
    assert [m.replica_id for m in await stream.read()] == ["r1", "r1"]


async def test_a_second_refusal_reaches_the_reader_as_the_replica_sent_it() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", refusal("r0", "queue_full"))
    await settled()
    client.say("a", refusal("r1", "queue_full"), None)
    await settled()
    assert [m.replica_id for m in await stream.read()] == ["r1"]
    assert len(client.calls) == 2


async def test_the_refusal_of_the_only_replica_is_final() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", refusal("r0", "queue_full"))
    await settled()
    with pytest.raises(QueueFull):
        await stream.read()
    assert client.calls == [("a", ())]


async def test_a_replica_that_dies_before_it_took_the_request_is_replaced_by_another() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", EngineDead("gone"))
    await settled()
    client.say("a", StreamMessage("r1"))
    await settled()
    assert [m.replica_id for m in await stream.read()] == ["r1"]


async def test_a_replica_that_dies_later_ends_its_stream_after_what_it_said() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", TAKEN, token("x"), EngineDead("gone"))
    await settled()
    assert len(await stream.read()) == 2
    with pytest.raises(EngineDead):
        await stream.read()
    assert len(client.calls) == 1


async def test_a_call_that_just_stops_is_an_error() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", TAKEN, None)
    await settled()
    assert len(await stream.read()) == 1
    with pytest.raises(EngineFailure):
        await stream.read()


async def test_shutting_down_aborts_everything_and_ends_every_reader() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    streams = [await opened(leases, client, name) for name in ("a", "b")]
    client.say("a", TAKEN)
    client.say("b", TAKEN)
    await settled()
    await leases.shut_down()
    assert client.aborted == [("r0", "a"), ("r0", "b")]
    for stream in streams:
        with pytest.raises(Unavailable):
            await stream.read()
            await stream.read()
