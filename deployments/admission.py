"""Admission: may this request cost anything here? Pure decisions, made before a prompt is tokenized.

A request passes if this ingress process isn't at its bound, and if at least one replica's waiting queue has room for
it. The replica decides in the end, on its exact state; this only spares the work for requests that it would refuse
anyway, and answers them in microseconds when the service is flooded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from replica.config import SchedulerConfig
from replica.errors import QueueFull, Unavailable
from replica.request import LoadReport

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
# While this process drains: somebody else may have started by then.
DRAINING_RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class InFlight:
    """Requests that this process works on. `enter` counts one in; whoever entered must `leave`, exactly once."""

    limit: int
    count: int = 0
    draining: bool = False

    def enter(self) -> None:
        """Raises `QueueFull` at the limit and `Unavailable` while draining; then nothing was counted."""
        if self.draining:
            raise Unavailable("the service is shutting down", retry_after_s=DRAINING_RETRY_AFTER_S)
        if self.count >= self.limit:
            raise QueueFull("too many requests are in progress", retry_after_s=MIN_RETRY_AFTER_S)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1


def check_queues(reports: Sequence[LoadReport], bounds: SchedulerConfig, num_replicas: int, num_seqs: int) -> None:
    """Raises `QueueFull` if every replica is known to have no room for `num_seqs` more waiting sequences.

    A replica that hasn't reported yet (`reports` fewer than `num_replicas`) may have room. A report is a little old:
    what it can't show yet, the replica itself refuses.
    """
    if not reports or len(reports) < num_replicas:
        return
    if any(_has_room(report, bounds, num_seqs) for report in reports):
        return
    raise QueueFull("the waiting queue is full on every replica", retry_after_s=retry_after_s(reports))


def _has_room(report: LoadReport, bounds: SchedulerConfig, num_seqs: int) -> bool:
    """As the scheduler judges: an empty queue takes any request, and the preempted don't count."""
    num_fresh = report.num_waiting - report.num_preempted
    num_fresh_tokens = report.num_waiting_tokens - report.num_preempted_tokens
    seqs_fit = num_fresh + num_seqs <= bounds.max_num_queued_seqs
    fits = num_fresh == 0 or (seqs_fit and num_fresh_tokens < bounds.max_num_queued_tokens)
    return fits and not report.draining


def retry_after_s(reports: Sequence[LoadReport]) -> float:
    """When the least loaded replica will have worked off half of its waiting tokens, in whole seconds."""
    waits = [
        report.num_waiting_tokens / report.prefill_tokens_per_s / 2
        for report in reports
        if report.prefill_tokens_per_s > 0
    ]
    wait_s = min(waits, default=MIN_RETRY_AFTER_S)
    return float(math.ceil(min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))))
