"""Who gives its blocks back."""

from __future__ import annotations

import pytest

from bench.victims.rules import second_oldest
from replica.request import GenerationRequest
from replica.scheduler.preemption import SPARED_AFTER, choose_victim
from replica.scheduler.sequence import Sequence
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


def victim_of(sequences: list[Sequence], policy: str) -> int | None:
    w = world(policy=policy)
    state = w.scheduler._state
    state.batch.running = sequences
    victim = choose_victim(state)
    return None if victim is None else victim.seq_id


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
def test_the_newest_loses_unless_it_lost_often_and_never_the_oldest(
    num_preemptions: tuple[int, ...], victim: int | None
) -> None:
    assert victim_of(running(*num_preemptions), "fcfs") == victim


@pytest.mark.parametrize(("priorities", "victim"), [((0, 2, 1), 1), ((0, 1, 1), 2), ((9, 0, 1), 2), ((0, 1.5, 1.4), 1)])
def test_under_priority_the_least_important_loses_then_the_newest(priorities: tuple[float, ...], victim: int) -> None:
    assert victim_of(running(0, 0, 0, priorities=priorities), "priority") == victim


def test_a_study_may_bring_another_rule() -> None:
    w = world()
    w.scheduler._state.batch.running = running(0, 0, 0)
    w.scheduler._state.victim_rule = second_oldest
    victim = choose_victim(w.scheduler._state)
    assert victim is not None
    assert victim.seq_id == 1
