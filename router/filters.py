"""Filters: who may serve a request at all. Each keeps some of the candidates; `Policy` passes over one that keeps none.

Staleness is no filter: a silent replica is scored as loaded (`router/load.py`), so that it is used only when the others
are worse, and so that a cluster without fresh reports still serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.types import ReplicaView, RouteRequest


@dataclass(frozen=True, slots=True)
class NotDraining:
    """A draining replica finishes what it has and refuses the rest."""

    name: str = "draining"

    def __call__(self, _request: RouteRequest, views: list[ReplicaView]) -> list[ReplicaView]:
        return [view for view in views if (report := view.load.report) is None or not report.draining]


@dataclass(frozen=True, slots=True)
class QueueNotFull:
    """A replica whose waiting queue is at its bound would refuse the request."""

    max_num_queued_seqs: int
    name: str = "queue_full"

    def __call__(self, _request: RouteRequest, views: list[ReplicaView]) -> list[ReplicaView]:
        bound = self.max_num_queued_seqs
        return [view for view in views if view.load.num_waiting < bound]
