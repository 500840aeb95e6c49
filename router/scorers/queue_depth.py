"""Scorer `queue_depth`: how much company would the request have, and is there KV cache for it?

    score = 1 / (1 + (cost - least cost) / 8)

`cost` counts the requests there, waiting ones weighted by KV pressure (`router/load.py`). The score is relative to the
least loaded candidate, so that one request more or less matters as much among busy replicas as among idle ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.load import stale_as_loaded
from router.types import ReplicaView, RouteRequest

REQUESTS_TO_HALVE = 8.0
"""So many requests above the least loaded candidate halve the score."""


@dataclass(frozen=True, slots=True)
class QueueDepth:
    name: str = "queue_depth"

    def __call__(self, _request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        costs = [view.load.cost for view in views]
        fresh = [cost for cost, view in zip(costs, views, strict=True) if not view.is_stale]
        least = min(fresh or costs)
        scores = [REQUESTS_TO_HALVE / (REQUESTS_TO_HALVE + cost - least) if cost > least else 1.0 for cost in costs]
        return stale_as_loaded(views, scores)
