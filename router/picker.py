"""The picker: turns total scores into an order. Best first; among equals chance decides."""

from __future__ import annotations

import random


class BestWithRandomTies:
    """The highest total wins; one of those within `margin` of it is drawn at random.

    Without the draw every router that sees the same reports would send its next request to the same replica. `rng` is
    passed in; routers of different processes must not share a seed.
    """

    def __init__(self, rng: random.Random, margin: float = 0.01) -> None:
        self._rng = rng
        self.margin = margin

    def __call__(self, totals: list[float]) -> list[int]:
        order = sorted(range(len(totals)), key=totals.__getitem__, reverse=True)
        bound = totals[order[0]] - self.margin
        num_tied = 1
        while num_tied < len(order) and totals[order[num_tied]] >= bound:
            num_tied += 1
        if num_tied > 1:
            winner = self._rng.randrange(num_tied)
            order[0], order[winner] = order[winner], order[0]
        return order
