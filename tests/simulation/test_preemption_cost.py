"""Preemption must not thrash: what it costs beyond capacity on Azure's conversations, in virtual time."""

from __future__ import annotations

import pytest

from bench.simulate.step_cost import H100_8B
from bench.victims.study import LOADS, PRESSED, SHIPPED, Regime, Setup, compare
from bench.victims.verdict import REFERENCE

FEW = LOADS["W2"]._replace(num_requests=300)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("regime", [SHIPPED, PRESSED], ids=lambda regime: regime.name)
def test_at_a_fifth_above_capacity_few_are_preempted_and_little_is_computed_again(
    regime: Regime, prefix_caching: bool
) -> None:
    """Even where admission keeps nothing free for what runs."""
    (row,) = compare(Setup(FEW, regime, prefix_caching, H100_8B, 1.2), (REFERENCE,), (0,))
    assert row.max_preemptions <= 3
    assert row.computed_per_useful <= 1.3
    assert (row.recomputed_tokens > 10_000) == (regime is PRESSED), "pressure is real, or there is none to speak of"


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("regime", [SHIPPED, PRESSED], ids=lambda regime: regime.name)
def test_nobody_is_preempted_a_fourth_time_on_the_whole_load_whatever_the_seed(
    regime: Regime, prefix_caching: bool
) -> None:
    """A thousand requests, three seeds. `max_preemptions` is the worst of all."""
    setup = Setup(LOADS["W2"], regime, prefix_caching, H100_8B, 1.2)
    assert setup.load.num_requests == 1000
    runs = [row for seed in (0, 1, 2) for row in compare(setup, (REFERENCE,), (seed,))]
    assert max(row.max_preemptions for row in runs) <= 3
    assert max(row.computed_per_useful for row in runs) <= 1.3


def test_admission_as_shipped_avoids_nearly_all_preemptions() -> None:
    (row,) = compare(Setup(FEW, SHIPPED, True, H100_8B, 1.2), (REFERENCE,), (0, 1))
    assert row.computed_per_useful <= 1.01


def test_preempting_the_largest_costs_several_times_what_the_newest_does() -> None:
    newest, largest = compare(Setup(FEW, PRESSED, True, H100_8B, 1.2), ("newest", "most-blocks"), (0,))
    assert largest.recomputed_tokens > 2 * newest.recomputed_tokens
    assert largest.throughput < newest.throughput
