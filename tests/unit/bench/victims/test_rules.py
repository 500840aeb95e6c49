"""Each victim rule picks what its name says; and whatever rule there is, the scheduler's promises hold."""

from __future__ import annotations

import pytest

from bench.victims.rules import RULES
from replica.scheduler.block_pool import BlockPool
from replica.scheduler.preemption import SPARED_AFTER
from replica.scheduler.sequence import Sequence
from tests.unit.scheduler.rig import request, world


def made(
    number: int, pool: BlockPool, *, computed: int, output: int, left: int, gap: int, shared: list[int]
) -> Sequence:
    """A running sequence in blocks of 4: `shared` ones first, then its own."""
    prompt = [5] * (computed - output + gap)
    seq = Sequence(
        number,
        request(prompt, output + left),
        0,
        0,
        arrival=number,
        queue_key=(float(number), number),
        max_len=len(prompt) + output + left,
        is_small=False,
        eos_token_ids=(),
        now_s=0.0,
    )
    seq.tokens = [*prompt, *([6] * output)]
    seq.num_computed = seq.num_scheduled = computed
    pool.hold(shared) if shared else None
    seq.block_table = shared + pool.take(-(-computed // 4) - len(shared))
    seq.num_slots = len(seq.block_table) * 4
    return seq


@pytest.mark.parametrize(
    ("rule", "victim"),
    [
        ("newest", 4),
        ("newest-mid-prefill", 3),
        ("newest-any-mid-prefill", 3),
        ("last-admitted", 2),
        ("newest-with-blocks", 1),
        ("newest-little-progress", 3),
        ("fewest-computed", 3),
        ("least-recompute", 4),
        ("least-recompute-per-block", 2),
        ("most-blocks", 1),
        ("farthest-from-end", 3),
        ("second-oldest", 1),
    ],
)
def test_a_rule_picks_what_its_name_says(rule: str, victim: int) -> None:
    pool = BlockPool(100)
    oldest = made(0, pool, computed=40, output=1, left=9, gap=1, shared=[])
    prefix = oldest.block_table
    running = [
        made(1, pool, computed=80, output=40, left=5, gap=1, shared=[]),
        made(2, pool, computed=37, output=33, left=7, gap=1, shared=[]),
        made(3, pool, computed=24, output=0, left=50, gap=20, shared=[]),
        made(4, pool, computed=44, output=40, left=2, gap=1, shared=prefix[:6]),
    ]
    pool.name(running[2].block_table[0])
    for admission, number in enumerate((4, 1, 3, 2)):
        running[number - 1].admission = admission + 1
    assert RULES[rule](running[::-1], pool).seq_id == victim


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_under_any_rule_everyone_ends_with_its_own_tokens_and_the_oldest_never_loses(
    rule: str, enable_prefix_caching: bool
) -> None:
    w = world(
        num_blocks=18,
        max_num_batched_tokens=12,
        enable_prefix_caching=enable_prefix_caching,
        scheduler_reserve_full_isl=False,
        watermark=0.0,
    )
    w.scheduler._state.victim_rule = RULES[rule]
    for i in range(12):
        w.add(request([5 + i % 3] * (3 + i % 7), 20, ignore_eos=True))
    num_preempted = 0
    while w.scheduler.has_work:
        running = [seq.seq_id for seq in w.scheduler._state.batch.running]
        assert w.step() is not None
        waiting = w.scheduler._state.waiting.returned
        assert not running or running[0] not in waiting, "the oldest lost its blocks"
        num_preempted = max(num_preempted, len(waiting))
    assert num_preempted > 0
    counts = [w.scheduler.timings(seq_id).num_preemptions for seq_id in range(12)]
    assert sum(count > SPARED_AFTER for count in counts) <= 3
    w.check_outputs()
