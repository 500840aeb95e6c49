"""Metrics of a replica process as one table of specs, and the registry that is built from such a table.

The tables are the single source: exporters create their series from them, the dashboards' catalog reads them.
Names are vLLM's after our prefix. Labels never hold a request id, a user, a prompt or an error text.
Histogram bounds are fixed, the same in every process, so that series of all replicas can be added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "brimful_"

LATENCY_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: `name` without the prefix (a counter's without `_total`, which the exposition adds)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """The name as Prometheus stores it (a histogram's stem: add `_bucket`, `_sum` or `_count`)."""
        return f"{PREFIX}{self.name}_total" if self.kind == "counter" else f"{PREFIX}{self.name}"


class Metrics:
    """The live series of one process, made from tables of specs; `common` labels (model_name, replica) are put on all.

    A name that is in no table raises `KeyError`: a typo can't create a metric that no dashboard knows.
    """

    def __init__(self, specs: tuple[MetricSpec, ...], common: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._common = common
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._series: dict[tuple[object, ...] | str, Counter | Gauge | Histogram] = {}
        for spec in specs:
            labels = (*common, *spec.labels)
            if spec.kind == "histogram":
                buckets = spec.buckets
                self._metrics[spec.name] = Histogram(
                    PREFIX + spec.name, spec.help, labels, registry=self.registry, buckets=buckets
                )
            else:
                kind = Counter if spec.kind == "counter" else Gauge
                self._metrics[spec.name] = kind(PREFIX + spec.name, spec.help, labels, registry=self.registry)
            if not spec.labels:
                self._find(spec.name, {})

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter; nothing here ever goes down."""
        metric = self._find(name, labels)
        if not isinstance(metric, Counter):
            raise TypeError(f"{name} is no counter")
        metric.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        metric = self._find(name, labels)
        if not isinstance(metric, Gauge):
            raise TypeError(f"{name} is no gauge")
        metric.set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        metric = self._find(name, labels)
        if not isinstance(metric, Histogram):
            raise TypeError(f"{name} is no histogram")
        metric.observe(value)

    def _find(self, name: str, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        """One series. Kept, because the library's own look-up costs more than counting."""
        key = (name, *labels.items()) if labels else name
        series = self._series.get(key)
        if series is None:
            metric, all_labels = self._metrics[name], self._common | labels
            series = self._series[key] = metric.labels(**all_labels) if all_labels else metric
        return series


REPLICA_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("num_requests_running", "gauge", "Sequences that hold a place in the running batch."),
    MetricSpec("num_requests_waiting", "gauge", "Sequences that wait for a place."),
    MetricSpec("num_requests_waiting_by_reason", "gauge", "Waiting sequences by what stops them.", ("reason",)),
    MetricSpec("kv_cache_usage_perc", "gauge", "Share of KV blocks held by sequences, 0 to 1."),
    MetricSpec("kv_cache_cached_ratio", "gauge", "Share of KV blocks free to take that keep a prefix."),
    MetricSpec("kv_cache_blocks", "gauge", "KV blocks in all."),
    MetricSpec("max_num_seqs", "gauge", "Limit: sequences in one step."),
    MetricSpec("max_num_batched_tokens", "gauge", "Limit: tokens in one step."),
    MetricSpec("oldest_waiting_seconds", "gauge", "Age of the oldest waiting sequence."),
    MetricSpec("iteration_tokens_total", "histogram", "Tokens planned in one step.", (), TOKEN_BUCKETS),
    MetricSpec("iteration_seconds", "histogram", "Duration of one step.", (), LATENCY_BUCKETS_S),
    MetricSpec("engine_idle_seconds", "counter", "Time in which the engine had nothing to compute."),
    MetricSpec("step_tokens", "counter", "Tokens computed, by kind: prefill, decode, recomputed.", ("kind",)),
    MetricSpec("num_preemptions", "counter", "Sequences that gave their blocks back and were recomputed."),
    MetricSpec("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    MetricSpec("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    MetricSpec("prompt_tokens", "counter", "Prompt tokens of requests that got a first token."),
    MetricSpec("generation_tokens", "counter", "Tokens generated for clients."),
    MetricSpec("request_success", "counter", "Sequences ended, by reason.", ("finished_reason",)),
    MetricSpec("request_queue_time_seconds", "histogram", "From arrival to the first chunk.", (), LATENCY_BUCKETS_S),
    MetricSpec("time_to_first_token_seconds", "histogram", "From arrival to the first token.", (), LATENCY_BUCKETS_S),
    MetricSpec("inter_token_latency_seconds", "histogram", "Between two tokens of a sequence.", (), LATENCY_BUCKETS_S),
    MetricSpec("e2e_request_latency_seconds", "histogram", "From arrival to the last token.", (), LATENCY_BUCKETS_S),
)
