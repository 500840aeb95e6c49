"""The picker: turns total scores into an order. Best first; equals take turns."""

from __future__ import annotations

import random
from collections.abc import Sequence

MAX_REMEMBERED = 10_000
"""Replicas of which it is known when they were chosen last."""


class BestInTurn:
    """The highest total wins; of those within `margin` of it, the one that was chosen longest ago.

    Turns spread more evenly than draws: where nothing is known that tells replicas apart, they are a round robin. Among
    those never chosen `rng` draws, so every router goes round in an order of its own; routers of different processes
    must not share a seed. Choosing changes nothing here before it is told with `chose`. Not thread-safe.
    """

    def __init__(self, rng: random.Random, margin: float = 0.01) -> None:
        self._rng = rng
        self.margin = margin
        self._num_chosen = 0
        self._turns: dict[str, int] = {}  # replica -> when it was chosen last; the longest ago first

    def __call__(self, totals: list[float], replica_ids: Sequence[str]) -> list[int]:
        order = sorted(range(len(totals)), key=totals.__getitem__, reverse=True)
        bound = totals[order[0]] - self.margin
        num_tied = 1
        while num_tied < len(order) and totals[order[num_tied]] >= bound:
            num_tied += 1
        if num_tied > 1:
            turns = [self._turns.get(replica_ids[i], 0) for i in order[:num_tied]]
            longest_ago = min(turns)
            places = [place for place, turn in enumerate(turns) if turn == longest_ago]
            winner = places[0] if len(places) == 1 else self._rng.choice(places)
            order[0], order[winner] = order[winner], order[0]
        return order

    def chose(self, replica_id: str) -> None:
        """The request goes there."""
        self._num_chosen += 1
        self._turns.pop(replica_id, None)
        self._turns[replica_id] = self._num_chosen
        if len(self._turns) > MAX_REMEMBERED:
            del self._turns[next(iter(self._turns))]
