"""The asyncio side over an in-thread engine: messages, aborts, leases, bounds and books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from replica.request import FinishReason, GenerationRequest, StreamMessage
from replica.service import ReplicaService
from tests.fake_replica import (
    Answered,
    FakeFactory,
    answer,
    assert_quiet,
    oracle,
    request_of,
    running,
    sample,
    settled,
    small_config,
    text_of,
)
from tests.replica_reader import read


def _num_ends(answered: Answered, request: GenerationRequest) -> int:
    return 1 if answered.events[0].finish_reason is FinishReason.REJECTED else request.n


@asynccontextmanager
async def open_call(
    service: ReplicaService, request: GenerationRequest, refused_with: FinishReason | None = None
) -> AsyncIterator[AsyncGenerator[StreamMessage, None]]:
    """A request's call after its first message. Nobody fetches its later news."""
    async with aclosing(service.submit(request)) as call:
        first = await anext(call)
        assert [event.finish_reason for event in first.events] == ([refused_with] if refused_with else [])
        yield call


async def test_a_stream_begins_with_acceptance_and_ends_with_one_finish_reason(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        messages = [message async for message in read(service, request_of("r", max_tokens=6))]
        assert messages[0].events == ()
        assert [event.finish_reason for message in messages for event in message.events if event.finish_reason] == [
            FinishReason.LENGTH
        ]
        assert messages[-1].events[-1].finish_reason is FinishReason.LENGTH
        assert {message.replica_id for message in messages} == {"replica-1"}
        assert messages[0].load is not None


async def test_text_and_ids_of_all_events_add_up_to_the_answer(factory: FakeFactory) -> None:
    request = request_of("r", max_tokens=20)
    async with running(small_config(), factory) as service:
        answered = await answer(service, request)
    assert answered.token_ids() == oracle(request)
    assert answered.text() == text_of(oracle(request))
    assert answered.end().num_output_tokens == 20


async def test_the_call_says_the_first_token_and_later_ones_coalesce_while_no_poll_comes(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service, open_call(service, request_of("r", max_tokens=30)) as call:
        first = await anext(call)
        assert [len(event.token_ids) for event in first.events] == [1]
        over = asyncio.ensure_future(anext(call, None))
        await settled(service)
        (rest,) = (await anext(service.news(""))).news
        assert (rest.request_id, [len(event.token_ids) for event in rest.events]) == ("r", [29])
        assert rest.events[0].finish_reason is FinishReason.LENGTH
        assert await over is None


async def test_no_poll_tells_what_the_call_has_yet_to_say(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service, open_call(service, request_of("r", max_tokens=6)) as call:
        await settled(service)
        polling = asyncio.ensure_future(anext(service.news("")))
        first = await anext(call)
        assert [len(event.token_ids) for event in first.events] == [6]
        assert await anext(call, None) is None
        assert not polling.done()
        polling.cancel()


async def test_a_call_that_ends_with_its_first_news_needs_no_poll(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        messages = [message async for message in service.submit(request_of("r", n=3, temperature=1.0, max_tokens=1))]
        assert [sorted(event.index for event in message.events) for message in messages] == [[], [0, 1, 2]]
        assert {event.finish_reason for event in messages[1].events} == {FinishReason.LENGTH}


async def test_an_abort_before_the_first_token_is_the_first_news(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service, open_call(service, request_of("r", num_prompt=90)) as call:
        service.abort("r")
        assert [event.finish_reason for event in (await anext(call)).events] == [FinishReason.ABORT]
        assert await anext(call, None) is None


async def test_the_call_of_a_request_stays_open_until_its_last_news_were_fetched(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service, open_call(service, request_of("r")) as call:
        await anext(call)
        over = asyncio.ensure_future(anext(call, None))
        await settled(service)
        await asyncio.sleep(0)
        assert not over.done()
        while not [
            event for news in (await anext(service.news(""))).news for event in news.events if event.finish_reason
        ]:
            pass
        assert await over is None


async def test_finished_streams_that_nobody_fetches_are_dropped_and_their_calls_end(factory: FakeFactory) -> None:
    config = small_config(lease_timeout_s=0.3)
    async with running(config, factory) as service, open_call(service, request_of("r")) as call:
        await anext(call)
        assert await anext(call, None) is None
        assert (await anext(service.news(""))).news == ()
        assert (await answer(service, request_of("r"))).end().finish_reason is FinishReason.LENGTH


async def test_an_id_whose_last_news_were_not_fetched_is_refused(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service, open_call(service, request_of("r")):
        await settled(service)
        async with open_call(service, request_of("r"), FinishReason.REJECTED):
            pass


async def test_a_refusal_is_the_only_message_and_carries_the_reason(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", num_prompt=500))
        assert answered.num_messages == 1
        error = answered.end().error
        assert error is not None
        assert error.code == "context_length_exceeded"
        assert answered.end().finish_reason is FinishReason.REJECTED
        assert sample(service, "request_success_total", finished_reason="rejected") == 1


async def test_the_queue_s_bound_holds_and_is_a_refusal(factory: FakeFactory) -> None:
    config = small_config(max_num_queued_seqs=2)
    async with running(config, factory) as service:
        answers = await asyncio.gather(*(answer(service, request_of(f"r{i}", max_tokens=40)) for i in range(10)))
    reasons = [answered.end().finish_reason for answered in answers]
    assert reasons.count(FinishReason.REJECTED) >= 4
    assert set(reasons) == {FinishReason.REJECTED, FinishReason.LENGTH}
    codes = {answered.end().error.code for answered in answers if answered.end().error}  # type: ignore[union-attr]
    assert codes == {"queue_full"}


async def test_an_idle_replica_takes_a_request_of_more_answers_than_its_queue_holds(factory: FakeFactory) -> None:
    async with running(small_config(max_num_queued_seqs=2), factory) as service:
        answered = await answer(service, request_of("r", n=8, max_tokens=3))
        assert [answered.end(index).finish_reason for index in range(8)] == [FinishReason.LENGTH] * 8


async def test_closing_the_call_frees_everything_and_updates_the_gauges(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        async with open_call(service, request_of("r", num_prompt=40, max_tokens=80)):
            assert service.load().num_running == 1
        await settled(service)
        assert_quiet(service)
        assert sample(service, "step_tokens_total", kind="decode") == 0, "the engine went on"
        assert sample(service, "request_success_total", finished_reason="abort") == 1


async def test_abort_ends_the_stream_and_is_idempotent(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        stream = read(service, request_of("r", max_tokens=80))
        await anext(stream)
        for _ in range(2):
            service.abort("r")
        last = [event async for message in stream for event in message.events][-1]
        assert last.finish_reason is FinishReason.ABORT
        service.abort("r")
        service.abort("never seen")
        await settled(service)
        assert_quiet(service)
        assert sample(service, "step_tokens_total", kind="decode") <= 2, "the engine went on"
        assert sample(service, "request_success_total", finished_reason="abort") == 1


async def test_an_abort_that_overtakes_its_request_still_ends_it(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        service.abort("late")
        answered = await answer(service, request_of("late", max_tokens=80))
        assert answered.end().finish_reason is FinishReason.ABORT
        again = await answer(service, request_of("late", max_tokens=3))
        assert again.end().finish_reason is FinishReason.LENGTH


async def test_an_abort_after_the_end_leaves_a_later_request_of_the_same_id_alone(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        await answer(service, request_of("r", max_tokens=3))
        service.abort("r")
        again = await answer(service, request_of("r", max_tokens=3))
        assert again.end().finish_reason is FinishReason.LENGTH


async def test_an_id_that_is_open_is_refused_and_the_open_stream_goes_on(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service, open_call(service, request_of("r", max_tokens=100)) as call:
        async with open_call(service, request_of("r"), FinishReason.REJECTED):
            pass
        await settled(service)
        assert [len(event.token_ids) for event in (await anext(call)).events] == [100]


async def test_a_lease_that_is_not_renewed_ends_its_stream_only(factory: FakeFactory) -> None:
    async with running(small_config(lease_timeout_s=1.0), factory) as service:
        streams = {name: read(service, request_of(name, max_tokens=100, lease=name)) for name in ("kept", "lost")}
        for stream in streams.values():
            await anext(stream)
        streams_of = service._streams
        for _ in range(3):
            streams_of.age_leases(0.4, 1.0)
            service.renew("kept", ["kept", "unknown"])
            service.renew("stranger", ["lost"])
        lost = [event async for message in streams["lost"] for event in message.events]
        kept = [event async for message in streams["kept"] for event in message.events]
        assert lost[-1].finish_reason is FinishReason.ABORT
        assert kept[-1].finish_reason is FinishReason.LENGTH


async def test_a_reader_too_far_behind_is_given_up_and_the_others_go_on(factory: FakeFactory) -> None:
    async with running(small_config(max_backlog_tokens=70), factory) as service:
        slow = request_of("slow", max_tokens=100, lease="slow")
        async with open_call(service, slow) as call:
            other = await answer(service, request_of("other", max_tokens=60, first=9))
            assert other.end().finish_reason is FinishReason.LENGTH
            await settled(service)
            rest = (await anext(call)).events
        assert sum(len(event.token_ids) for event in rest) == 71
        assert rest[-1].finish_reason is FinishReason.ABORT
        assert rest[-1].error is not None
        await settled(service)
        assert_quiet(service)


async def test_a_larger_backlog_lets_the_same_reader_live(factory: FakeFactory) -> None:
    async with running(small_config(max_backlog_tokens=200), factory) as service:
        async with open_call(service, request_of("slow", max_tokens=100)) as call:
            await settled(service)
            rest = (await anext(call)).events
        assert rest[-1].finish_reason is FinishReason.LENGTH


async def test_the_books_balance_over_every_kind_of_end(tmp_path: Path) -> None:
    factory = FakeFactory(tmp_path, faults={"poison_token": 77, "eos_ratio": 0.02})
    requests = [request_of(f"ok{i}", max_tokens=5 + i, first=i) for i in range(8)]
    requests += [request_of("eos", max_tokens=100, ignore_eos=False), request_of("poison", prompt_ids=(77, 1))]
    requests += [request_of("long", num_prompt=300), request_of("n", n=3, temperature=1.0, max_tokens=4, seed=1)]
    async with running(small_config(), factory) as service:
        answers = await asyncio.gather(*(answer(service, request) for request in requests))
        async with open_call(service, request_of("aborted", max_tokens=50)):
            pass
        await settled(service)
        assert_quiet(service)
        ends = {r.value: sample(service, "request_success_total", finished_reason=r.value) for r in FinishReason}
        assert sum(ends.values()) == sum(request.n for request in requests) + 1
        seen = [a.end(i).finish_reason for a, r in zip(answers, requests, strict=True) for i in range(_num_ends(a, r))]
        assert {"poison": seen[9], "long": seen[10]} == {"poison": FinishReason.ERROR, "long": FinishReason.REJECTED}
        seen.append(FinishReason.ABORT)
        assert ends == {reason.value: float(seen.count(reason)) for reason in FinishReason}
        usage = sum(len(a.token_ids(i)) for a, r in zip(answers, requests, strict=True) for i in range(r.n))
        assert sample(service, "generation_tokens_total") - usage in (0, 1, 2)
        with_tokens = sum(1 for a, r in zip(answers, requests, strict=True) for i in range(r.n) if a.token_ids(i))
        assert sample(service, "time_to_first_token_seconds_count") - with_tokens in (0, 1)
        assert sample(service, "e2e_request_latency_seconds_count") == ends["stop"] + ends["length"]


async def test_leases_are_watched_without_any_call(factory: FakeFactory) -> None:
    async with running(small_config(lease_timeout_s=0.3), factory, in_thread=True) as service:
        stuck = service._streams.open(request_of("stuck", lease="ingress-1"))
        async with asyncio.timeout(5):
            while not stuck.finished:
                await stuck.known()
        assert stuck.answers[0].finish_reason is FinishReason.ABORT
