"""Which replicas are believed to fail everything: whose failure it was, how long they are out, and who tries them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replica.metrics import Metrics
from router.health import FIRST_S, LONGEST_S, MAX_CASES, SUSPECT_S, TRIAL_S, ReplicaHealth
from router.metrics import ROUTER_METRICS
from tests.unit.router.loads import Clock, view

ALL = ["a", "b", "c", "d"]


@pytest.fixture
def health(clock: Clock) -> ReplicaHealth:
    health = ReplicaHealth(clock)
    health.num_replicas = len(ALL)
    return health


def fail(health: ReplicaHealth, *request_ids: str, at: str = "a", then: str = "b") -> None:
    """Requests that one replica fails and another one answers."""
    for request_id in request_ids:
        health.failed(request_id, at)
        health.succeeded(request_id, then)


def test_the_third_failure_in_a_row_ejects(health: ReplicaHealth) -> None:
    fail(health, "r1", "r2")
    assert health.candidates(ALL) == ALL
    fail(health, "r3")
    assert health.candidates(ALL) == ["b", "c", "d"]


def test_an_answer_between_two_failures_begins_the_count_anew(health: ReplicaHealth) -> None:
    fail(health, "r1", "r2")
    health.succeeded("other", "a")
    fail(health, "r3", "r4")
    assert health.candidates(ALL) == ALL
    fail(health, "r5")
    assert health.ejected() == {"a"}


def test_a_failure_from_before_an_answer_does_not_count_when_its_verdict_comes_after_it(health: ReplicaHealth) -> None:
    for request_id in ("r1", "r2", "r3"):
        health.failed(request_id, "a")
    health.succeeded("other", "a")
    for request_id in ("r1", "r2", "r3"):
        health.succeeded(request_id, "b")
    assert (health.ejected(), health.failing()) == (set(), set())


def test_a_failure_without_another_replicas_answer_is_nobodys(health: ReplicaHealth) -> None:
    for number in range(20):
        health.failed(f"left{number}", "a")  # their clients left, or it was the second try
        health.failed(f"poison{number}", "b")
        health.failed(f"poison{number}", "c")
        health.succeeded(f"poison{number}", "d")  # of n answers one went well
    assert health.ejected() == set()
    assert health.failing() == {"a", "b", "c"}


def test_the_same_request_counts_once(health: ReplicaHealth) -> None:
    for _ in range(5):
        fail(health, "r")
    assert health.ejected() == set()


def test_of_several_answers_that_a_replica_fails_one_counts(health: ReplicaHealth) -> None:
    for request_id in ("r1", "r2", "r3"):
        assert health.ejected() == set()
        for _ in range(3):
            health.failed(request_id, "a")
        health.succeeded(request_id, "b")
    assert health.ejected() == {"a"}


@pytest.mark.parametrize(("num_replicas", "num_ejected"), [(1, 0), (2, 1), (3, 1), (4, 2), (8, 4)])
def test_never_more_than_half_are_ejected(clock: Clock, num_replicas: int, num_ejected: int) -> None:
    health, names = ReplicaHealth(clock), [f"r{number}" for number in range(num_replicas)]
    health.num_replicas = num_replicas
    for name in names:
        fail(health, *(f"{name}-{number}" for number in range(9)), at=name, then="elsewhere")
    assert len(health.ejected()) == num_ejected


def test_one_that_is_ejected_is_chosen_when_there_is_no_other(health: ReplicaHealth) -> None:
    fail(health, "r1", "r2", "r3")
    assert health.candidates(["a"]) == ["a"]
    assert health.candidates(["a", "b"], {"b"}) == ["a"]


def test_what_failed_elsewhere_goes_to_none_that_has_failed_something_unless_all_have(health: ReplicaHealth) -> None:
    health.failed("r1", "b")
    assert health.candidates(ALL) == ALL
    assert health.candidates(ALL, {"a"}) == ["c", "d"]
    for name in "cd":
        health.failed(f"r-{name}", name)
    assert health.candidates(ALL, {"a"}) == ["b", "c", "d"]


def test_when_its_time_is_over_one_request_at_a_time_tries_it(health: ReplicaHealth, clock: Clock) -> None:
    fail(health, "r1", "r2", "r3")
    clock.now_s += FIRST_S - 0.1
    assert "a" not in health.candidates(ALL)
    clock.now_s += 0.1
    assert "a" in health.candidates(ALL)
    health.chosen("trial", "a")
    clock.now_s += TRIAL_S - 0.1
    assert "a" not in health.candidates(ALL)
    health.succeeded("trial", "a")
    assert (health.candidates(ALL), health.failing()) == (ALL, set())


def test_a_trial_that_says_nothing_is_followed_by_another(health: ReplicaHealth, clock: Clock) -> None:
    fail(health, "r1", "r2", "r3")
    for _ in range(3):
        clock.now_s += FIRST_S
        assert "a" in health.candidates(ALL)
        health.chosen("trial", "a")
        health.ended("trial")
        assert "a" not in health.candidates(ALL)


def test_a_trial_of_which_nothing_is_heard_gives_way_to_another(health: ReplicaHealth, clock: Clock) -> None:
    fail(health, "r1", "r2", "r3")
    clock.now_s += FIRST_S
    for trial in ("first", "second"):
        health.chosen(trial, "a")
        clock.now_s += TRIAL_S - 0.1
        assert "a" not in health.candidates(ALL)
        clock.now_s += 0.1
        assert "a" in health.candidates(ALL)


@pytest.mark.parametrize("go_elsewhere", [ReplicaHealth.chosen, ReplicaHealth.routed])
def test_a_trial_that_goes_elsewhere_is_followed_by_another(
    health: ReplicaHealth, clock: Clock, go_elsewhere: Callable[[ReplicaHealth, str, str], None]
) -> None:
    fail(health, "r1", "r2", "r3")
    clock.now_s += FIRST_S
    health.chosen("trial", "a")
    go_elsewhere(health, "trial", "b")
    assert "a" not in health.candidates(ALL)
    clock.now_s += FIRST_S
    assert "a" in health.candidates(ALL)


def test_a_trial_that_is_taken_where_it_was_sent_goes_on(health: ReplicaHealth, clock: Clock) -> None:
    fail(health, "r1", "r2", "r3")
    clock.now_s += FIRST_S
    health.chosen("trial", "a")
    health.routed("trial", "a")
    clock.now_s += FIRST_S
    assert "a" not in health.candidates(ALL)


def test_each_failed_trial_doubles_the_time_up_to_the_longest(health: ReplicaHealth, clock: Clock) -> None:
    fail(health, "r1", "r2", "r3")
    lasted = []
    for number in range(6):
        since_s = clock.now_s
        while "a" not in health.candidates(ALL):
            clock.now_s += 0.5
        lasted.append(clock.now_s - since_s)
        health.chosen(f"trial{number}", "a")
        health.failed(f"trial{number}", "a")
        health.ended(f"trial{number}")
        health.succeeded(f"trial{number}", "b")
    assert lasted == [FIRST_S, 10.0, 20.0, 40.0, LONGEST_S, LONGEST_S]


def test_failures_from_before_the_ejection_do_not_prolong_it(health: ReplicaHealth, clock: Clock) -> None:
    late = [f"late{number}" for number in range(5)]
    for request_id in late:
        health.failed(request_id, "a")
    fail(health, "r1", "r2", "r3")
    clock.now_s += FIRST_S
    for request_id in late:
        health.succeeded(request_id, "b")
    assert "a" in health.candidates(ALL)


def test_a_suspect_counts_as_busy_for_a_while(health: ReplicaHealth, clock: Clock) -> None:
    views = [view("a"), view("b")]
    health.failed("r1", "a")
    clock.now_s += SUSPECT_S / 4
    health.ramp(views, clock.now_s)
    assert [one.ramp for one in views] == [0.25, 1.0]
    views, now = [view("a"), view("b")], clock.now_s + SUSPECT_S
    health.ramp(views, now)
    assert [one.ramp for one in views] == [1.0, 1.0]


def test_one_that_is_gone_is_forgotten(health: ReplicaHealth) -> None:
    fail(health, "r1", "r2", "r3")
    health.forget("a")
    assert (health.failing(), health.candidates(ALL)) == (set(), ALL)


def test_requests_that_never_get_a_verdict_are_forgotten_after_the_latest_ones(health: ReplicaHealth) -> None:
    for number in range(MAX_CASES + 3):
        health.failed(f"r{number}", "a")
    for number in range(3):
        health.succeeded(f"r{number}", "b")
    assert health.ejected() == set()
    for number in range(3, 6):
        health.succeeded(f"r{number}", "b")
    assert health.ejected() == {"a"}


def test_ejections_are_counted_and_shown(health: ReplicaHealth, clock: Clock) -> None:
    metrics = Metrics(ROUTER_METRICS, {})
    health.attach(metrics, "m")

    def shown() -> tuple[float | None, float | None]:
        value, labels = metrics.registry.get_sample_value, {"model_name": "m"}
        return value("brimful_router_ejections_total", labels), value("brimful_router_ejected_replicas", labels)

    assert shown() == (0, 0)
    fail(health, "r1", "r2", "r3")
    assert shown() == (1, 1)
    clock.now_s += FIRST_S
    fail(health, "r4")
    assert shown() == (2, 1)
    health.succeeded("r5", "a")
    assert shown() == (2, 0)
