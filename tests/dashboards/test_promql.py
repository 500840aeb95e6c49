"""Queries: the exact text, and what is refused."""

from __future__ import annotations

import pytest

from dashboards.catalog import Catalog, UnknownMetric
from dashboards.promql import Scope, WrongKind, ratio
from replica.metrics import REPLICA_METRICS, MetricSpec

CATALOG = Catalog.of(
    (
        MetricSpec("depth", "gauge", "Waiting."),
        MetricSpec("full_ratio", "gauge", "Share."),
        MetricSpec("full_perc", "gauge", "Share."),
        MetricSpec("done", "counter", "Ended.", ("reason",)),
        MetricSpec("idle_seconds", "counter", "Idle."),
        MetricSpec("wait_seconds", "histogram", "Waited.", (), (1.0,)),
    )
)
SCOPE = Scope(where=('m="a"',), window="1m", catalog=CATALOG)
BARE = Scope(where=(), window="5m", catalog=CATALOG)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (SCOPE.total("depth"), 'sum (brimful_depth{m="a"})'),
        (BARE.total("depth", by=("x", "y")), "sum by (x, y) (brimful_depth)"),
        (SCOPE.total("depth", where=('r="b"',)), 'sum (brimful_depth{m="a",r="b"})'),
        (BARE.mean("full_ratio"), "avg (brimful_full_ratio)"),
        (BARE.peak("full_perc", by=("x",)), "max by (x) (brimful_full_perc)"),
        (BARE.lowest_lately("depth"), "sum (min_over_time(brimful_depth[5m]))"),
        (BARE.slope("depth"), "sum (deriv(brimful_depth[5m]))"),
        (BARE.count("depth"), "count(brimful_depth)"),
        (SCOPE.per_second("done", by=("reason",)), 'sum by (reason) (rate(brimful_done_total{m="a"}[1m]))'),
        (BARE.per_second("wait_seconds"), "sum (rate(brimful_wait_seconds_count[5m]))"),
        (BARE.share_of_time("idle_seconds"), "avg (rate(brimful_idle_seconds_total[5m]))"),
        (
            BARE.average("wait_seconds", by=("x",)),
            "sum by (x) (rate(brimful_wait_seconds_sum[5m])) / (sum by (x) (rate(brimful_wait_seconds_count[5m])) > 0)",
        ),
        (
            SCOPE.quantile(0.95, "wait_seconds", by=("x",)),
            'histogram_quantile(0.95, sum by (le, x) (rate(brimful_wait_seconds_bucket{m="a"}[1m])))',
        ),
        (BARE.series("depth"), "brimful_depth"),
        (ratio("a", "b"), "a / (b > 0)"),
    ],
)
def test_query_text(query: str, text: str) -> None:
    assert query == text


def test_rate_of_a_gauge_is_refused() -> None:
    with pytest.raises(WrongKind, match="depth is a gauge: it has no rate"):
        SCOPE.per_second("depth")


@pytest.mark.parametrize("name", ["full_ratio", "full_perc"])
def test_sum_of_ratios_is_refused(name: str) -> None:
    with pytest.raises(WrongKind, match=f"{name} is a ratio"):
        SCOPE.total(name)


def test_raw_counter_and_quantile_of_a_counter_are_refused() -> None:
    with pytest.raises(WrongKind, match="done is a counter, not a gauge"):
        SCOPE.total("done")
    with pytest.raises(WrongKind, match="done is a counter, not a histogram"):
        SCOPE.quantile(0.5, "done")
    with pytest.raises(WrongKind, match="done doesn't count seconds"):
        SCOPE.share_of_time("done")
    with pytest.raises(ValueError, match="not at 95"):
        SCOPE.quantile(95, "wait_seconds")


def test_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(UnknownMetric, match="no metric table has 'depht'"):
        SCOPE.total("depht")


def test_two_tables_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two metric tables define num_requests_running"):
        Catalog.of(REPLICA_METRICS, REPLICA_METRICS[:1])
