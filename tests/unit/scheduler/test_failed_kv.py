"""What becomes of the KV of a sequence that failed: nobody starts from it again."""

from __future__ import annotations

import pytest

from replica.scheduler.plan import StepResult
from tests.unit.scheduler.rig import request, world


@pytest.mark.parametrize("preempted", [False, True])
def test_nothing_that_a_failed_sequence_computed_is_ever_reused(preempted: bool) -> None:
    """Non-finite values show only where a row samples: blocks named in earlier steps have them, too."""
    w = world(max_num_batched_tokens=9)
    w.add(request([7], 9))
    w.step()
    w.add(request([5] * 20, 4))
    for _ in range(3):
        w.step()
    plan = w.scheduler.plan(0.0)
    assert plan is not None and plan.seq_ids == [0, 1]
    assert w.scheduler.load().block_hashes_added
    if preempted:
        w.scheduler.preempt_newest()
        assert w.scheduler.load().num_blocks_cached > 0
    w.scheduler.commit(plan, StepResult(plan.step, [9, -1], {1: "non_finite_logits"}), 0.0)
    load = w.scheduler.load()
    assert (load.num_blocks_cached, load.num_blocks_free) == (0, load.num_blocks_total - 2)
    assert len(load.block_hashes_evicted) == 5
    w.scheduler.add(9, request([5] * 20, 4), 0, 0, 0.0)
    if preempted:
        w.scheduler.plan(0.0)  # admits nobody
    plan = w.scheduler.plan(0.0)
    assert plan is not None and (plan.seq_ids[1], plan.starts[1]) == (9, 0)


def test_a_failure_drops_the_shared_prefix_too_and_its_other_holders_go_on() -> None:
    w = world()
    w.add(request([5] * 9, 9))
    w.step()
    w.add(request([5] * 9, 9))
    plan = w.scheduler.plan(0.0)
    assert plan is not None and plan.starts == [9, 8]
    w.scheduler.commit(plan, StepResult(plan.step, [9, -1], {1: "non_finite_logits"}), 0.0)
    assert w.scheduler.num_running == 1
    w.scheduler.add(9, request([5] * 9, 9), 0, 0, 0.0)
    plan = w.scheduler.plan(0.0)
    assert plan is not None and plan.starts == [10, 0]
    w.scheduler.commit(plan, StepResult(plan.step, [9, 9]), 0.0)
    w.scheduler.abort(0)
    w.scheduler.abort(9)
    assert w.scheduler.block_pool.num_held == 0
