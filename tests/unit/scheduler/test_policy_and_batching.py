"""Order of the queue by policy, and fixed batches as the baseline."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.rig import joined, request, world


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("priority", [2, 1, 3, 0])])
def test_the_policy_orders_the_queue(policy: str, order: list[int]) -> None:
    w = world(max_num_seqs=1, policy=policy)
    for priority in (5, 1, 0, 1):
        w.add(request([5], 1, priority=priority))
    entered = []
    while w.scheduler.has_work:
        entered += joined(w.step())
    assert entered == order


@pytest.mark.parametrize(("ageing_s", "order"), [(30.0, [1, 0]), (29.0, [0, 1])])
def test_waiting_improves_a_priority_by_one_each_ageing_time(ageing_s: float, order: list[int]) -> None:
    w = world(max_num_seqs=1, policy="priority", priority_ageing_s=ageing_s)
    w.add(request([5], 1, priority=1))
    w.now_s = 29.5
    w.add(request([5], 1, priority=0))
    assert joined(w.step()) + joined(w.step()) == order


def test_a_priority_too_large_to_compute_with_is_refused() -> None:
    with pytest.raises(Exception, match="priority is outside"):
        world().scheduler.add(0, request([5], 1, priority=10**400), 0, 0, 0.0)


@pytest.mark.parametrize(
    ("batching", "entries"),
    [("continuous", [[0, 1], [], [2], [3]]), ("static", [[0, 1], [], [], [2, 3]])],
)
def test_a_static_batch_is_refilled_only_when_every_member_has_ended(batching: str, entries: list[list[int]]) -> None:
    w = world(max_num_seqs=2, batching=batching)
    for max_tokens in (2, 3, 1, 2):
        w.add(request([5], max_tokens))
    assert [joined(w.step()) for _ in range(4)] == entries


def test_a_static_batch_fills_over_as_many_steps_as_the_budget_needs() -> None:
    w = world(max_num_seqs=3, max_num_batched_tokens=10, batching="static")
    for _ in range(4):
        w.add(request([5] * 9, 6, ignore_eos=True, cache_salt=str(w.scheduler.num_waiting)))
    entries = [joined(w.step()) for _ in range(5)]
    assert entries[0] == [0, 1] and [*entries[0], *entries[1], *entries[2]] == [0, 1, 2], "three places, three members"
    w.drain()
    w.check_outputs()


def test_a_preempted_member_of_a_static_batch_comes_back_into_it() -> None:
    w = world(max_num_seqs=2, batching="static")
    for _ in range(3):
        w.add(request([5], 9, ignore_eos=True))
    w.step()
    w.scheduler.preempt_newest()
    w.step()
    assert joined(w.step()) == [1]
    w.drain()
    w.check_outputs()


def test_a_preempted_member_of_a_static_batch_comes_back_before_a_more_important_stranger() -> None:
    w = world(max_num_seqs=2, batching="static", policy="priority")
    for _ in range(2):
        w.add(request([5], 9, ignore_eos=True))
    w.step()
    w.add(request([5], 9, priority=-9))
    w.scheduler.preempt_newest()
    w.step()
    assert joined(w.step()) == [1]
    w.drain()
    w.check_outputs()
