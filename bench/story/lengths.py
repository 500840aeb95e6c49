"""Output lengths of the story: discrete distributions of equal mean and growing spread, and draws from them.

    equal      every answer has the mean length
    +-25 % ... uniform around the mean; +-100 % reaches from 1 to twice the mean
    W2         two humps: the output quantiles of a public conversation trace, scaled to the mean
    W7         Zipf with exponent 1.1 below 1,024, scaled to the mean: many tiny answers, few huge ones

A distribution is exact (a probability for each whole number of tokens, at least 1), so that `closed_form.py` needs no
sample of it.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import log

from bench.traces.lengths import zipf_probabilities
from bench.traces.shapes import AZURE_CHAT_OUT
from bench.traces.trace import QUANTILES

ZIPF_EXPONENT = 1.1
ZIPF_BELOW = 1024
_NUM_DRAWS = 24


class LengthDistribution:
    """Probabilities of output lengths: `lengths` ascending, whole, at least 1; `probabilities` sum to 1."""

    def __init__(self, name: str, weights: Iterable[tuple[int, float]]) -> None:
        by_length: dict[int, float] = {}
        for length, weight in weights:
            if length < 1 or weight < 0:
                raise ValueError(f"length {length} with weight {weight}: lengths are at least 1, weights not negative")
            by_length[length] = by_length.get(length, 0.0) + weight
        total = sum(by_length.values())
        self.name = name
        self.lengths = tuple(sorted(length for length, weight in by_length.items() if weight))
        self.probabilities = tuple(by_length[length] / total for length in self.lengths)
        self._cumulative = (*list(accumulate(self.probabilities))[:-1], 1.0)

    @property
    def mean(self) -> float:
        return sum(length * p for length, p in zip(self.lengths, self.probabilities, strict=True))

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def at_most(self, length: int) -> float:
        """P(L <= length)."""
        below = bisect_left(self.lengths, length + 1)
        return self._cumulative[below - 1] if below else 0.0

    def at_share(self, share: float) -> int:
        """The length below which this share (0 to 1) of all answers lies: the inverse of `at_most`."""
        return self.lengths[min(bisect_left(self._cumulative, share), len(self.lengths) - 1)]

    def expected_max(self, batch_size: int) -> float:
        """The mean of the longest of `batch_size` independent answers: sum over t >= 0 of 1 - P(L <= t) ** size."""
        total, previous, before = 0.0, 0, 0.0
        for length, cumulative in zip(self.lengths, self._cumulative, strict=True):
            total += (length - previous) * (1.0 - before**batch_size)
            previous, before = length, cumulative
        return total


def equal(mean: int) -> LengthDistribution:
    return LengthDistribution("equal", [(mean, 1.0)])


def uniform(mean: int, share: float) -> LengthDistribution:
    """Whole numbers within `share` of the mean, all equally likely; never below 1."""
    reach = min(round(mean * share), mean - 1)
    return LengthDistribution(f"+-{share:.0%}", [(length, 1.0) for length in range(mean - reach, mean + reach + 1)])


def two_humped(mean: int) -> LengthDistribution:
    """W2: quantiles with log-linear interpolation between them, scaled to the mean and rounded."""
    return _scaled_to(mean, lambda scale: LengthDistribution("W2", _between_quantiles(scale)))


def zipf(mean: int) -> LengthDistribution:
    """W7, scaled to the mean and rounded."""

    def scaled(scale: float) -> LengthDistribution:
        weights = enumerate(zipf_probabilities(ZIPF_EXPONENT, ZIPF_BELOW).tolist(), 1)
        return LengthDistribution("W7", ((max(1, round(k * scale)), weight) for k, weight in weights))

    return _scaled_to(mean, scaled)


def spreads(mean: int) -> list[LengthDistribution]:
    """From no spread to W7."""
    return [equal(mean), *(uniform(mean, share) for share in (0.25, 0.5, 1.0)), two_humped(mean), zipf(mean)]


def _between_quantiles(scale: float) -> Iterable[tuple[int, float]]:
    grid = [value * scale for value in AZURE_CHAT_OUT]
    levels = [level / 100 for level in QUANTILES]

    def at_most(value: float) -> float:
        if value <= grid[0]:
            return 0.0
        if value >= grid[-1]:
            return 1.0
        i = bisect_left(grid, value)
        part = log(value / grid[i - 1]) / log(grid[i] / grid[i - 1])
        return levels[i - 1] + part * (levels[i] - levels[i - 1])

    below = 0.0
    for length in range(1, int(grid[-1]) + 2):
        upto = at_most(length + 0.5)
        yield length, max(0.0, upto - below)
        below = upto


def _scaled_to(mean: int, scaled: Callable[[float], LengthDistribution]) -> LengthDistribution:
    """Bisection over the scale, as near to the mean as rounding to whole tokens allows."""
    low, high = 0.0, float(mean)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if scaled(middle).mean < mean else (low, middle)
    return scaled(high)


def draw(distribution: LengthDistribution, num_batches: int, batch_size: int, seed: int) -> list[int]:
    """Lengths of `num_batches` x `batch_size` requests, in order of arrival.

    Each batch, taken alone, is `batch_size` independent answers. Across batches luck is taken out, so that the few
    batches that a slow engine has time for have the right means already: their longest answers are spread evenly over
    the distribution of a longest answer (its share is the `batch_size`-th root of a uniform draw), and the others
    evenly below; of a few such draws the one nearest to both means (of all and of the longest) is taken. What a
    scheduler makes of these lengths is untouched by that.
    """
    source = random.Random(seed)
    draws = (_shares(num_batches, batch_size, source) for _ in range(_NUM_DRAWS))
    drawn = ([distribution.at_share(share) for share in shares] for shares in draws)
    longest = distribution.expected_max(batch_size)

    def luck(lengths: list[int]) -> float:
        tops = [max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size)]
        return abs(sum(lengths) / len(lengths) / distribution.mean - 1) + abs(sum(tops) / num_batches / longest - 1)

    return min(drawn, key=luck)


def _shares(num_batches: int, batch_size: int, source: random.Random) -> list[float]:
    """Places of all members of all batches in the distribution, 0 to 1."""
    longest = [share ** (1.0 / batch_size) for share in _strata(source, num_batches)]
    others = [_strata(source, num_batches) for _ in range(batch_size - 1)]
    shares: list[float] = []
    for number, top in enumerate(longest):
        members = [top, *(column[number] * top for column in others)]
        source.shuffle(members)
        shares += members
    return shares


def _strata(source: random.Random, count: int) -> list[float]:
    """One uniform draw from each of `count` equal parts of 0 to 1, shuffled."""
    shares: list[float] = [(part + source.random()) / count for part in range(count)]
    source.shuffle(shares)
    return shares
