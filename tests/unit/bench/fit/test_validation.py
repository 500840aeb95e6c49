"""Validation: an engine whose step cost is known agrees with the simulator, one that isn't what was fitted doesn't."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.fit.fitting import fit_cost
from bench.fit.micro import MicroBenchmarks, decode
from bench.fit.points_file import PointsFile
from bench.fit.reports import cost_table, points_table, validation_table
from bench.fit.validation import LOADS, LoadComparison, Play, validate
from bench.simulate.step_cost import StepCost
from replica.errors import SettingError
from tests.unit.bench.fit.engines import CURVED, LINEAR, engine


def compared(real: StepCost, believed: StepCost) -> list[LoadComparison]:
    return validate(engine(real.of_plan), believed, 3.0, lambda _: None)


def test_an_engine_of_known_cost_agrees_with_the_simulator_within_a_percent() -> None:
    found = compared(CURVED, CURVED)
    assert [comparison.load for comparison in found] == [load.name for load in LOADS]
    for comparison in found:
        assert comparison.agrees
        assert len(comparison.plays) == 3
        for play in comparison.plays:
            assert play.measured["num_finished"] == play.num_requests
            for name in play.measured:
                assert abs(play.error(name)) < 0.01, (comparison.load, name)


def test_a_slower_machine_is_found_by_the_reference_steps() -> None:
    for comparison in compared(CURVED.slowed(1.3), CURVED):
        for play in comparison.plays:
            assert (play.speed_before, play.speed_after) == pytest.approx((1.3, 1.3))
            assert all(abs(play.error(name)) < 0.01 for name in play.measured)


def test_a_cost_that_is_wrong_in_its_parts_is_outside() -> None:
    found = compared(LINEAR, replace(LINEAR, decode_seq_s=12e-3, chunk_s=20e-3))
    assert not all(comparison.agrees for comparison in found)


def test_progress_tells_each_load_and_how_far_it_is() -> None:
    heard: list[str] = []
    validate(engine(LINEAR.of_plan), LINEAR, 2.0, heard.append, LOADS[:1], rounds=2)
    assert heard[0] == "reference steps before the first load"
    assert heard[-1] == "reference steps after load steady, 2/2"
    assert 4 <= sum("requests have ended" in line for line in heard) <= 22


def test_one_play_that_the_machine_spoiled_does_not_decide() -> None:
    numbers = {"ttft_p50_s": 1.0, "output_tokens_per_s": 100.0}
    plays = tuple(Play(5, 1.0, 1.0, numbers, numbers | {"ttft_p50_s": one}) for one in (1.1, 3.0, 1.0))
    assert LoadComparison("steady", plays).error("ttft_p50_s") == pytest.approx(0.1)
    assert LoadComparison("steady", plays).agrees
    assert not LoadComparison("steady", plays[1:2]).agrees


def test_slowed_stretches_every_step() -> None:
    virtual = engine(CURVED.of_plan)
    points = MicroBenchmarks(virtual).measure([decode(4, 30, virtual.config.scheduler)], range(1), lambda *_: None)
    for point in points:
        assert CURVED.slowed(2.0).seconds(point.work) == pytest.approx(2 * CURVED.seconds(point.work))


def test_tables_show_every_point_and_the_verdict() -> None:
    virtual = engine(CURVED.of_plan)
    points = MicroBenchmarks(virtual).measure([decode(4, 30, virtual.config.scheduler)], range(1), lambda *_: None)
    fit, _ = fit_cost(points, 16, "x", "y")
    assert len(list(points_table(points, fit))) == 1 + len(points)
    assert sum("curve at" in line for line in cost_table(CURVED)) == len(CURVED.token_curve)
    numbers = {"ttft_p50_s": 1.0, "output_tokens_per_s": 100.0, "num_steps": 10}
    play = Play(5, 1.0, 1.0, numbers, numbers | {"ttft_p50_s": 1.2})
    lines = list(validation_table([LoadComparison("steady", (play,))]))
    assert lines[1].endswith("+20.0%  +20.0%  OUTSIDE")
    assert lines[2].endswith("+0.0%  +0.0%  ok")
    assert lines[3].endswith("+0.0%")
    assert lines[-1].endswith("on every load: no")


def test_points_come_back_from_their_file_as_they_went(tmp_path: Path) -> None:
    virtual = engine(CURVED.of_plan)
    points = MicroBenchmarks(virtual).measure([decode(4, 30, virtual.config.scheduler)], range(1), lambda *_: None)
    written = PointsFile("a machine", 16, tuple(points), "cuda")
    written.save(tmp_path / "points.json")
    assert PointsFile.load(tmp_path / "points.json") == written


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": "x", "kv_granule_tokens": 1, "points": [{}]}'])
def test_a_file_that_holds_no_points_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "points.json"
    path.write_text(text)
    with pytest.raises(SettingError, match="a file of measured points"):
        PointsFile.load(path)
