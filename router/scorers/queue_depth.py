"""Scorer `queue_depth`: how much company would the request have, and is there KV cache for it?

    cost  = max(own in flight, waiting + running) + waiting * 6 * max(0, kv_usage - 0.5)
    score = 1 / (1 + (cost - least cost) / 8)

Waiting requests weigh more the fuller the KV cache, because then they wait for blocks and not for a place. Requests
that no report includes yet count as waiting, and their prompts as blocks held. The score is relative to the least
loaded candidate, so that one request more or less matters as much among busy replicas as among idle ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.load import stale_as_loaded
from router.types import ReplicaLoad, ReplicaView, RouteRequest

WAITING_WEIGHT = 6.0
KV_PRESSURE_FROM = 0.5
REQUESTS_TO_HALVE = 8.0
"""So many requests above the least loaded candidate halve the score."""


@dataclass(frozen=True, slots=True)
class QueueDepth:
    name: str = "queue_depth"

    def __call__(self, _request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        costs = [_cost(view.load) for view in views]
        fresh = [cost for cost, view in zip(costs, views, strict=True) if not view.is_stale]
        least = min(fresh or costs)
        scores = [REQUESTS_TO_HALVE / (REQUESTS_TO_HALVE + cost - least) if cost > least else 1.0 for cost in costs]
        return stale_as_loaded(views, scores)


def _cost(load: ReplicaLoad) -> float:
    pressure = load.kv_usage_ratio - KV_PRESSURE_FROM
    return load.num_outstanding + (load.num_waiting * WAITING_WEIGHT * pressure if pressure > 0 else 0.0)
