import pytest

from router.views import ReplicaViews
from tests.unit.router.loads import report


@pytest.mark.parametrize(
    ("arrivals", "kept"),
    [
        ([("e", 1), ("e", 2)], ("e", 2)),
        ([("e", 2), ("e", 1)], ("e", 2)),
        ([("e", 2), ("f", 0)], ("f", 0)),
        ([("e", 2), ("f", 0), ("e", 3)], ("f", 0)),
        ([("e", 2), ("f", 5), ("g", 0), ("f", 6), ("e", 9)], ("g", 0)),
    ],
    ids=["in order", "out of order", "a new life begins anew", "an old life is over", "all old lives are over"],
)
def test_the_newest_report_is_kept(arrivals: list[tuple[str, int]], kept: tuple[str, int]) -> None:
    views = ReplicaViews()
    for epoch, number in arrivals:
        views.observe(report("a", epoch=epoch, number=number), 0.0)
    newest = views.newest()["a"].report
    assert (newest.epoch, newest.number) == kept


def test_observe_says_whether_it_was_news() -> None:
    views = ReplicaViews()
    assert [views.observe(report("a", number=n), 0.0) for n in (1, 1, 3, 2, 4)] == [True, False, True, False, True]


def test_age_counts_from_the_last_news_not_from_the_last_copy() -> None:
    views = ReplicaViews()
    views.observe(report("a", number=1), 10.0)
    views.observe(report("a", number=1), 12.0)
    assert views.newest()["a"].arrived_at_s == 10.0
    views.observe(report("a", number=2), 13.5)
    assert views.newest()["a"].arrived_at_s == 13.5


def test_a_forgotten_replica_has_no_report_and_no_past() -> None:
    views = ReplicaViews()
    views.observe(report("a", epoch="e", number=9), 0.0)
    views.forget("a")
    assert (views.seen("a"), views.newest()) == (None, {})
    assert views.observe(report("a", epoch="e", number=1), 1.0)
