"""One step: who gets how many tokens."""

from __future__ import annotations

import pytest

from replica.request import FinishReason
from replica.scheduler.plan import PENDING_TOKEN
from tests.unit.scheduler.rig import chunks, request, world


def test_a_prompt_is_cut_to_the_budget_and_samples_where_the_gap_closes() -> None:
    w = world(max_num_batched_tokens=10)
    w.add(request(list(range(10, 35)), 2))
    plans = [w.step() for _ in range(4)]
    assert [chunks(p) for p in plans] == [{0: 10}, {0: 10}, {0: 5}, {0: 1}]
    assert [p.samples for p in plans if p] == [[False], [False], [True], [True]]
    assert [p.num_logits for p in plans if p] == [[0], [0], [1], [1]]
    assert [p.starts for p in plans if p] == [[0], [10], [20], [25]]
    assert [p.output_index for p in plans if p] == [[0], [0], [0], [1]]
    assert [p.token_ids for p in plans if p][1] == list(range(20, 30))


def test_decodes_come_first_and_a_long_prompt_takes_what_they_leave() -> None:
    w = world(max_num_batched_tokens=10)
    for _ in range(3):
        w.add(request([5], 50))
    w.step()
    w.add(request([6] * 40, 5))
    plan = w.step()
    assert chunks(plan) == {0: 1, 1: 1, 2: 1, 3: 7}
    assert plan is not None and list(plan.seq_ids) == [0, 1, 2, 3]
    assert (plan.num_decode_tokens, plan.num_prefill_tokens, plan.num_recomputed_tokens) == (3, 7, 0)


def test_the_two_limits_do_not_replace_each_other() -> None:
    w = world(max_num_seqs=2, max_num_batched_tokens=30)
    for _ in range(3):
        w.add(request([5, 6], 5))
    assert chunks(w.step()) == {0: 2, 1: 2}, "places run out while tokens are left"
    w = world(max_num_seqs=8, max_num_batched_tokens=9)
    for _ in range(3):
        w.add(request([5, 6, 7, 8], 5))
    assert chunks(w.step()) == {0: 4, 1: 4, 2: 1}, "tokens run out while places are left"


def test_mid_prefills_share_equally_and_the_share_that_one_leaves_goes_on() -> None:
    w = world(max_num_batched_tokens=30)
    w.add(request([5] * 33, 5))
    w.add(request([6] * 100, 5))
    w.add(request([7] * 100, 5))
    assert chunks(w.step()) == {0: 30}
    assert chunks(w.step()) == {0: 3, 1: 27}
    assert chunks(w.step()) == {0: 1, 1: 22, 2: 7}, "a quarter of 29 is kept for the one that waits"
    assert chunks(w.step()) == {0: 1, 1: 15, 2: 14}, "nobody waits: equal shares"


def test_what_nobody_waiting_can_use_goes_back_to_mid_prefills() -> None:
    w = world(num_blocks=30, max_num_seqs=2, max_num_batched_tokens=20)
    w.add(request([5] * 30, 5))
    w.add(request([6] * 30, 5))
    w.add(request([7] * 30, 5))
    assert chunks(w.step()) == {0: 20}
    assert chunks(w.step()) == {0: 10, 1: 10}
    assert chunks(w.step()) == {0: 1, 1: 19}, "no place for the third: nothing is kept for it"


def test_the_step_after_a_sequence_ends_by_length_computes_one_that_waited() -> None:
    w = world(max_num_seqs=2)
    for max_tokens in (2, 9, 9):
        w.add(request([5, 6], max_tokens))
    assert [chunks(w.step()) for _ in range(3)] == [{0: 2, 1: 2}, {0: 1, 1: 1}, {1: 1, 2: 2}]


def test_under_overlap_a_place_freed_by_length_is_taken_in_the_very_next_plan() -> None:
    w = world(max_num_seqs=2)
    for max_tokens in (2, 9, 9):
        w.add(request([5, 6], max_tokens))
    w.step()
    ending, following = w.plan(), w.plan()
    assert chunks(ending) == {0: 1, 1: 1}
    assert chunks(following) == {1: 1, 2: 2}
    assert following is not None and following.token_ids == [PENDING_TOKEN, 5, 6]
    assert following.left == [0] and [j.lane for j in following.joined] == [0], "the lane is handed on"
    assert w.scheduler.num_running == 3, "the ending one still holds its blocks"
    w.commit()
    assert w.scheduler.num_running == 2
    w.drain()
    w.check_outputs()


def test_under_overlap_the_row_of_one_that_turned_out_finished_is_dropped() -> None:
    w = world()
    tokens, _ = w.model.alone(request([5, 6], 9), 0)
    assert tokens[0] not in tokens[1:]
    w.add(request([5, 6], 9, stop_token_ids=(tokens[1],)))
    w.step()
    w.plan()
    late = w.plan()
    outcome = w.commit()
    assert outcome.finish_reasons == [FinishReason.STOP] and outcome.stop_reasons == [tokens[1]]
    assert chunks(late) == {0: 1}
    assert w.commit().seq_ids == []
    w.ledger.check_finished()


def test_static_columns_are_told_once_per_stay() -> None:
    w = world()
    w.add(request([5, 6], 3), seed=11)
    first, second = w.step(), w.step()
    assert first is not None and second is not None
    (joined,) = first.joined
    assert (joined.seq_id, joined.lane, joined.seed, joined.num_output_tokens) == (0, 0, 11, 0)
    assert second.joined == [] and second.left == []
    w.step()
    w.add(request([5, 6], 3))
    third = w.step()
    assert third is not None and third.left == [0] and [j.seq_id for j in third.joined] == [1]


def test_tokens_made_elsewhere_are_context_and_count_towards_the_limits() -> None:
    w = world()
    whole, _ = w.model.alone(request([5, 6], 6), 0)
    w.add(request([5, 6], 6, prior_output_ids=tuple(whole[:4])))
    plan = w.step()
    assert plan is not None and chunks(plan) == {0: 6} and plan.output_index == [4]
    assert plan.joined[0].num_output_tokens == 4
    w.drain()
    assert w.ledger.books[0].received == whole[4:]


def test_lowering_a_budget_applies_at_once_and_preempts_nobody() -> None:
    w = world(max_num_seqs=4)
    for _ in range(6):
        w.add(request([5, 6], 4))
    w.step()
    w.scheduler.set_budgets(max_num_seqs=2, max_num_batched_tokens=5)
    assert chunks(w.step()) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert w.scheduler.num_waiting == 2
    w.scheduler.set_budgets(max_num_batched_tokens=3)
    assert chunks(w.step()) == {0: 1, 1: 1, 2: 1}, "oldest first where not all fit"
    w.drain()
    w.check_outputs()
    assert w.scheduler.stats(None, 0.0, step_s=0, idle_s=0).num_preemptions == 0


def test_a_step_is_reported_with_the_budget_that_it_was_planned_under() -> None:
    w = world(max_num_seqs=4)
    w.add(request(list(range(20)), 4))
    plan = w.plan()
    w.scheduler.set_budgets(max_num_batched_tokens=5)
    assert w.scheduler.stats(plan, 0.0, step_s=0, idle_s=0).token_budget == 32
    assert w.scheduler.stats(None, 0.0, step_s=0, idle_s=0).token_budget == 5


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "watermark"])
def test_a_budget_never_rises_above_its_start_value(name: str) -> None:
    w = world(watermark=0.1)
    before = w.scheduler.config
    with pytest.raises(Exception, match=f"{name} = .* at most its start value"):
        w.scheduler.set_budgets(**{name: getattr(before, name) * 2})
    assert w.scheduler.config is before


def test_a_refused_change_changes_nothing() -> None:
    w = world(max_num_seqs=8, max_num_batched_tokens=32)
    with pytest.raises(Exception, match=r"max_num_batched_tokens = 8 .* at least max_num_seqs"):
        w.scheduler.set_budgets(watermark=0.0, max_num_batched_tokens=8)
    with pytest.raises(Exception, match="enable_prefix_caching = False is not allowed"):
        w.scheduler.set_budgets(enable_prefix_caching=False)
    assert w.scheduler.config == w.config
    w.scheduler.set_budgets(max_num_seqs=2, max_num_batched_tokens=3)
    w.scheduler.set_budgets(max_num_seqs=8, max_num_batched_tokens=32)
    assert w.scheduler.config == w.config
