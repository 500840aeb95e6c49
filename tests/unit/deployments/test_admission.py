"""Admission refuses only what every replica would refuse, and says when to come back."""

from __future__ import annotations

import pytest

from deployments.admission import InFlight, check_queues
from replica.config import SchedulerConfig
from replica.errors import QueueFull, Unavailable
from replica.request import LoadReport

BOUNDS = SchedulerConfig(max_num_queued_seqs=10, max_num_queued_tokens=1000)


def report(
    waiting: int, tokens: int = 0, rate: float = 0.0, draining: bool = False, preempted: tuple[int, int] = (0, 0)
) -> LoadReport:
    return LoadReport(
        replica_id="r",
        epoch="e",
        number=1,
        made_at_s=0.0,
        num_running=1,
        num_waiting=waiting,
        num_waiting_tokens=tokens,
        num_prefill_tokens=0,
        num_blocks_total=10,
        num_blocks_free=10,
        num_blocks_cached=0,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefill_tokens_per_s=rate,
        draining=draining,
        num_preempted=preempted[0],
        num_preempted_tokens=preempted[1],
    )


@pytest.mark.parametrize(
    ("reports", "num_replicas", "num_seqs"),
    [
        ([], 1, 1),  # nobody has reported yet
        ([report(10)], 2, 1),  # one of two hasn't
        ([report(9)], 1, 1),
        ([report(7)], 1, 3),
        ([report(10), report(0)], 2, 1),
        ([report(1, tokens=999)], 1, 1),
        ([report(0)], 1, 11),  # an empty queue takes any request
        ([report(10, preempted=(1, 0))], 1, 1),  # the preempted don't count
        ([report(10, preempted=(10, 0))], 1, 11),
        ([report(3, tokens=1500, preempted=(2, 501))], 1, 1),
    ],
)
def test_a_request_passes_while_one_replica_may_have_room(
    reports: list[LoadReport], num_replicas: int, num_seqs: int
) -> None:
    check_queues(reports, BOUNDS, num_replicas, num_seqs)


@pytest.mark.parametrize(
    ("reports", "num_seqs"),
    [
        ([report(10)], 1),
        ([report(8)], 3),  # n counts n places
        ([report(1, tokens=1000)], 1),
        ([report(3, tokens=1501, preempted=(2, 501))], 1),
        ([report(11, preempted=(1, 0))], 1),
        ([report(10), report(0, draining=True)], 1),
    ],
)
def test_a_request_is_refused_when_no_queue_has_room(reports: list[LoadReport], num_seqs: int) -> None:
    with pytest.raises(QueueFull):
        check_queues(reports, BOUNDS, len(reports), num_seqs)


@pytest.mark.parametrize(
    ("reports", "retry_after_s"),
    [
        ([report(10, tokens=800)], 1.0),  # no rate known yet
        ([report(10, tokens=800, rate=100.0)], 4.0),
        ([report(10, tokens=810, rate=100.0)], 5.0),  # whole seconds
        ([report(10, tokens=800, rate=100.0), report(10, tokens=400, rate=100.0)], 2.0),  # the first to have room
        ([report(10, tokens=800, rate=1.0)], 60.0),
        ([report(10, tokens=1, rate=1000.0)], 1.0),
    ],
)
def test_retry_after_follows_the_backlog_and_its_speed(reports: list[LoadReport], retry_after_s: float) -> None:
    with pytest.raises(QueueFull) as caught:
        check_queues(reports, BOUNDS, len(reports), 1)
    assert caught.value.retry_after_s == retry_after_s


def test_in_flight_refuses_at_its_limit_and_counts_nothing_then() -> None:
    in_flight = InFlight(limit=2)
    in_flight.enter()
    in_flight.enter()
    with pytest.raises(QueueFull):
        in_flight.enter()
    assert in_flight.count == 2
    in_flight.leave()
    in_flight.enter()
    assert in_flight.count == 2


def test_while_draining_nobody_enters_and_whoever_is_in_is_counted_until_the_end() -> None:
    in_flight = InFlight(limit=2)
    in_flight.enter()
    in_flight.draining = True
    with pytest.raises(Unavailable) as caught:
        in_flight.enter()
    assert (caught.value.retry_after_s, in_flight.count) == (5.0, 1)
    in_flight.leave()
    assert in_flight.count == 0
