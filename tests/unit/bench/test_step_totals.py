"""Sums over steps: percentiles from buckets, bins over time, and the same sums whatever the order of adding."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulate.histogram import Histogram
from bench.simulate.prompt import Prompts
from bench.simulate.step_totals import MAX_BINS, StepTotals
from bench.traces.generate import generate

DURATIONS = st.lists(st.tuples(st.floats(1e-6, 1e4), st.integers(1, 1000)), min_size=1, max_size=50)


@given(DURATIONS)
def test_percentiles_are_within_half_a_percent_of_nearest_rank(durations: list[tuple[float, int]]) -> None:
    histogram = Histogram()
    for duration_s, weight in durations:
        histogram.add(duration_s, weight)
    every = sorted(duration_s for duration_s, weight in durations for _ in range(weight))
    levels = [0, 50, 90, 99, 100]
    exact = [every[max(1, math.ceil(level / 100 * len(every))) - 1] for level in levels]
    assert histogram.percentiles(levels) == pytest.approx(exact, rel=0.005)
    assert histogram.mean() == pytest.approx(sum(every) / len(every), rel=0.005)
    assert histogram.total == len(every)


def test_an_empty_histogram_has_no_percentiles() -> None:
    assert Histogram().percentiles([50, 99]) == [None, None]
    assert Histogram().mean() is None


def totals_of(*steps: tuple[float, float]) -> StepTotals:
    totals = StepTotals()
    for start_s, length_s in steps:
        totals.add_step(start_s, start_s + length_s, 3, (5, 2, 1), 4, 6)
    return totals


def test_replicas_add_up_the_same_in_any_order() -> None:
    parts = [
        [(0.1 * i, 0.07) for i in range(50)],
        [(0.003 * i, 0.002) for i in range(900)],
        [(i * 1.0, 0.3) for i in range(3000)],
    ]
    found = []
    for order in permutations(parts):
        merged = StepTotals()
        for part in order:
            merged.merge(totals_of(*part))
        found.append((merged.bins(), merged.num_tokens, merged.busy_ns, merged.waiting_growth(1000.0)))
    assert all(one == found[0] for one in found)
    assert len(found[0][0]) <= MAX_BINS
    assert sum(part.num_steps for part in found[0][0]) == 3950


def test_bins_average_over_time_what_waits_and_runs() -> None:
    one = totals_of(*[(i * 0.5, 0.25) for i in range(20_000)])
    full = one.bins()[10]
    assert full.num_steps == pytest.approx(full.width_s / 0.5, abs=1)
    assert (full.waiting, full.running, full.held) == pytest.approx((2.0, 1.5, 3.0), rel=0.05)


def test_growth_is_the_slope_of_the_number_waiting() -> None:
    totals = StepTotals()
    for i in range(1000):
        totals.add_step(i * 0.1, (i + 1) * 0.1, 1, (0, 1, 0), i, 0)
    assert totals.waiting_growth(100.0) == pytest.approx(10.0, rel=0.01)
    assert StepTotals().waiting_growth(0.0) is None


def test_a_lazy_prompt_reads_like_the_tuple_that_it_stands_for() -> None:
    trace = generate("W2", 5, 0)
    prompts = Prompts(trace, 1000)
    for number in (3, 1, 3):
        lazy, ids = prompts.lazy(number), trace.prompt_ids(number, 1000)
        assert (list(lazy), len(lazy), lazy[-1], lazy[2:5]) == (list(ids), len(ids), ids[-1], ids[2:5])
