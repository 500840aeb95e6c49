"""The goals of the routing study: what meets them, what misses them, and how that is told."""

from __future__ import annotations

from bench.routing.decision_speed import DecisionSpeed
from bench.routing.loads import Cell
from bench.routing.study import BASELINES, SHIPPED, Measured
from bench.routing.verdict import Goal, goal_lines, goals

W2, W4 = Cell("W2", 8, 1.0, 16), Cell("W4", 8, 1.0, 16)


def rows(ours: tuple[float, float], others: tuple[float, float]) -> dict[str, Measured]:
    """(TTFT p95, goodput) of the shipped policy and of all others."""
    return {
        name: Measured(name, 0.1, *(ours if name == SHIPPED else others), 0.9, 1.1, 0.0, 1.0)
        for name in (SHIPPED, *BASELINES)
    }


def missed(found: list[Goal]) -> list[bool | None]:
    return [goal.met for goal in found]


def test_three_percent_worse_is_still_good_and_four_is_not() -> None:
    assert missed(goals({W2: rows((1.03, 97.1), (1.0, 100.0))}, {}, []))[:2] == [True, True]
    assert missed(goals({W2: rows((1.04, 96.9), (1.0, 100.0))}, {}, []))[:2] == [False, False]


def test_twice_the_goodput_is_asked_only_of_prefix_heavy_loads() -> None:
    assert missed(goals({W2: rows((1.0, 100.0), (1.0, 100.0))}, {}, []))[2] is None
    assert missed(goals({W4: rows((1.0, 200.0), (1.0, 100.0))}, {}, []))[2] is True
    assert missed(goals({W4: rows((1.0, 199.0), (1.0, 100.0))}, {}, []))[2] is False


def test_session_affinity_is_not_load_only() -> None:
    found = rows((1.0, 200.0), (1.0, 100.0))
    found["session_affinity"] = found["session_affinity"]._replace(goodput=200.0)
    assert missed(goals({W4: found}, {}, []))[2] is True


def test_without_all_simple_policies_nothing_is_judged() -> None:
    found = rows((9.0, 1.0), (1.0, 100.0))
    del found["round_robin"]
    assert missed(goals({W4: found}, {}, []))[:3] == [None, None, None]


def test_bursts_are_judged_where_a_replica_gets_eight() -> None:
    assert missed(goals({}, {W2: 1.5, W2._replace(num_replicas=64): 3.0}, []))[3] is True
    assert missed(goals({}, {W2: 1.51}, []))[3] is False


def test_decisions_have_a_p99_among_64_and_a_mean_among_1000() -> None:
    assert missed(goals({}, {}, [DecisionSpeed(64, 300.0, 100.0, 200.0), DecisionSpeed(1000, 200.0, 100.0, 900.0)]))[4]
    assert missed(goals({}, {}, [DecisionSpeed(64, 100.0, 100.0, 201.0)]))[4] is False
    assert missed(goals({}, {}, [DecisionSpeed(1000, 201.0, 100.0, 100.0)]))[4] is False


def test_what_is_missed_is_told_with_its_numbers() -> None:
    lines = list(goal_lines(goals({W2: rows((1.1, 100.0), (1.0, 100.0))}, {}, [])))
    assert lines[0].endswith("MISSED in 1")
    assert lines[1].startswith("    W2, 8 replicas, 1 s, 16 routers: 1.100 s, round_robin 1.000 s (+10.0%)")
    assert lines[2].endswith(": met")
    assert lines[3].endswith(": not measured")
