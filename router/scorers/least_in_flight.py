"""Scorer `least_in_flight`: who has the fewest requests of this router's own? `score = 1 / (1 + own in flight)`.

What a plain load balancer knows: no report, so nothing that is late, and nothing of what others send.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.load import stale_as_loaded
from router.types import ReplicaView, RouteRequest


@dataclass(frozen=True, slots=True)
class LeastInFlight:
    name: str = "least_in_flight"

    def __call__(self, _request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        return stale_as_loaded(views, [1.0 / (1.0 + view.load.num_in_flight) for view in views])
