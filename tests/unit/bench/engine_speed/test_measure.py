"""Rounds: sides take turns, slow ones leave early, and who works while others are measured is seen."""

from __future__ import annotations

from bench.engine_speed.limits import MachineLimits
from bench.engine_speed.measure import measure
from bench.engine_speed.rows import Row
from tests.unit.bench.engine_speed.fakes import FakeSide

ROWS = (Row(1, 4, 2), Row(2, 4, 1))
LIMITS = MachineLimits(1.0, 1.0)


def _at_once() -> None:
    """Everybody is idle at once."""


def test_sides_alternate_and_a_slow_one_runs_in_the_first_rounds_only() -> None:
    log: list[str] = []
    sides = [FakeSide("a", 1.0, log), FakeSide("b", 2.0, log), FakeSide("slow", 9.0, log)]
    told: list[str] = []
    found = measure(
        ROWS,
        sides,
        lambda: LIMITS,
        float,
        _at_once,
        rounds=2,
        fewer_rounds={"slow": 1},
        vocab_size=50,
        progress=told.append,
    )
    assert log[:3] == ["4 x 32/8 a", "4 x 32/8 b", "4 x 32/8 slow"]
    assert log[3:] == [
        *("1 x 4/2 a", "1 x 4/2 b", "1 x 4/2 slow", "2 x 4/1 a", "2 x 4/1 b", "2 x 4/1 slow"),
        *("1 x 4/2 b", "1 x 4/2 a", "2 x 4/1 b", "2 x 4/1 a"),
    ]
    assert [len(found.runs[ROWS[0]][name]) for name in ("a", "b", "slow")] == [2, 2, 1]
    assert found.limits == [LIMITS] * 3
    assert "round 2/2: 2 x 4/1 on b" in told


def test_a_side_that_is_busy_while_another_is_measured_is_noticed() -> None:
    log: list[str] = []
    sides = [FakeSide("a", 2.0, log), FakeSide("b", 4.0, log, beside=1.0)]
    found = measure(
        ROWS, sides, lambda: LIMITS, float, _at_once, rounds=1, fewer_rounds={}, vocab_size=50, progress=lambda _: None
    )
    assert found.busy_beside == 0.5


def test_one_side_alone_has_nobody_beside_it() -> None:
    sides = [FakeSide("a", 2.0, [], beside=1.0)]
    found = measure(
        ROWS, sides, lambda: LIMITS, float, _at_once, rounds=1, fewer_rounds={}, vocab_size=50, progress=lambda _: None
    )
    assert found.busy_beside == 0.0


def test_other_work_of_the_machine_is_noticed() -> None:
    log: list[str] = []
    side = FakeSide("a", 2.0, log, beside=1.5)
    found = measure(
        ROWS,
        [side],
        lambda: LIMITS,
        lambda: 4.5 * len(log),
        _at_once,
        rounds=1,
        fewer_rounds={},
        vocab_size=50,
        progress=lambda _: None,
    )
    assert (found.disturbance, found.busy_beside) == (1.5, 0.0)
