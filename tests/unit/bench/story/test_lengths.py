from itertools import product
from math import prod
from statistics import mean

import pytest

from bench.story.lengths import LengthDistribution, draw, equal, spreads, two_humped, uniform, zipf

SMALL = LengthDistribution("small", [(1, 0.5), (2, 0.2), (7, 0.3)])


def by_enumeration(distribution: LengthDistribution, batch_size: int) -> float:
    pairs = list(zip(distribution.lengths, distribution.probabilities, strict=True))
    return sum(
        max(length for length, _ in batch) * prod(p for _, p in batch) for batch in product(pairs, repeat=batch_size)
    )


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_the_expected_maximum_is_that_of_all_possible_batches(batch_size: int) -> None:
    assert SMALL.expected_max(batch_size) == pytest.approx(by_enumeration(SMALL, batch_size), rel=1e-12)
    assert uniform(3, 1.0).expected_max(batch_size) == pytest.approx(by_enumeration(uniform(3, 1.0), batch_size))


def test_the_longest_of_one_is_the_mean() -> None:
    for distribution in spreads(26):
        assert distribution.expected_max(1) == pytest.approx(distribution.mean)


def test_all_spreads_have_the_same_mean_and_grow() -> None:
    distributions = spreads(26)
    assert [one.name for one in distributions] == ["equal", "+-25%", "+-50%", "+-100%", "W2", "W7"]
    for one in distributions:
        assert one.mean == pytest.approx(26, rel=0.005)
        assert sum(one.probabilities) == pytest.approx(1.0)
        assert one.lengths[0] >= 1
    longest = [one.expected_max(16) for one in distributions]
    assert longest == sorted(longest)
    assert longest[-1] > 6 * longest[0]


def test_shares_and_lengths_are_each_others_inverse() -> None:
    assert [SMALL.at_most(length) for length in (0, 1, 2, 6, 7, 100)] == pytest.approx([0, 0.5, 0.7, 0.7, 1, 1])
    assert [SMALL.at_share(share) for share in (0.0, 0.49, 0.51, 0.69, 0.71, 1.0)] == [1, 1, 2, 2, 7, 7]


def test_two_humped_lengths_keep_the_published_quantiles() -> None:
    distribution = two_humped(211)  # the mean of the published trace
    for share, published in ((0.1, 54), (0.5, 129), (0.7, 384), (0.9, 424), (0.99, 601)):
        assert distribution.at_share(share) == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("mean_tokens", [1, 2, 3, 5, 8, 40, 102, 211])
def test_any_mean_can_be_had(mean_tokens: int) -> None:
    for one in spreads(mean_tokens):
        assert one.mean == pytest.approx(mean_tokens, rel=0.005)


@pytest.mark.parametrize("weights", [[(0, 1.0)], [(2, -0.1)]])
def test_impossible_weights_are_refused(weights: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="lengths are at least 1, weights not negative"):
        LengthDistribution("impossible", weights)


def test_a_draw_is_the_same_each_time_and_another_with_another_seed() -> None:
    first, again, other = (draw(zipf(26), 5, 8, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == 40
    assert draw(equal(9), 2, 3, seed=0) == [9] * 6


@pytest.mark.parametrize("distribution", [uniform(16, 1.0), two_humped(16), zipf(16)], ids=lambda one: one.name)
def test_drawn_batches_are_independent_lengths_without_luck(distribution: LengthDistribution) -> None:
    longest, means, firsts = [], [], []
    for seed in range(40):
        lengths = draw(distribution, 16, 8, seed)
        batches = [lengths[i : i + 8] for i in range(0, len(lengths), 8)]
        longest.append(mean(max(batch) for batch in batches))
        means.append(mean(lengths))
        firsts += [batch[0] for batch in batches]
    assert mean(longest) == pytest.approx(distribution.expected_max(8), rel=0.01)
    assert means == pytest.approx([distribution.mean] * 40, rel=0.05)
    # No place in a batch is special: first members alone have the whole distribution.
    for share in (0.25, 0.5, 0.9):
        length = distribution.at_share(share)
        assert mean(first <= length for first in firsts) == pytest.approx(distribution.at_most(length), abs=0.06)
