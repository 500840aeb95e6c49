"""Who gives its blocks back, by the shipped rule and by the plain one."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from replica.request import GenerationRequest
from replica.scheduler.block_pool import BlockPool
from replica.scheduler.preemption import SPARED_AFTER, choose_victim, may_lose, newest, newest_mid_prefill
from replica.scheduler.sequence import Sequence
from replica.scheduler.state import VictimRule
from tests.unit.scheduler.rig import request, world


def running(*num_preemptions: int, priorities: tuple[float, ...] = ()) -> list[Sequence]:
    made = []
    for arrival, count in enumerate(num_preemptions):
        one = GenerationRequest("r", (5,), request([5], 1).sampling)
        place = (float(arrival), arrival)
        seq = Sequence(
            arrival, one, 0, 0, arrival=arrival, queue_key=place, max_len=2, is_small=True, eos_token_ids=(), now_s=0.0
        )
        seq.aged_priority = priorities[arrival] if priorities else 0.0
        seq.num_preemptions = count
        made.append(seq)
    return made


def victim_of(
    sequences: list[Sequence], policy: str, rule: VictimRule, mid_prefill: Collection[int] = ()
) -> int | None:
    """All hold a cached block; those in `mid_prefill` still compute their input, the others decode."""
    w = world(policy=policy)
    state = w.scheduler._state
    state.victim_rule = rule
    state.batch.running = sequences
    for seq in sequences:
        seq.tokens, seq.block_table = [5] * 9, state.tables.pool.take(1)
        seq.num_scheduled = 4 if seq.arrival in mid_prefill else 8
        state.tables.pool.name(seq.block_table[0])
    victim = choose_victim(state)
    return None if victim is None else victim.seq_id


BOTH_RULES = pytest.mark.parametrize("rule", [newest, newest_mid_prefill])


@BOTH_RULES
@pytest.mark.parametrize("mid_prefill", [(), (0, 1, 2)])
@pytest.mark.parametrize(
    ("num_preemptions", "victim"),
    [
        ((0, 0, 0), 2),
        ((0, 0, SPARED_AFTER), 1),
        ((0, SPARED_AFTER, SPARED_AFTER), 2),
        ((0, SPARED_AFTER), 1),
        ((0,), None),
        ((), None),
    ],
)
def test_among_equals_the_newest_loses_unless_it_lost_often_and_never_the_oldest(
    num_preemptions: tuple[int, ...], victim: int | None, mid_prefill: tuple[int, ...], rule: VictimRule
) -> None:
    assert victim_of(running(*num_preemptions), "fcfs", rule, mid_prefill) == victim


@BOTH_RULES
@pytest.mark.parametrize("mid_prefill", [(), (0, 1, 2)])
@pytest.mark.parametrize(("priorities", "victim"), [((0, 2, 1), 1), ((0, 1, 1), 2), ((9, 0, 1), 2), ((0, 1.5, 1.4), 1)])
def test_under_priority_the_least_important_loses_then_the_newest(
    priorities: tuple[float, ...], victim: int, mid_prefill: tuple[int, ...], rule: VictimRule
) -> None:
    assert victim_of(running(0, 0, 0, priorities=priorities), "priority", rule, mid_prefill) == victim


@pytest.mark.parametrize(
    ("num_preemptions", "mid_prefill", "victim"),
    [
        ((0, 0, 0), (1,), 1),
        ((0, 0, 0, 0), (1, 2), 2),
        ((0, 0, 0), (0,), 2),
        ((0, SPARED_AFTER, 0), (1,), 2),
        ((0, 0, SPARED_AFTER), (2,), 1),
        ((0, SPARED_AFTER, SPARED_AFTER), (1,), 1),
    ],
)
def test_the_newest_mid_prefill_loses_before_newer_decodes_but_not_the_oldest_nor_one_that_lost_often(
    num_preemptions: tuple[int, ...], mid_prefill: tuple[int, ...], victim: int
) -> None:
    assert victim_of(running(*num_preemptions), "fcfs", newest_mid_prefill, mid_prefill) == victim


@pytest.mark.parametrize(
    ("priorities", "mid_prefill", "victim"), [((0, 1, 1), (1,), 1), ((0, 1, 2), (1,), 2), ((0, 2, 1), (2,), 1)]
)
def test_under_priority_a_mid_prefill_loses_only_among_the_least_important(
    priorities: tuple[float, ...], mid_prefill: tuple[int, ...], victim: int
) -> None:
    sequences = running(0, 0, 0, priorities=priorities)
    assert victim_of(sequences, "priority", newest_mid_prefill, mid_prefill) == victim


@pytest.mark.parametrize(("cached", "victim"), [(True, 1), (False, 2)])
def test_of_those_that_may_lose_the_newest_whose_input_is_in_the_cache_so_far_does(cached: bool, victim: int) -> None:
    """The newest only decodes: its stream goes on."""
    sequences = running(0, 0, 0)
    pool = BlockPool(4)
    for seq in sequences:
        seq.tokens, seq.block_table = [5] * 9, pool.take(1)
        seq.num_scheduled = 4 if seq.arrival == 1 else 8
        if cached:
            pool.name(seq.block_table[0])
    assert newest_mid_prefill(may_lose(sequences, "fcfs"), pool).seq_id == victim
