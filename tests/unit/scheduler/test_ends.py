"""How sequences end: stops, lengths, failures, aborts, expiry, refusals; and steps that never happened."""

from __future__ import annotations

import pytest

from replica.errors import InvalidRequest, PromptTooLong, QueueFull
from replica.request import FinishReason
from replica.scheduler.plan import StepResult
from replica.scheduler.scheduler import Scheduler
from tests.unit.scheduler.rig import World, chunks, request, world


def forced(w: World, *tokens: int, **fields: object) -> tuple[FinishReason | None, int | None, int]:
    """Make the model say these tokens: (reason, stop reason, tokens taken)."""
    shape = w.model.shape
    scheduler = Scheduler(w.config, shape, check_invariants=True)
    scheduler.add(0, request([5, 6], 8, **fields), 0, 0, 0.0)
    for count, token in enumerate(tokens, 1):
        plan = scheduler.plan(0.0)
        assert plan is not None
        outcome = scheduler.commit(plan, StepResult(plan.step, [token]), 0.0)
        assert outcome.token_ids == [token]
        if outcome.finish_reasons != [None]:
            assert scheduler.num_running == scheduler.block_pool.num_held == 0
            return outcome.finish_reasons[0], outcome.stop_reasons[0], count
    return None, None, len(tokens)


@pytest.mark.parametrize(
    ("fields", "tokens", "end"),
    [
        ({}, (9, 1), (FinishReason.STOP, None, 2)),
        ({}, (9, 2), (FinishReason.STOP, None, 2)),
        ({}, (9,) * 8, (FinishReason.LENGTH, None, 8)),
        ({"ignore_eos": True}, (1, 2, 1, 2, 1, 2, 1, 2), (FinishReason.LENGTH, None, 8)),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, (1, 2), (FinishReason.STOP, 2, 2)),
        ({"stop_token_ids": (7,)}, (9, 7), (FinishReason.STOP, 7, 2)),
        ({"stop_token_ids": (1,)}, (1,), (FinishReason.STOP, 1, 1)),
        ({"min_tokens": 3}, (1, 1, 1, 1), (FinishReason.STOP, None, 4)),
        ({"min_tokens": 3, "stop_token_ids": (7,)}, (7, 7, 7, 7), (FinishReason.STOP, 7, 4)),
        ({}, (9,) * 7 + (1,), (FinishReason.STOP, None, 8)),
        ({}, (9,) * 7, (None, None, 7)),
    ],
)
def test_ends(fields: dict[str, object], tokens: tuple[int, ...], end: tuple[object, ...]) -> None:
    assert forced(world(), *tokens, **fields) == end


def test_the_model_length_ends_a_sequence() -> None:
    assert forced(world(max_model_len=5), 9, 9, 9) == (FinishReason.LENGTH, None, 3)


def test_a_context_that_outgrows_the_pool_ends_with_length() -> None:
    assert forced(world(num_blocks=1), 9, 9, 9) == (FinishReason.LENGTH, None, 3), "4 slots hold 2 + 2, the third"


def test_a_failed_row_ends_with_its_code_and_its_neighbours_go_on() -> None:
    w = world()
    for _ in range(3):
        w.add(request([5, 6, 7, 8, 9], 4))
    plan = w.scheduler.plan(0.0)
    assert plan is not None
    w.ledger.planned(plan)
    result = w.model.submit(plan).result()
    outcome = w.commit_result(plan, StepResult(plan.step, result.token_ids, {1: "non_finite_logits"}))
    assert outcome.finish_reasons == [None, FinishReason.ERROR, None]
    assert outcome.error_codes == [None, "non_finite_logits", None]
    assert outcome.token_ids[1] == -1
    w.drain()
    w.check_outputs()


def test_a_row_that_failed_mid_prefill_ends_too_and_its_chunk_is_never_reused() -> None:
    w = world(max_num_batched_tokens=9)
    w.add(request([5] * 20, 4))
    plan = w.scheduler.plan(0.0)
    assert plan is not None and plan.samples == [False]
    outcome = w.scheduler.commit(plan, StepResult(plan.step, [-1], {0: "step_failed"}), 0.0)
    assert (outcome.seq_ids, outcome.error_codes) == ([0], ["step_failed"])
    load = w.scheduler.load()
    assert load.num_blocks_free == load.num_blocks_total, "nothing of it is cached"


@pytest.mark.parametrize("when", ["waiting", "mid-prefill", "decoding", "planned", "planned ahead", "preempted"])
def test_abort_in_any_state_frees_everything_at_once_and_only_once(when: str) -> None:
    w = world(max_num_batched_tokens=9)
    w.add(request([6], 50))
    w.step()
    w.add(request([5] * 12, 9))
    steps = {"waiting": 0, "mid-prefill": 1}.get(when, 3)
    for _ in range(steps):
        w.step()
    for _ in range({"planned": 1, "planned ahead": 2}.get(when, 0)):
        w.plan()
    if when == "preempted":
        w.scheduler.preempt_newest()
    w.abort(1)
    assert (w.scheduler.num_running, w.scheduler.num_waiting) == (1, 0)
    assert w.scheduler.block_pool.num_held == len(w.scheduler._state.batch.running[0].block_table)
    w.drain()
    w.ledger.check_finished()
    w.check_outputs()


def test_an_aborted_chunk_that_was_not_computed_never_enters_the_prefix_cache() -> None:
    w = world()
    w.add(request([5] * 12, 9))
    w.plan()
    w.abort(0)
    w.commit()
    assert w.scheduler.load().num_blocks_cached == 0


def test_a_chunk_in_flight_enters_the_prefix_cache_only_at_its_commit() -> None:
    w = world(max_num_batched_tokens=9)
    w.add(request(list(range(10, 28)), 9))
    assert chunks(w.plan()) == {0: 9} and chunks(w.plan()) == {0: 9}
    w.commit()
    w.abort(0)
    assert w.scheduler.load().num_blocks_cached == 2, "8 of the first 9 tokens fill blocks"
    w.commit()
    assert w.scheduler.load().num_blocks_cached == 2


def test_abort_of_an_unknown_or_forgotten_sequence_is_no_error() -> None:
    w = world()
    assert not w.scheduler.abort(7)
    w.add(request([5], 1))
    w.drain()
    w.scheduler.forget(0)
    w.scheduler.forget(0)
    assert not w.scheduler.abort(0)


def test_expiry_ends_those_that_waited_too_long_but_never_preempted_ones() -> None:
    w = world(max_num_seqs=2, queue_timeout_s=5.0)
    for _ in range(3):
        w.add(request([5], 20))
    w.step()
    w.scheduler.preempt_newest()
    w.now_s = 3.0
    w.add(request([5], 20))
    w.now_s = 5.0
    assert w.expire() == []
    w.now_s = 5.1
    assert w.expire() == [2]
    w.now_s = 8.1
    assert w.expire() == [3]
    w.now_s = 1000.0
    assert w.expire() == []
    assert w.scheduler.num_waiting == 1


def test_an_input_that_can_never_fit_is_refused_with_the_largest_that_would() -> None:
    w = world(num_blocks=4, block_size=4)
    with pytest.raises(PromptTooLong, match="16 tokens, at most 15 fit"):
        w.scheduler.add(0, request([5] * 16, 1), 0, 0, 0.0)
    w.scheduler.add(0, request([5] * 15, 1), 0, 0, 0.0)
    with pytest.raises(PromptTooLong, match="16 tokens, at most 15 fit"):
        w.scheduler.add(1, request([5] * 10, 9, prior_output_ids=(5,) * 6), 0, 0, 0.0)
    with pytest.raises(PromptTooLong, match="10 tokens, at most 9 fit"):
        world(max_model_len=10).scheduler.add(0, request([5] * 10, 1), 0, 0, 0.0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "prior", "words"),
    [
        ([], 1, (), "empty"),
        ([5], 0, (), "max_tokens = 0"),
        ([5], 2, (5, 6), "max_tokens = 2 leaves nothing"),
        ([50], 1, (), "token id 50 is outside"),
        ([5], 3, (-1,), "token id -1 is outside"),
    ],
)
def test_impossible_requests_are_refused(
    prompt: list[int], max_tokens: int, prior: tuple[int, ...], words: str
) -> None:
    w = world()
    with pytest.raises(InvalidRequest, match=words):
        w.scheduler.add(0, request(prompt, max_tokens, prior_output_ids=prior), 0, 0, 0.0)
    assert not w.scheduler.has_work


def test_the_queue_is_bounded_in_sequences_and_in_tokens() -> None:
    w = world(max_num_queued_seqs=2, max_num_queued_tokens=100)
    w.scheduler.add(0, request([5] * 60, 1), 0, 0, 0.0)
    with pytest.raises(QueueFull, match="60 tokens wait, at most 100 may") as refusal:
        w.scheduler.add(1, request([5] * 41, 1), 0, 0, 4.0)
    assert refusal.value.retry_after_s == 4.0
    w.scheduler.add(1, request([5] * 40, 1), 0, 0, 0.0)
    with pytest.raises(QueueFull, match="2 sequences wait, at most 2 may"):
        w.scheduler.add(2, request([5], 1), 0, 0, 0.0)


def test_a_request_of_n_needs_n_places_in_the_queue_and_gets_all_or_none() -> None:
    w = world(max_num_queued_seqs=4)
    w.scheduler.add(0, request([5], 1), 0, 0, 0.0)
    with pytest.raises(QueueFull):
        w.scheduler.add(1, request([5], 1, n=4), 0, 0, 0.0)
    for index in range(3):
        w.scheduler.add(1 + index, request([5], 1, n=3), index, 0, 0.0)


def test_an_empty_queue_takes_any_request_that_fits_the_replica() -> None:
    w = world(max_num_queued_seqs=1, max_num_queued_tokens=5)
    w.scheduler.add(0, request([5] * 20, 1, n=2), 0, 0, 0.0)
    w.scheduler.add(1, request([5] * 20, 1, n=2), 1, 0, 0.0)
    assert w.scheduler.num_waiting == 2


def test_preempted_sequences_do_not_count_against_the_queue() -> None:
    w = world(max_num_queued_seqs=1)
    for _ in range(3):
        w.add(request([5], 9))
        w.step()
    w.scheduler.preempt_newest()
    w.scheduler.preempt_newest()
    w.scheduler.add(3, request([5], 1), 0, 0, 0.0)
    assert w.scheduler.num_waiting == 3


def test_a_step_rolled_back_is_planned_again_alike() -> None:
    w = world(max_num_batched_tokens=10)
    w.add(request([5], 9))
    w.step()
    w.add(request([6] * 12, 9))
    before = w.plan()
    w.rollback()
    after = w.plan()
    assert before is not None and after is not None
    assert (after.seq_ids, after.starts, after.num_tokens) == (before.seq_ids, before.starts, before.num_tokens)
    assert (after.token_ids, after.joined) == (before.token_ids, before.joined)
    w.drain()
    w.check_outputs()


def test_rolling_back_the_older_of_two_plans_takes_the_newer_with_it() -> None:
    w = world(max_num_seqs=2)
    for max_tokens in (2, 9, 9):
        w.add(request([5, 6], max_tokens))
    w.step()
    older, newer = w.plan(), w.plan()
    assert (chunks(older), chunks(newer)) == ({0: 1, 1: 1}, {1: 1, 2: 2})
    w.rollback(0)
    assert (w.scheduler.num_running, w.scheduler.num_waiting) == (2, 1), "the place is its owner's again"
    assert chunks(w.step()) == {0: 1, 1: 1}
    assert newer is not None
    w.scheduler.rollback(newer)
    w.drain()
    w.check_outputs()


def test_a_sequence_whose_last_step_was_rolled_back_keeps_its_lane() -> None:
    """What it sampled a step ago, and isn't committed yet, lies in that lane."""
    w = world()
    w.add(request([5], 1))
    w.add(request([6], 3))
    assert w.step() is not None
    middle, last = w.plan(), w.plan()
    assert middle is not None and last is not None and (middle.lanes, last.lanes) == ([1], [1])
    w.rollback(1)
    again = w.plan()
    assert again is not None and (again.lanes, again.joined, again.left) == ([1], [], [])
    w.drain()
    w.check_outputs()


def test_clock_readings_of_a_sequence() -> None:
    w = world(max_num_batched_tokens=9)
    w.add(request([5] * 12, 2))
    for w.now_s in (1.0, 2.0, 3.0):
        w.step()
    t = w.scheduler.timings(0)
    assert (t.queued_at_s, t.scheduled_at_s, t.first_token_at_s, t.finished_at_s) == (0.0, 1.0, 2.0, 3.0)
    w.scheduler.forget(0)
    with pytest.raises(KeyError):
        w.scheduler.timings(0)


def test_stats_and_load_follow_an_abort_without_a_step() -> None:
    w = world()
    w.add(request([5] * 40, 9))
    w.step()
    w.add(request([6] * 10, 9))
    load = w.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_prefill_tokens) == (1, 1, 10, 8)
    w.now_s = 2.5
    assert w.scheduler.stats(None, w.now_s, step_s=0, idle_s=0).oldest_waiting_s == 2.5
    w.abort(0)
    w.abort(1)
    stats = w.scheduler.stats(None, w.now_s, step_s=0.0, idle_s=1.0)
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_held, stats.oldest_waiting_s) == (0, 0, 0, 0.0)
    assert stats.num_tokens == 0 and stats.idle_s == 1.0
