"""The metric tables themselves: what would make dashboards wrong or Prometheus sick."""

from __future__ import annotations

import pytest

from dashboards.catalog import CATALOG
from replica.metrics import MetricSpec

SPECS = list(CATALOG.specs.values())

BOUNDED_LABELS = {
    "kind",
    "reason",
    "finished_reason",
    "model_name",
    "policy",
    "route",
    "status",
}
"""Each has a few values that we choose. Never: request ids, users, prompts, error texts, sessions."""


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_labels_have_few_values(spec: MetricSpec) -> None:
    assert set(spec.labels) <= BOUNDED_LABELS
    assert len(spec.labels) <= 3


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_histograms_have_fixed_rising_bounds_and_others_none(spec: MetricSpec) -> None:
    assert (spec.kind == "histogram") == bool(spec.buckets)
    assert list(spec.buckets) == sorted(set(spec.buckets))
    assert len(spec.buckets) <= 25


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_names_and_help_are_fit_for_people(spec: MetricSpec) -> None:
    assert spec.help.endswith(".")
    assert not spec.name.startswith("brimful")
    if spec.kind == "counter":
        assert not spec.name.endswith("_total"), "the exposition adds it"
