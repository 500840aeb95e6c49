"""A rule is better only if it is so under every load and starves nobody."""

from __future__ import annotations

import pytest

from bench.victims.rules import RULES
from bench.victims.study import Measured
from bench.victims.verdict import REFERENCE, better_rules, table
from tests.unit.scheduler.rig import world

NEWEST = Measured("newest", 100, 1000.0, 1.1, 0.5, 3, 0.0, 10.0, 5.0, 9.0, 0.1, 20.0, 2.0)
GOOD = NEWEST._replace(rule="good", recomputed_tokens=900.0, longest_wait_s=22.0, longest_stall_s=3.0)


def test_less_recomputed_under_every_load_is_better() -> None:
    measured = {("W1", 1.0): {"newest": NEWEST, "good": GOOD}, ("W2", 1.0): {"newest": NEWEST, "good": GOOD}}
    assert better_rules(measured) == ["good"]
    measured["W2", 1.2] = {"newest": NEWEST, "good": NEWEST._replace(rule="good")}
    assert better_rules(measured) == []


@pytest.mark.parametrize(
    "flawed",
    [
        GOOD._replace(recomputed_tokens=985.0),
        GOOD._replace(num_over_3=1.1),
        GOOD._replace(longest_wait_s=22.1),
        GOOD._replace(longest_stall_s=3.01),
        GOOD._replace(throughput=9.9),
    ],
)
def test_one_flaw_is_enough_to_keep_the_shipped_rule(flawed: Measured) -> None:
    assert better_rules({("W1", 1.0): {"newest": NEWEST, "good": flawed}}) == []


def test_the_table_has_a_line_for_each_rule() -> None:
    lines = list(table({"newest": NEWEST, "good": GOOD}))
    assert len(lines) == 3
    assert {len(line) for line in lines} == {len(lines[0])}


def test_the_shipped_rule_is_the_one_that_a_scheduler_has_unless_it_is_told_another() -> None:
    assert world().scheduler._state.victim_rule is RULES[REFERENCE]
