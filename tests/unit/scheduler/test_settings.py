"""What the scheduler's settings say, in detail. Ranges are in tests/unit/test_every_setting.py."""

from __future__ import annotations

from typing import Any

import pytest

from replica.errors import SettingError
from tests.unit.scheduler.rig import World, chunks, joined, request, world


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    for chunked, first in ((True, {0: 1, 1: 1, 2: 18}), (False, {0: 1, 1: 1})):
        w = world(max_model_len=20, max_num_batched_tokens=20, max_num_seqs=4, enable_chunked_prefill=chunked)
        for _ in range(2):
            w.add(request([5], 2))
        w.step()
        w.add(request([6] * 19, 1))
        assert chunks(w.step()) == first
        w.drain()
        w.check_outputs()


def test_without_chunked_prefill_the_budget_must_hold_the_longest_prompt() -> None:
    with pytest.raises(SettingError, match=r"max_num_batched_tokens = 19 .* max_model_len = 20"):
        world(max_model_len=20, max_num_batched_tokens=19, enable_chunked_prefill=False)
    w = world(max_model_len=20, max_num_batched_tokens=30, enable_chunked_prefill=False)
    with pytest.raises(SettingError, match=r"max_num_batched_tokens = 19 .* max_model_len = 20"):
        w.scheduler.set_budgets(max_num_batched_tokens=19)
    assert w.scheduler.config == w.config


def test_without_chunked_prefill_a_rolled_back_prompt_is_planned_whole_again() -> None:
    w = world(max_model_len=20, max_num_batched_tokens=20, max_num_seqs=4, enable_chunked_prefill=False)
    w.add(request([5] * 15, 2))
    w.plan()
    w.rollback()
    w.add(request([6] * 4, 1))
    assert chunks(w.step()) == {0: 15, 1: 4}


@pytest.mark.parametrize(("threshold", "first"), [(0, {0: 1, 1: 24, 2: 7}), (6, {0: 1, 1: 18, 2: 6, 3: 6, 4: 1})])
def test_the_threshold_caps_a_chunk_while_others_can_use_the_budget(threshold: int, first: dict[int, int]) -> None:
    w = world(long_prefill_token_threshold=threshold)
    w.add(request([5], 9))
    w.step()
    w.add(request([6] * 100, 1))
    assert chunks(w.step()) == {0: 1, 1: 31}, "what nobody else can use ignores the cap"
    for prompt in ([7] * 40, [8] * 40, [9]):
        w.add(request(prompt, 1))
    assert chunks(w.step()) == first


@pytest.mark.parametrize(("limit", "entered"), [(1, [0]), (2, [0, 1]), (None, [0, 1, 2, 3])])
def test_partial_prefills_at_once_are_limited_and_the_next_is_not_passed(limit: int | None, entered: list[int]) -> None:
    w = world(long_prefill_token_threshold=3, max_num_partial_prefills=limit)
    for token in (5, 6, 7):
        w.add(request([token] * 60, 1))
    w.add(request([8], 1))
    plan = w.step()
    assert joined(plan) == entered
    stats = w.scheduler.stats(plan, 0.0, step_s=0, idle_s=0)
    assert stats.num_waiting_by_reason["long_prefill"] == 4 - len(entered)


def test_a_prompt_that_ends_in_its_first_step_is_no_partial_prefill() -> None:
    w = world(max_num_partial_prefills=1)
    for _ in range(3):
        w.add(request([5] * 10, 1))
    w.add(request([6] * 10, 1))
    assert joined(w.step()) == [0, 1, 2, 3]


@pytest.mark.parametrize(("limit", "first"), [(1, [0, 2, 3]), (2, [0, 1, 2, 3]), (None, [0, 1, 2, 3])])
def test_long_prompts_beyond_the_limit_are_passed_by_short_ones_in_order(limit: int | None, first: list[int]) -> None:
    w = world(long_prefill_token_threshold=8, max_long_partial_prefills=limit)
    w.add(request([5] * 60, 1))
    w.add(request([6] * 30, 1))
    w.add(request([7] * 3, 1))
    w.add(request([8] * 3, 1))
    plan = w.step()
    assert joined(plan) == first
    stats = w.scheduler.stats(plan, 0.0, step_s=0, idle_s=0)
    assert stats.num_waiting_by_reason["long_prefill"] == 4 - len(first)
    w.drain()
    w.check_outputs()


def test_short_prompts_get_their_part_of_the_budget_past_a_long_one_that_is_skipped() -> None:
    """The long prefill that runs could use every token, and so could the long prompt that heads the queue."""
    w = world(max_num_batched_tokens=20, long_prefill_token_threshold=30, max_long_partial_prefills=1)
    w.add(request([5] * 100, 1))
    w.step()
    w.add(request([6] * 100, 1))
    w.add(request([7] * 3, 1))
    assert chunks(w.step()) == {0: 17, 2: 3}


def test_small_requests_get_their_part_of_the_budget_past_a_head_that_waits_for_kv_space() -> None:
    w = world(num_blocks=30, max_num_batched_tokens=20)
    w.add(request([5] * 100, 1))
    w.step()
    w.add(request([6] * 100, 1))
    w.add(request([7] * 3, 1))
    assert chunks(w.step()) == {0: 17, 2: 3}


def test_skipped_long_prompts_keep_their_order_and_take_the_next_slot() -> None:
    w = world(max_num_batched_tokens=16, long_prefill_token_threshold=8, max_long_partial_prefills=1)
    for token in (5, 6, 7):
        w.add(request([token] * 30, 1))
    order = []
    while w.scheduler.has_work:
        order += joined(w.step())
    assert order == [0, 1, 2]


@pytest.mark.parametrize(("skip_s", "passed"), [(10.0, [2, 3, 4]), (2.0, [2, 3])])
def test_a_long_prompt_overtaken_for_long_enough_is_passed_by_nobody(skip_s: float, passed: list[int]) -> None:
    w = world(
        max_num_batched_tokens=12,
        long_prefill_token_threshold=4,
        max_long_partial_prefills=1,
        max_prefill_skip_s=skip_s,
    )
    w.add(request([5] * 90, 1))
    w.add(request([6] * 30, 1))
    w.step()
    w.now_s = 5.0
    entered = []
    for w.now_s in (5.0, 6.9, 7.0):
        w.add(request([7], 1))
        entered += joined(w.step())
    assert entered == passed, "it was first overtaken at 5.0, not when it began to wait"
    order = [*entered]
    while w.scheduler.has_work:
        order += joined(w.step())
    assert order.index(1) == len(passed), "then it is next"
    w.check_outputs()


def test_a_long_prompt_that_nobody_may_pass_stops_those_behind_it_also_from_behind_another_long_prompt() -> None:
    """0 holds the long slot. 1 lost its place to a preemption and is long now: it comes before 2 and wasn't passed."""
    w = world(
        max_num_batched_tokens=12,
        long_prefill_token_threshold=4,
        max_long_partial_prefills=1,
        max_prefill_skip_s=2.0,
        kv_bypass_s=0.0,
        enable_prefix_caching=False,
    )
    w.add(request([6] * 200, 1))
    w.add(request([5], 60, ignore_eos=True))
    for _ in range(6):
        w.step()
    w.add(request([7] * 30, 1))
    w.now_s = 1.0
    w.add(request([8], 1))
    assert joined(w.step()) == [3], "2 is overtaken"
    assert w.scheduler.preempt_newest()
    w.step()
    entered = []
    for w.now_s in (2.9, 3.0):
        w.add(request([8], 1))
        entered += joined(w.step())
    assert entered == [4]
    w.drain()
    w.check_outputs()


def kv_blocked(**settings: Any) -> World:
    """Sequence 0 holds 5 of 10 blocks; the head, 1, needs 6."""
    w = world(num_blocks=10, **settings)
    w.add(request([5] * 17, 30, ignore_eos=True))
    w.step()
    w.add(request([6] * 24, 1))
    assert joined(w.step()) == []
    return w


@pytest.mark.parametrize(("kv_bypass_s", "entered"), [(5.0, [2]), (0.0, [])])
def test_small_requests_may_pass_a_head_that_waits_for_kv_space(kv_bypass_s: float, entered: list[int]) -> None:
    w = kv_blocked(kv_bypass_s=kv_bypass_s, kv_bypass_blocks=2)
    w.add(request([7] * 4, 4))
    assert joined(w.step()) == entered


@pytest.mark.parametrize(("kv_bypass_blocks", "entered"), [(2, [3]), (3, [2, 3]), (0, [])])
def test_how_small_is_said_in_blocks_of_the_whole_demand(kv_bypass_blocks: int, entered: list[int]) -> None:
    w = kv_blocked(kv_bypass_blocks=kv_bypass_blocks)
    w.add(request([7] * 4, 5))
    w.add(request([8] * 4, 4))
    assert joined(w.step()) == entered


def test_the_bypass_ends_some_time_after_the_head_was_first_blocked() -> None:
    w = kv_blocked(kv_bypass_s=5.0)
    w.now_s = 4.9
    w.add(request([7], 1))
    assert joined(w.step()) == [2]
    w.now_s = 5.0
    w.add(request([7], 1))
    assert joined(w.step()) == []
    w.drain()
    w.check_outputs()


def test_small_requests_do_not_pass_a_long_prompt_that_nobody_may_pass_any_more() -> None:
    """Not even past an older head that waits for KV space. 0 is a long prefill, 1 the head, 2 the long prompt."""
    w = world(
        num_blocks=107,
        max_num_batched_tokens=20,
        long_prefill_token_threshold=30,
        max_long_partial_prefills=1,
        max_prefill_skip_s=10.0,
        kv_bypass_s=100.0,
        enable_prefix_caching=False,
    )
    w.add(request([5] * 400, 1))
    w.step()
    w.add(request([6] * 25, 9, ignore_eos=True))
    while not w.ledger.books[1].received:
        w.step()
    w.add(request([7] * 40, 1))
    w.step()
    w.scheduler.preempt_newest()
    w.step()
    entered = []
    for w.now_s in (5.0, 14.9, 15.0):
        w.add(request([8], 1))
        entered += joined(w.step())
    assert entered == [3, 4]
    w.drain()
    w.check_outputs()


@pytest.mark.parametrize(
    ("name", "start", "lower", "higher"),
    [
        ("long_prefill_token_threshold", 8, 4, 9),
        ("long_prefill_token_threshold", 8, 4, 0),
        ("max_num_partial_prefills", 3, 2, 4),
        ("max_num_partial_prefills", 3, 2, None),
        ("max_long_partial_prefills", 2, 1, 3),
    ],
)
def test_prefill_limits_change_live_but_never_above_their_start(
    name: str, start: int, lower: int, higher: int | None
) -> None:
    settings: dict[str, Any] = {"long_prefill_token_threshold": 8, "max_num_partial_prefills": 3, name: start}
    w = world(**settings)
    with pytest.raises(SettingError, match=f"{name} = {higher} .* at most its start value, {start}"):
        w.scheduler.set_budgets(**{name: higher})
    w.scheduler.set_budgets(**{name: lower})
    assert getattr(w.scheduler.config, name) == lower
