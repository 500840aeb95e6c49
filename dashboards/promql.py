"""PromQL from small typed parts, so that wrong maths can't be written.

- a rate is only taken of counters and histograms, never of gauges;
- a quantile is taken over `sum by (le)` of bucket rates, so that replicas are merged before the quantile;
- a ratio (`*_ratio`, `*_perc`) is averaged or maximised over replicas, never summed;
- a division by zero traffic gives no sample (a gap), not NaN.

Every function returns a plain PromQL string. `by` lists the labels that stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboards.catalog import CATALOG, Catalog
from replica.metrics import MetricSpec


class WrongKind(TypeError):
    """A query that the metric's kind forbids. Raised while generating."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series are meant and over which window rates are taken.

    `where` holds label matchers that every query gets, such as `model_name=~"$model_name"`. `window` must cover at
    least four scrapes, or a rate is a gap whenever one scrape is late.
    """

    where: tuple[str, ...]
    window: str
    catalog: Catalog = CATALOG

    def total(self, name: str, *, by: tuple[str, ...] = (), where: tuple[str, ...] = ()) -> str:
        """Sum of a gauge that counts something."""
        spec = self._of_kind(name, "gauge")
        if is_ratio(spec):
            raise WrongKind(f"{name} is a ratio: two replicas at 40 % aren't at 80 %; use mean or peak")
        return f"sum{_by(by)} ({self._series(spec, where)})"

    def mean(self, name: str, *, by: tuple[str, ...] = ()) -> str:
        """Average of a gauge over the series that differ in other labels than `by`."""
        return f"avg{_by(by)} ({self._series(self._of_kind(name, 'gauge'))})"

    def peak(self, name: str, *, by: tuple[str, ...] = ()) -> str:
        """Largest value of a gauge over the series that differ in other labels than `by`."""
        return f"max{_by(by)} ({self._series(self._of_kind(name, 'gauge'))})"

    def lowest_lately(self, name: str, *, by: tuple[str, ...] = ()) -> str:
        """Smallest value that a counting gauge had within the window."""
        spec = self._of_kind(name, "gauge")
        return f"sum{_by(by)} (min_over_time({self._series(spec)}[{self.window}]))"

    def slope(self, name: str, *, by: tuple[str, ...] = ()) -> str:
        """Growth of a gauge per second, by linear regression over the window."""
        return f"sum{_by(by)} (deriv({self._series(self._of_kind(name, 'gauge'))}[{self.window}]))"

    def count(self, name: str) -> str:
        """Number of series of a gauge: of replicas, for a gauge that every replica has once."""
        return f"count({self._series(self._of_kind(name, 'gauge'))})"

    def per_second(self, name: str, *, by: tuple[str, ...] = (), where: tuple[str, ...] = ()) -> str:
        """Rate of a counter, or of a histogram's observations."""
        spec = self.catalog[name]
        if spec.kind == "gauge":
            raise WrongKind(f"{name} is a gauge: it has no rate")
        suffix = "_count" if spec.kind == "histogram" else ""
        return f"sum{_by(by)} (rate({self._series(spec, where, suffix)}[{self.window}]))"

    def share_of_time(self, name: str, *, by: tuple[str, ...] = ()) -> str:
        """Average over processes of the rate of a counter of seconds: 0 to 1."""
        spec = self._of_kind(name, "counter")
        if not name.endswith("_seconds"):
            raise WrongKind(f"{name} doesn't count seconds")
        return f"avg{_by(by)} (rate({self._series(spec)}[{self.window}]))"

    def average(self, name: str, *, by: tuple[str, ...] = ()) -> str:
        """Mean of a histogram's observations."""
        spec = self._of_kind(name, "histogram")
        total = f"sum{_by(by)} (rate({self._series(spec, suffix='_sum')}[{self.window}]))"
        return ratio(total, self.per_second(name, by=by))

    def quantile(self, q: float, name: str, *, by: tuple[str, ...] = ()) -> str:
        """Quantile `q` (0 to 1) of a histogram's observations, all series merged but for `by`."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
        spec = self._of_kind(name, "histogram")
        rates = f"rate({self._series(spec, suffix='_bucket')}[{self.window}])"
        return f"histogram_quantile({q:g}, sum{_by(('le', *by))} ({rates}))"

    def series(self, name: str) -> str:
        """The bare gauge, for `absent` and template variables."""
        return self._series(self._of_kind(name, "gauge"))

    def _series(self, spec: MetricSpec, where: tuple[str, ...] = (), suffix: str = "") -> str:
        matchers = ",".join((*self.where, *where))
        return f"{spec.series}{suffix}{{{matchers}}}" if matchers else spec.series + suffix

    def _of_kind(self, name: str, kind: str) -> MetricSpec:
        spec = self.catalog[name]
        if spec.kind != kind:
            raise WrongKind(f"{name} is a {spec.kind}, not a {kind}")
        return spec


def ratio(part: str, whole: str) -> str:
    """`part / whole`, and no sample where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def is_ratio(spec: MetricSpec) -> bool:
    return spec.name.endswith(("_ratio", "_perc"))


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
