"""Open streams: nobody is left waiting, and no replica keeps a request that nobody listens to."""

from __future__ import annotations

from contextvars import ContextVar

import pytest

from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from replica.errors import EngineDead, EngineFailure, QueueFull, Unavailable
from replica.request import FinishReason, StreamMessage
from tests.unit.deployments.lease_parts import TAKEN, FakeClock, heard, opened, refusal, request, settled, token


async def test_reads_everything_in_order_and_then_ends() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", TAKEN, token("x"), token("y", FinishReason.STOP), None)
    await settled()
    assert [m.events[0].text for m in (await heard(stream)) if m.events] == ["x", "y"]
    assert await heard(stream) == []
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


async def test_no_call_to_a_replica_is_made_in_the_context_of_the_request() -> None:
    """Serve cancels all that was called in it when the client leaves: the abort, too."""
    whose: ContextVar[str] = ContextVar("whose", default="nobody's")
    seen: list[str] = []

    class Watched(FakeModelClient):
        async def abort(self, replica_id: str, request_id: str) -> None:
            seen.append(whose.get())
            await super().abort(replica_id, request_id)

        def forget(self, request_id: str) -> None:
            seen.append(whose.get())
            super().forget(request_id)

    client, leases = Watched("r0"), Leases("lease", FakeClock())
    whose.set("the request's")
    stream = await opened(leases, client)
    client.say("a", TAKEN)
    await settled()
    leases.close(stream)
    await settled()
    assert seen == ["nobody's", "nobody's"]


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
        await heard(stream)


async def test_a_request_that_no_replica_takes_ends() -> None:
    clock = FakeClock()
    client, leases = FakeModelClient("r0"), Leases("lease", clock, accept_s=10)
    stream = await opened(leases, client)
    clock.now_s += 10.1
    await leases.beat()
    with pytest.raises(Unavailable):
        await heard(stream)


@pytest.mark.parametrize("code", ["queue_full", "unavailable", "engine_dead"])
async def test_a_refusal_is_tried_once_at_another_replica(code: str) -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", refusal("r0", code))
    await settled()
    assert client.calls == [("a", ()), ("a", ("r0",))]
    client.say("a", StreamMessage("r1"), token("x", FinishReason.STOP, replica="r1"), None)
    await settled()
    assert [m.replica_id for m in await heard(stream)] == ["r1", "r1"]


async def test_a_second_refusal_reaches_the_reader_as_the_replica_sent_it() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", refusal("r0", "queue_full"))
    await settled()
    client.say("a", refusal("r1", "queue_full"), None)
    await settled()
    assert [m.replica_id for m in await heard(stream)] == ["r1"]
    assert len(client.calls) == 2


async def test_the_refusal_of_the_only_replica_is_final() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", refusal("r0", "queue_full"))
    await settled()
    with pytest.raises(QueueFull):
        await heard(stream)
    assert client.calls == [("a", ())]


async def test_a_replica_that_dies_before_it_took_the_request_is_replaced_by_another() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", EngineDead("gone"))
    await settled()
    client.say("a", StreamMessage("r1"))
    await settled()
    assert [m.replica_id for m in await heard(stream)] == ["r1"]


async def test_a_replica_that_dies_later_ends_its_stream_after_what_it_said() -> None:
    client, leases = FakeModelClient("r0", "r1"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", TAKEN, token("x"), EngineDead("gone"))
    await settled()
    assert len(await heard(stream)) == 2
    with pytest.raises(EngineDead):
        await heard(stream)
    assert len(client.calls) == 1


async def test_a_call_that_just_stops_is_an_error() -> None:
    client, leases = FakeModelClient("r0"), Leases("lease", FakeClock())
    stream = await opened(leases, client)
    client.say("a", TAKEN, None)
    await settled()
    assert len(await heard(stream)) == 1
    with pytest.raises(EngineFailure):
        await heard(stream)


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
            await heard(stream)
            await heard(stream)
