"""The fit finds the cost that was put in."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.fit import fitting
from bench.fit.fitting import errors_of, fit_cost, nonnegative_least_squares, speed_of
from bench.fit.micro import REFERENCE_NAMES, MicroBenchmarks, Point, micro_benchmarks
from bench.fit.points_file import PointsFile
from bench.simulate.step_cost import StepCost, StepWork, load_cost
from replica.errors import SettingError
from replica.scheduler.plan import StepPlan
from tests.unit.bench.fit.engines import CURVED, LINEAR, engine


def measured(cost: StepCost, rng: random.Random | None = None, num_rounds: int = 1) -> list[Point]:
    """Points of an engine with this cost; with `rng` every step is up to 5 % off and each tenth takes much longer."""

    def seconds_of(plan: StepPlan) -> float:
        if rng is None:
            return cost.of_plan(plan)
        return cost.of_plan(plan) * rng.uniform(0.95, 1.05) * (3.0 if rng.random() < 0.1 else 1.0)

    virtual = engine(seconds_of)
    benchmarks = micro_benchmarks(virtual.config.scheduler, virtual.shape.max_model_len)
    return MicroBenchmarks(virtual).measure(benchmarks, range(num_rounds), lambda *_: None)


def fitted(points: list[Point]) -> StepCost:
    return fit_cost(points, 16, "unnamed", "")[0].cost


def test_exact_points_of_a_linear_cost_give_back_its_numbers() -> None:
    found = fitted(measured(LINEAR))
    for name in ("fixed_s", "prefill_token_s", "decode_seq_s", "kv_token_s", "prefill_pair_s", "chunk_s"):
        assert getattr(found, name) == pytest.approx(getattr(LINEAR, name), rel=1e-6), name
    assert (found.token_curve, found.kv_granule_tokens) == ((), 16)


def test_exact_points_of_a_curved_cost_give_back_its_numbers_and_its_curve() -> None:
    found = fitted(measured(CURVED))
    for name in ("fixed_s", "decode_seq_s", "kv_token_s", "prefill_pair_s", "chunk_s"):
        assert getattr(found, name) == pytest.approx(getattr(CURVED, name), rel=1e-6), name
    assert [knot for knot, _ in found.token_curve] == [knot for knot, _ in CURVED.token_curve]
    assert [s for _, s in found.token_curve] == pytest.approx([s for _, s in CURVED.token_curve], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("cost", [LINEAR, CURVED], ids=["linear", "curved"])
def test_noisy_points_give_a_cost_that_predicts_within_four_percent(cost: StepCost) -> None:
    found = fitted(measured(cost, random.Random(1), num_rounds=3))
    exact = measured(cost)
    assert max(map(abs, errors_of(found, exact))) < 0.04


def test_a_point_far_off_doesnt_move_the_others() -> None:
    points = measured(LINEAR)
    points[5] = replace(points[5], seconds=20 * points[5].seconds)
    errors = errors_of(fitted(points), points)
    assert max(abs(error) for place, error in enumerate(errors) if place != 5) < 1e-3


def test_a_curve_is_chosen_only_where_it_earns_its_unknowns() -> None:
    linear, curved = (fit_cost(measured(cost), 16, "x", "y") for cost in (LINEAR, CURVED))
    assert not linear[0].cost.token_curve
    assert curved[0].cost.token_curve
    assert curved[0].rms < 0.001 < 0.05 < curved[1].rms


def test_what_costs_nothing_is_zero_not_negative() -> None:
    free = StepCost(0.01, 1e-3, 2e-3, 0.0, 0.0, kv_granule_tokens=16)
    rng = random.Random(2)
    points = [replace(point, seconds=point.seconds * rng.uniform(0.98, 1.02)) for point in measured(free)]
    found = fitted(points)  # StepCost refuses negative numbers
    assert found.kv_token_s < 1e-6
    assert found.fixed_s == pytest.approx(0.01, rel=0.1)


def test_nonnegative_least_squares_is_the_constrained_minimum() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative_least_squares(matrix, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    # Without the constraint the slope would be -1: the best constant is left.
    assert nonnegative_least_squares(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_speed_is_how_much_longer_steps_took() -> None:
    points = [Point("a", StepWork(0, 1, 16, 0.0, 0), 1, 1.2 * LINEAR.seconds(StepWork(0, 1, 16, 0.0, 0)))]
    assert speed_of(LINEAR, points) == pytest.approx(1.2)


def test_the_cost_says_how_far_it_is_off_at_the_reference_steps() -> None:
    """So that a fit's own error there isn't taken for the machine's speed."""
    points = [
        replace(point, seconds=1.1 * point.seconds) if point.benchmark in REFERENCE_NAMES else point
        for point in measured(LINEAR)
    ]
    cost = fit_cost(points, 16, "x", "y")[0].cost
    reference = [point for point in points if point.benchmark in REFERENCE_NAMES]
    assert speed_of(cost, reference) == cost.reference_ratio
    assert cost.reference_ratio > 1.02
    assert fit_cost(measured(LINEAR), 16, "x", "y")[0].cost.reference_ratio == pytest.approx(1.0)


def test_points_that_are_all_alike_cant_be_fitted() -> None:
    point = Point("a", StepWork(0, 1, 16, 0.0, 0), 1, 1.0)
    with pytest.raises(SettingError, match="at least two that differ"):
        fit_cost([point, point], 16, "x", "y")


def test_the_committed_preset_is_what_its_committed_points_give() -> None:
    preset = load_cost("cpu-smollm2")
    measured_there = PointsFile.load(Path(fitting.__file__).parent / "points" / "cpu-smollm2.json")
    fit, _ = fit_cost(measured_there.points, measured_there.kv_granule_tokens, preset.name, measured_there.source)
    assert errors_of(preset, measured_there.points) == pytest.approx(fit.errors, abs=1e-6)
    assert preset.source == measured_there.source
