"""Counts of durations in buckets that are 0.5 % wide: percentiles of 200 million gaps in the space of a page.

Only whole numbers are kept, so that parts can be added in any order and give the same sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

SHORTEST_S = 1e-7
_WIDTH = math.log(1.005)
_OFFSET = math.log(SHORTEST_S)


class Histogram:
    """`counts`: bucket -> how many durations fell into it. Percentiles are within 0.25 % of the true value."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, duration_s: float, weight: int = 1) -> None:
        """`weight` times the same duration; shorter ones than `SHORTEST_S` count as that."""
        bucket = int((math.log(duration_s) - _OFFSET) / _WIDTH) if duration_s > SHORTEST_S else 0
        self.counts[bucket] += weight

    def merge(self, other: Histogram) -> None:
        self.counts.update(other.counts)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def mean(self) -> float | None:
        """Seconds; None when empty."""
        if not self.total:
            return None
        return sum(_middle(bucket) * self.counts[bucket] for bucket in sorted(self.counts)) / self.total

    def percentiles(self, levels: Sequence[float]) -> list[float | None]:
        """Seconds at these levels, in percent, by nearest rank; None when empty."""
        total = self.total
        if not total:
            return [None] * len(levels)
        found: list[float | None] = []
        for level in levels:
            rank, seen = max(1, math.ceil(level / 100 * total)), 0
            for bucket in sorted(self.counts):
                seen += self.counts[bucket]
                if seen >= rank:
                    found.append(_middle(bucket))
                    break
        return found


def _middle(bucket: int) -> float:
    return math.exp(_OFFSET + (bucket + 0.5) * _WIDTH)
