"""Rounds in turn; medians, quantiles and sums over runs whose times are known."""

from __future__ import annotations

import pytest

from bench.engine_speed.rows import Row
from bench.http.measure import SINGLE_TIMES, measure, quantile
from tests.unit.bench.http.fakes import FakeSide, measured, run_of

ROW = Row(2, 8, 3)


@pytest.mark.parametrize(
    ("share", "found"), [(0.5, 50.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0), (0.0, 1.0), (0.001, 1.0)]
)
def test_a_quantile_is_one_of_the_values(share: float, found: float) -> None:
    assert quantile([float(number) for number in range(1, 101)], share) == found


def test_a_quantile_of_little() -> None:
    assert [quantile([], 0.5), quantile([7.0], 0.99), quantile([1.0, 2.0], 0.5)] == [0.0, 7.0, 1.0]


def test_sides_run_in_turn_with_the_same_prompts_and_a_single_stream_several_times() -> None:
    log: list[str] = []
    settled = [0]
    sides = [FakeSide("a", log), FakeSide("b", log)]
    found = measure(
        [Row(1, 8, 3), ROW],
        sides,
        lambda: 3.0 * len(log),
        lambda: settled.append(0),
        rounds=2,
        vocab_size=1000,
        progress=lambda text: None,
    )
    order = "".join(entry[0] for entry in log)
    n = SINGLE_TIMES
    assert order == "ab" + "a" * n + "b" * n + "ab" + "b" * n + "a" * n + "ba"
    asked = {side: [entry[2:] for entry in log if entry[0] == side] for side in "ab"}
    assert asked["a"] == asked["b"]
    assert len(set(asked["a"])) == len(asked["a"])
    assert len(settled) - 1 == len(log) - 2
    assert [len(runs) for by_side in found.runs.values() for runs in by_side.values()] == [2 * n, 2 * n, 2, 2]
    assert found.disturbance == 1.0  # 3 s of the machine a run of 2 s, 1 s of which is the side's


def test_numbers_of_a_side_over_all_its_runs() -> None:
    first = run_of([0.1, 0.2, 0.4], [0.3, 0.4, 0.5], engine=1.2, proxy=0.6)
    second = run_of([0.2, 0.3, 1.0], [0.2, 0.3, 0.4], engine=1.2, proxy=0.0)
    found = measured(ROW, http=[first, second])
    assert found.tokens_per_s(ROW, "http") == pytest.approx((6 / 0.5 + 6 / 1.0) / 2)
    assert found.first_token_s(ROW, "http") == 0.2
    assert found.gaps_s(ROW, "http") == pytest.approx([0.1] * 6 + [0.2, 0.7])
    assert found.tokens_per_event(ROW, "http") == 1.0
    assert found.cpu_s_per_token(ROW, "http") == pytest.approx({"engine": 0.2, "proxy": 0.05})
    assert found.cores(ROW, "http", "engine") == pytest.approx(2.4 / 1.5)
    assert found.cores(ROW, "http", "client") == 0.0
