"""Taking blocks back: what it costs, and how the loser returns."""

from __future__ import annotations

import pytest

from replica.request import FinishReason
from tests.unit.scheduler.rig import World, chunks, request, world


def crowded() -> World:
    """Two sequences of 8 + 1 tokens in 5 blocks of 4: the next block boundary is one too many."""
    w = world(num_blocks=5, max_num_batched_tokens=16, enable_prefix_caching=False)
    w.add(request([5] * 7, 8))
    w.add(request([6] * 7, 8))
    assert chunks(w.step()) == {0: 7, 1: 7}
    assert chunks(w.step()) == {0: 1, 1: 1}
    return w


def test_the_newest_gives_all_its_blocks_back_and_leaves_the_plan() -> None:
    w = crowded()
    assert chunks(w.step()) == {0: 1}
    load = w.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_blocks_free) == (1, 1, 2)
    assert w.scheduler.timings(1).num_preemptions == 1
    assert w.scheduler.stats(None, 0.0, step_s=0, idle_s=0).num_preemptions == 1


def test_a_preempted_sequence_keeps_its_output_and_recomputes_prompt_and_output() -> None:
    w = crowded()
    received = list(w.ledger.books[1].received)
    while 1 not in chunks(plan := w.step()):
        assert w.ledger.books[1].received == received
    assert plan is not None and chunks(plan) == {1: 9}, "7 of the prompt and 2 of its output"
    assert (plan.num_recomputed_tokens, plan.num_prefill_tokens, plan.num_decode_tokens) == (8, 0, 1)
    assert plan.output_index == [2] and plan.joined[0].num_output_tokens == 2
    w.drain()
    w.check_outputs()


@pytest.mark.parametrize(("num_blocks", "num_waiting"), [(7, 1), (8, 0)])
def test_it_comes_back_only_when_its_whole_context_and_one_block_more_fit(num_blocks: int, num_waiting: int) -> None:
    """12 known tokens are 3 blocks, and one more makes 4; the other holds 4. Its chunk of 8 would need 2 only."""
    w = world(
        num_blocks=num_blocks,
        max_num_batched_tokens=9,
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
    )
    w.add(request([5] * 10, 30))
    w.add(request([6] * 11, 4))
    while not w.ledger.books[1].received:
        w.step()
    assert w.scheduler.num_running == 2 and len(w.ledger.books[0].received) == 2
    w.scheduler.preempt_newest()
    w.step()
    w.step()
    assert len(w.scheduler._state.batch.running[0].block_table) == 4
    assert w.scheduler.num_waiting == num_waiting


def test_it_returns_to_its_place_before_those_that_arrived_later() -> None:
    w = crowded()
    w.add(request([7], 1))
    order = []
    while w.scheduler.has_work:
        plan = w.step()
        assert plan is not None
        order += [joined.seq_id for joined in plan.joined]
    assert order == [1, 2]


def test_nobody_enters_in_a_step_that_preempted_however_small() -> None:
    w = world(num_blocks=6, max_num_batched_tokens=16, enable_prefix_caching=False)
    for _ in range(2):
        w.add(request([5] * 7, 30, ignore_eos=True))
    for _ in range(6):
        assert w.scheduler.num_running in (0, 2)
        w.step()
    w.add(request([7], 1))
    assert chunks(w.step()) == {0: 1}, "the other lost its 3 blocks, of which 2 are free"
    by_reason = w.scheduler.stats(None, 0.0, step_s=0, idle_s=0).num_waiting_by_reason
    assert by_reason["blocks"] == 2
    assert chunks(w.step()) == {0: 1, 2: 1}, "one step later it may pass the one that waits for more"


def test_its_own_cached_blocks_spare_it_recomputing() -> None:
    w = world(num_blocks=20)
    w.add(request([5] * 7, 8))
    w.add(request(list(range(10, 19)), 8))
    w.step()
    w.scheduler.preempt_newest()
    w.step()
    plan = w.step()
    assert chunks(plan) == {0: 1, 1: 2}, "8 of 10 known tokens were still cached"
    assert plan is not None and plan.num_recomputed_tokens == 1


def test_preempting_the_newest_on_demand_shrinks_the_next_step() -> None:
    w = world()
    for _ in range(3):
        w.add(request([5], 9))
    w.step()
    assert w.scheduler.preempt_newest()
    assert chunks(w.step()) == {0: 1, 1: 1}
    assert chunks(w.step()) == {0: 1, 1: 1, 2: 2}
    assert [w.scheduler.preempt_newest() for _ in range(3)] == [True, True, False], "never the last one"


def test_a_preempted_sequence_has_waited_since_its_preemption() -> None:
    w = world()
    w.add(request([5], 9))
    w.add(request([6], 9))
    w.now_s = 100.0
    w.step()
    w.scheduler.preempt_newest()
    assert w.scheduler.stats(None, 102.5, step_s=0, idle_s=0).oldest_waiting_s == 2.5


def test_a_sequence_that_makes_room_has_waited_since_that_plan() -> None:
    w = world(num_blocks=3, block_size=2)
    w.add(request([5, 5], 4, ignore_eos=True))
    w.add(request([6, 6], 4, ignore_eos=True))
    w.step()
    w.now_s = 100.0
    w.step()
    assert (w.scheduler.num_running, w.scheduler.num_waiting) == (1, 1)
    assert w.scheduler.stats(None, 101.0, step_s=0, idle_s=0).oldest_waiting_s == 1.0


def test_a_token_in_flight_reaches_a_sequence_that_was_preempted_meanwhile() -> None:
    w = world()
    w.add(request([5], 9))
    w.add(request([6], 9))
    w.step()
    w.plan()
    w.scheduler.preempt_newest()
    assert w.commit().seq_ids == [0, 1]
    w.drain()
    w.check_outputs()


def test_a_sequence_whose_token_is_in_flight_does_not_enter_before_that_token_is_known() -> None:
    w = world()
    w.add(request([5], 9))
    w.add(request([6], 9))
    w.step()
    w.plan()
    w.scheduler.preempt_newest()
    assert chunks(w.plan()) == {0: 1}
    w.rollback(1)
    assert chunks(w.plan()) == {0: 1}
    w.commit()
    assert chunks(w.plan()) == {0: 1, 1: 3}
    w.drain()
    w.check_outputs()


def test_a_sequence_ends_from_the_queue_when_its_last_token_was_in_flight() -> None:
    w = world()
    tokens, _ = w.model.alone(request([6], 9), 0)
    w.add(request([5], 9))
    w.add(request([6], 9, stop_token_ids=(tokens[1],)))
    w.step()
    w.plan()
    w.scheduler.preempt_newest()
    assert w.commit().finish_reasons == [None, FinishReason.STOP]
    assert w.scheduler.num_waiting == 0
    w.drain()
    w.ledger.check_finished()


def test_under_overlap_blocks_of_an_ending_sequence_are_awaited_instead_of_preempting() -> None:
    w = world(num_blocks=5, enable_prefix_caching=False)
    w.add(request([5] * 7, 9))
    w.add(request([6] * 7, 2))
    w.add(request([7], 3))
    w.step()
    w.plan()
    assert chunks(w.plan()) == {2: 1}, "the first lacks a block; the second gives two back at its coming commit"
    w.commit()
    assert chunks(w.plan()) == {0: 1}
    w.drain()
    w.check_outputs()
    assert [w.scheduler.timings(seq_id).num_preemptions for seq_id in range(3)] == [0, 0, 0]


def test_a_prompt_that_awaits_blocks_of_an_ending_sequence_goes_on_after_its_commit() -> None:
    few = {"max_num_batched_tokens": 15, "long_prefill_token_threshold": 8, "scheduler_reserve_full_isl": False}
    w = world(num_blocks=5, enable_prefix_caching=False, **few)
    w.add(request([5] * 14, 3))
    w.add(request([6] * 7, 2))
    assert chunks(w.step()) == {0: 8, 1: 7}
    assert chunks(w.plan()) == {1: 1, 0: 4}
    assert w.plan() is None, "the first lacks a block; the second gives two back at its coming commit"
    w.commit()
    assert chunks(w.step()) == {0: 2}
    w.drain()
    w.check_outputs()


def test_who_was_preempted_on_demand_enters_at_once_when_nobody_runs_any_more() -> None:
    w = world()
    for _ in range(2):
        w.add(request([5], 9))
    w.step()
    assert w.scheduler.preempt_newest()
    w.abort(0)
    assert chunks(w.step()) == {1: 2}
