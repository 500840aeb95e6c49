"""The count of recomputed tokens against a naive one: every position that a sequence had KV for and computes again."""

from __future__ import annotations

from random import Random

import pytest

from tests.unit.scheduler.rig import request, world


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_every_position_computed_again_is_counted_once_each_time(seed: int, enable_prefix_caching: bool) -> None:
    """Whether the sequence computed it itself or found it in the cache: without the preemption it would still have
    it."""
    random = Random(seed)
    w = world(
        num_blocks=16,
        max_num_batched_tokens=12,
        enable_prefix_caching=enable_prefix_caching,
        scheduler_reserve_full_isl=False,
        watermark=0.0,
    )
    for _ in range(16):
        beginning = [7] * random.choice((0, 4, 8))
        w.add(request([*beginning, *(random.randrange(5, 50) for _ in range(random.randint(1, 14)))], 24))
    had: dict[int, set[int]] = {}
    expected = counted = 0
    while w.scheduler.has_work:
        plan = w.step()
        assert plan is not None
        for seq_id, start, num_tokens in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            positions = had.setdefault(seq_id, set())
            expected += len(positions.intersection(range(start, start + num_tokens)))
            positions.update(range(start + num_tokens))
        counted += plan.num_recomputed_tokens
    assert counted == expected > 20
    w.check_outputs()
