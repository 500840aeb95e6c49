from dataclasses import replace

import pytest

from bench.simulate.step_cost import H100_8B, StepCost
from bench.story.experiment import StorySize, play_batching, real_size, simulated_size, virtual_engines
from bench.story.lengths import spreads
from bench.story.report import markdown_table, verdict_lines
from bench.story.spread import SpreadRow

SIZE = replace(real_size(0), spreads=("equal", "+-100%", "W7"))
CPU_LIKE = StepCost(0.05, 0.002, 0.005, 0.0, 0.0, token_curve=((1, 0.0), (3, 0.01), (200, 0.2)), name="cpu-like")


def silent(_: str) -> None:
    pass


def rows(played_at: StepCost, explained_by: StepCost) -> list[SpreadRow]:
    return play_batching(virtual_engines(played_at), SIZE, explained_by, silent)[0]


@pytest.mark.parametrize("cost", [H100_8B, CPU_LIKE], ids=lambda cost: cost.name)
def test_equal_lengths_tie_and_spread_ones_gain_what_the_closed_form_says(cost: StepCost) -> None:
    equal, uniform, zipf = rows(cost, cost)
    assert equal.gain_in_steps == 1.0
    assert equal.gain_in_seconds == pytest.approx(1.0, abs=1e-9)
    assert uniform.gain_in_steps == pytest.approx(uniform.predicted.gain_in_steps, rel=0.05)
    assert zipf.gain_in_steps == pytest.approx(zipf.predicted.gain_in_steps, rel=0.05)
    assert zipf.gain_in_steps > 4
    for row in (equal, uniform, zipf):
        assert row.gain_in_seconds == pytest.approx(row.predicted.gain_in_seconds, rel=0.03)
        assert all(check.passed for check in row.checks())
    assert [len(row.checks()) for row in (equal, uniform, zipf)] == [3, 2, 2]


def test_a_continuous_batch_is_full_until_nobody_waits_and_a_fixed_one_leaves_a_queue() -> None:
    zipf = rows(H100_8B, H100_8B)[2]
    assert zipf.continuous.waiting_then == 0
    assert zipf.static.waiting_then > SIZE.spread.batch_size * SIZE.spread.num_batches / 2
    assert zipf.continuous.whole.width_by_quarter[:2] == pytest.approx((8, 8))
    assert max(zipf.static.whole.width_by_quarter) < 3
    assert set(zipf.continuous.picture[:10]) == {"█"}
    assert len(set(zipf.static.picture)) > 3


def test_seconds_that_the_cost_does_not_explain_fail_the_check() -> None:
    per_token = StepCost(0.001, 0.002, 0.005, 0.0, 0.0)
    equal, _, zipf = rows(played_at=per_token, explained_by=H100_8B)
    assert all(check.passed for check in equal.checks())
    assert [check.passed for check in zipf.checks()] == [True, False]
    assert zipf.checks()[1].as_line().startswith("FAIL W7: gain in undisturbed seconds is explained: ")


def test_a_batch_that_is_not_refilled_at_once_fails_the_check_of_steps() -> None:
    zipf = rows(H100_8B, H100_8B)[2]
    slower = replace(zipf, gain_in_steps=zipf.gain_in_steps * 0.93)
    assert [check.passed for check in slower.checks()] == [False, True]


@pytest.mark.parametrize("size", [simulated_size(0), real_size(0)], ids=["simulated", "real"])
def test_one_spread_of_each_size_must_tie_whatever_it_is_called(size: StorySize) -> None:
    chosen = [one for one in spreads(size.spread.mean_output_tokens) if one.name in size.spreads]
    assert [one.name for one in chosen if one.longest == one.mean] == ["equal"]
    renamed = replace(rows(H100_8B, H100_8B)[0], name="no spread")
    assert [check.name for check in renamed.checks()][2] == "no spread: gain in undisturbed seconds is a tie"


def test_unequal_engines_fail_the_tie() -> None:
    equal = rows(H100_8B, H100_8B)[0]
    unequal = replace(equal, gain_in_seconds=1.06)
    assert [check.passed for check in unequal.checks()] == [True, True, False]


def test_a_tie_in_the_seconds_that_went_by_is_told_apart_from_the_checks() -> None:
    equal, _, zipf = rows(H100_8B, H100_8B)
    assert zipf.tie_as_timed() is None
    assert verdict_lines([equal, zipf], equal.checks())[3:] == [
        "     equal: gain in seconds as timed: 1.000 (+0.0%), not checked: also a tie"
    ]
    slower = replace(equal, gain_as_timed=0.92)
    assert all(check.passed for check in slower.checks())
    assert slower.tie_as_timed() == "equal: gain in seconds as timed: 0.920 (-8.0%), not checked: a tie is not shown"
    assert markdown_table([slower])[2].endswith("| 1.00 (1.00) | 0.92 |")


def test_the_same_seed_tells_the_same_story() -> None:
    assert rows(CPU_LIKE, CPU_LIKE) == rows(CPU_LIKE, CPU_LIKE)
