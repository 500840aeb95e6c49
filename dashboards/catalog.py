"""Every metric that a brimful process can expose, read from the tables that the exporters are built from.

A board or an alert can only name what is in here: an unknown name, or a use that its kind forbids, fails when the
board is generated, not months later as a panel with "No data".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deployments.metrics import INGRESS_METRICS
from replica.metrics import REPLICA_METRICS, MetricSpec
from router.metrics import ROUTER_METRICS


class UnknownMetric(KeyError):
    """A board names a metric that no process exposes. Our own mistake: raised while generating, never at run time."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Metric specs by name (without the prefix, as in the tables)."""

    specs: dict[str, MetricSpec]

    @classmethod
    def of(cls, *tables: Iterable[MetricSpec]) -> Catalog:
        """Raises `ValueError` when two tables give the same name: their series would be added up wrongly."""
        specs: dict[str, MetricSpec] = {}
        for spec in (spec for table in tables for spec in table):
            if spec.name in specs:
                raise ValueError(f"two metric tables define {spec.name}")
            specs[spec.name] = spec
        return cls(specs)

    def __getitem__(self, name: str) -> MetricSpec:
        try:
            return self.specs[name]
        except KeyError:
            raise UnknownMetric(f"no metric table has {name!r}") from None


CATALOG = Catalog.of(REPLICA_METRICS, ROUTER_METRICS, INGRESS_METRICS)
