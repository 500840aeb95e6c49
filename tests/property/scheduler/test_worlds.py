"""Worlds in which schedulers of others deadlocked, thrashed, repeated themselves or died."""

from __future__ import annotations

import random

import pytest

from replica.config import SchedulerConfig
from replica.model.fake import FakeModel
from replica.request import FinishReason
from tests.property.scheduler.world import VOCAB, World, request, shape_of


def world(num_blocks: int, block_size: int, **settings: object) -> World:
    defaults: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = SchedulerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
    return World(config, FakeModel(shape_of(num_blocks, block_size)))


def preemptions(w: World) -> int:
    return sum(w.scheduler.timings(seq_id).num_preemptions for seq_id in w.ledger.books)


def finish(w: World) -> None:
    w.drain()
    w.ledger.check_finished()
    w.check_outputs()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", range(7, 16))
def test_two_long_outputs_in_one_pool_equal_what_each_gives_alone(num_blocks: int, caching: bool) -> None:
    """From a pool that just fits one up to a pool that fits both."""
    w = world(num_blocks, 16, enable_prefix_caching=caching)
    for prompt in ([5, 6, 7, 8, 9], [10, 11, 12, 13, 14]):
        w.add(request(prompt, 5 + 16 * 6, ignore_eos=True))
    finish(w)
    assert (preemptions(w) > 0) == (num_blocks < 14)


@pytest.mark.parametrize("length", [13, 14, 15])
def test_a_preempted_context_that_fills_the_whole_pool_finishes(length: int) -> None:
    w = world(4, 4, max_num_batched_tokens=9, watermark=0.5, scheduler_reserve_full_isl=False)
    w.add(request([5] * 2, 12, ignore_eos=True))
    w.step()
    w.add(request([6] * length, 2, ignore_eos=True))
    w.scheduler.set_budgets(watermark=0.0)
    finish(w)
    assert w.scheduler.timings(1).num_preemptions > 0


def test_a_victim_whose_context_needs_more_than_is_left_without_its_shared_prefix_finishes() -> None:
    prefix = list(range(10, 34))
    for num_blocks in range(8, 13):
        w = world(num_blocks, 4, watermark=0.0)
        w.add(request([*prefix, 5], 8, ignore_eos=True))
        w.step()
        w.add(request([*prefix, 6], 8, ignore_eos=True))
        w.add(request([*prefix, 7], 8, ignore_eos=True))
        finish(w)


def test_two_long_prompts_admitted_by_chunk_alone_finish() -> None:
    w = world(10, 4, max_num_seqs=2, max_num_batched_tokens=8, scheduler_reserve_full_isl=False)
    for token in (5, 6):
        w.add(request([token] * 30, 9, ignore_eos=True))
    finish(w)
    assert preemptions(w) > 0


@pytest.mark.parametrize("caching", [False, True])
def test_long_requests_that_do_not_fit_together_do_not_thrash(caching: bool) -> None:
    w = world(40, 16, max_num_batched_tokens=64, enable_prefix_caching=caching)
    for token in range(5, 9):
        w.add(request([token] * 384, 200, ignore_eos=True))
    computed = useful = 0
    while w.scheduler.has_work:
        plan = w.step()
        assert plan is not None
        computed += len(plan.token_ids)
        useful += plan.num_prefill_tokens + plan.num_decode_tokens
    w.check_outputs()
    assert computed < 1.5 * useful
    assert max(w.scheduler.timings(seq_id).num_preemptions for seq_id in w.ledger.books) <= 3


def test_a_generation_that_outgrows_the_pool_alone_ends_with_length_and_never_preempts_itself() -> None:
    w = world(4, 4)
    w.add(request([5] * 10, 100, ignore_eos=True))
    finish(w)
    assert w.ledger.books[0].end is FinishReason.LENGTH
    assert len(w.ledger.books[0].received) == 7, "16 slots hold 10 + 6 tokens; the seventh needs none"
    assert preemptions(w) == 0


def test_choices_of_one_request_that_do_not_fit_together_finish() -> None:
    w = world(6, 4)
    for index in range(4):
        w.scheduler.add(index, request([5] * 10, 12, n=4), index, index, 0.0)
        w.ledger.arrived(index, request([5] * 10, 12, n=4))
        w.seeds[index] = index
    finish(w)


def fuzz(num_requests: int, oom_every: int = 0) -> None:
    """Many short-lived requests in a small pool: prompts around block boundaries, half of them sharing a prefix."""
    rng = random.Random(17)
    shared = [rng.randrange(3, VOCAB) for _ in range(100)]
    w = world(24, 8, max_num_seqs=16, max_num_batched_tokens=40)
    w.model.oom_every = oom_every
    w.scheduler._check_always = False
    for i in range(num_requests):
        length = rng.randint(7, 49)
        prompt = shared[:length] if i % 2 else [rng.randrange(3, VOCAB) for _ in range(length)]
        w.add(request(prompt, rng.randint(1, 40), temperature=1.0), seed=i)
        while w.scheduler.num_waiting + w.scheduler.num_running > 32:
            w.step_survivably()
        if i % 50 == 0:
            w.scheduler.check_invariants()
    w.drain_survivably()
    finish(w)


@pytest.mark.parametrize("oom_every", [0, 7])
def test_a_thousand_short_requests_in_a_small_pool_give_what_each_gives_alone(oom_every: int) -> None:
    fuzz(1_000, oom_every)


@pytest.mark.slow
@pytest.mark.parametrize("oom_every", [0, 7])
def test_ten_thousand_short_requests_in_a_small_pool_give_what_each_gives_alone(oom_every: int) -> None:
    """Every seventh step fails for lack of device memory: it is rolled back, and the newest gives its blocks back."""
    fuzz(10_000, oom_every)


def test_prefill_of_one_long_prompt_never_stops_running_decodes() -> None:
    w = world(200, 4, max_num_batched_tokens=16)
    for _ in range(7):
        w.add(request([5], 100, ignore_eos=True))
    w.step()
    w.add(request([6] * 400, 4, ignore_eos=True))
    for _ in range(45):
        plan = w.step()
        assert plan is not None and plan.seq_ids[:7] == list(range(7)) and plan.num_tokens[:7] == [1] * 7
    finish(w)


def test_aborts_at_any_moment_of_long_prefills_leak_nothing() -> None:
    rng = random.Random(3)
    w = world(60, 4, max_num_batched_tokens=12)
    live: list[int] = []
    for _ in range(200):
        seq_id = w.add(request([rng.randrange(3, VOCAB) for _ in range(60)], 5))
        assert seq_id is not None
        live.append(seq_id)
        for _ in range(rng.randint(0, 3)):
            w.step()
        if rng.random() < 0.8 and live:
            w.abort(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.5 and not w.in_flight:
            w.plan()
    finish(w)
