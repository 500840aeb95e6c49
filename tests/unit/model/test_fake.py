"""The fake model: wrong blocks change its output or are caught; it fails where it is told to."""

from __future__ import annotations

import pytest

from replica.model.api import ModelShape, OutOfDeviceMemory
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.plan import PENDING_TOKEN, JoinedSequence, StepPlan

SHAPE = ModelShape(4, 2, 50, 100, eos_token_ids=(1,))
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def plan_of(tokens: list[int], start: int, table: list[int], *, step: int = 1, joins: bool = True) -> StepPlan:
    return StepPlan(
        step=step,
        seq_ids=[7],
        lanes=[0],
        starts=[start],
        num_tokens=[len(tokens)],
        block_tables=[table],
        samples=[True],
        num_logits=[1],
        output_index=[start + len(tokens) - 3],
        token_ids=tokens,
        joined=[JoinedSequence(7, 0, GREEDY, 0, 0)] if joins else [],
    )


def expected(context: list[int]) -> int:
    return FakeModel(SHAPE).next_token(context, GREEDY, 0, len(context) - 3)


def test_a_token_depends_on_the_whole_context_as_the_blocks_hold_it() -> None:
    model = FakeModel(SHAPE)
    assert model.submit(plan_of([5, 6, 7], 0, [2, 0])).result().token_ids == [expected([5, 6, 7])]
    assert model.submit(plan_of([8], 3, [2, 0], joins=False)).result().token_ids == [expected([5, 6, 7, 8])]
    model.submit(plan_of([9, 9], 0, [2]))
    assert model.submit(plan_of([8], 3, [2, 0], joins=False)).result().token_ids == [expected([9, 9, 7, 8])]


def test_a_pending_token_is_what_its_lane_sampled_last() -> None:
    model = FakeModel(SHAPE)
    (first,) = model.submit(plan_of([5, 6, 7], 0, [2, 0])).result().token_ids
    late = model.submit(plan_of([PENDING_TOKEN], 3, [2, 0], joins=False))
    assert late.result().token_ids == [expected([5, 6, 7, first])]


def test_each_step_has_lists_of_its_own_and_no_later_step_changes_them() -> None:
    """The scheduler plans and reports with the lists that it was given."""
    model = FakeModel(SHAPE)
    first = model.submit(plan_of([5, 6, 7], 0, [2, 0])).result()
    second = model.submit(plan_of([8], 3, [2, 0], joins=False)).result()
    assert first.token_ids is not second.token_ids and first.failed_rows is not second.failed_rows
    assert (first.token_ids, second.token_ids) == ([expected([5, 6, 7])], [expected([5, 6, 7, 8])])


def test_reading_a_slot_that_was_never_written_or_was_poisoned_is_caught() -> None:
    model = FakeModel(SHAPE)
    with pytest.raises(AssertionError, match="never written"):
        model.submit(plan_of([8], 3, [2, 0]))
    model.submit(plan_of([5, 6, 7], 0, [2, 0]))
    model.poison([2])
    with pytest.raises(AssertionError, match="never written"):
        model.submit(plan_of([8], 3, [2, 0]))


def test_a_row_in_the_lane_of_another_sequence_is_caught() -> None:
    model = FakeModel(SHAPE)
    stranger = plan_of([5], 0, [2])
    stranger.joined[0] = JoinedSequence(8, 0, GREEDY, 0, 0)
    with pytest.raises(AssertionError, match="lane of sequence 8"):
        model.submit(stranger)


def test_faults_come_when_told_and_late_ones_with_the_result() -> None:
    assert FakeModel(SHAPE, nan_token=6).submit(plan_of([5, 6], 0, [2])).result().failed_rows == {
        0: "non_finite_logits"
    }
    with pytest.raises(RuntimeError, match="told to raise"):
        FakeModel(SHAPE, poison_token=6).submit(plan_of([5, 6], 0, [2]))
    model = FakeModel(SHAPE, oom_every=2, late=True)
    model.submit(plan_of([5, 6], 0, [2])).result()
    step = model.submit(plan_of([5, 6], 0, [2]))
    with pytest.raises(OutOfDeviceMemory):
        step.result()


def test_alone_ends_where_a_replica_ends() -> None:
    model = FakeModel(SHAPE)
    prompt = (5, 6, 7)
    tokens, reason = model.alone(GenerationRequest("r", prompt, GREEDY), 0)
    assert reason is FinishReason.LENGTH and len(tokens) == 6, "8 slots, and the last token needs none"
    rest, _ = model.alone(GenerationRequest("r", prompt, GREEDY, prior_output_ids=tuple(tokens[:2])), 0)
    assert rest == tokens[2:]
    stop = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(tokens[2],))
    assert model.alone(GenerationRequest("r", prompt, stop), 0) == (tokens[:3], FinishReason.STOP)
    sampled = SamplingParams(max_tokens=9, temperature=1.0)
    assert model.alone(GenerationRequest("r", prompt, sampled), 1) != model.alone(
        GenerationRequest("r", prompt, sampled), 2
    )
