"""Scorer `prefix_affinity`: how much of the prompt lies in the replica's prefix cache already?

    score = matched blocks / full prompt blocks * max(0, 1 - requests ahead of the least loaded / imbalance cap)

A favourite is let go of step by step as it gets ahead of the least loaded candidate, and at once when the request
would have to wait there for a place and wouldn't elsewhere, or when its reports are stale and others' are not.
Without that bound a popular prefix sends all traffic to one replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.types import ReplicaView, RouteRequest


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """`imbalance_cap`: requests ahead of the least loaded candidate at which nothing is left of the score."""

    imbalance_cap: int
    name: str = "prefix_affinity"

    def __call__(self, request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        num_blocks = len(request.block_hashes)
        scores = [0.0] * len(views)
        favourites = [i for i, view in enumerate(views) if view.matched_blocks]
        if not favourites or not num_blocks:
            return scores
        least = min([view.load.num_outstanding for view in views])
        some_free = not all(view.load.would_wait for view in views)
        some_fresh = not all(view.is_stale for view in views)
        for i in favourites:
            load, matched_blocks, is_stale, *_ = views[i]
            ahead = load.num_outstanding - least
            if ahead < self.imbalance_cap and not (some_free and load.would_wait) and not (some_fresh and is_stale):
                scores[i] = min(1.0, matched_blocks / num_blocks) * (1.0 - ahead / self.imbalance_cap)
        return scores
