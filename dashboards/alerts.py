"""Alerts for Prometheus: each one is a joint condition that a person can act on, with an entry in runbook.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards.promql import Scope, ratio

SCOPE = Scope(where=(), window="5m")
PER_REPLICA = ("model_name", "replica")


@dataclass(frozen=True, slots=True)
class Alert:
    """`expr` must hold for `hold` before it fires. `summary` is one line and may use `{{ $labels.x }}`."""

    name: str
    expr: str
    hold: str
    severity: str
    summary: str

    def json(self) -> dict[str, Any]:
        """One rule of a Prometheus rule file."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"dashboards/runbook.md#{self.name.lower()}"},
        }


def alerts() -> tuple[Alert, ...]:
    return (_queue_grows(), _kv_cache_at_limit(), _no_replicas(), _error_ratio(), _http_errors())


def rule_groups() -> list[dict[str, Any]]:
    """`groups` of a Prometheus rule file, and of a PrometheusRule's spec."""
    return [{"name": "brimful", "rules": [alert.json() for alert in alerts()]}]


def _queue_grows() -> Alert:
    waits = f"{SCOPE.lowest_lately('num_requests_waiting', by=PER_REPLICA)} > 0"
    not_shrinking = f"{SCOPE.slope('num_requests_waiting', by=PER_REPLICA)} >= 0"
    tokens = SCOPE.average("iteration_tokens_total", by=PER_REPLICA)
    few_tokens = f"{tokens} < 0.5 * {SCOPE.peak('max_num_batched_tokens', by=PER_REPLICA)}"
    running = SCOPE.total("num_requests_running", by=PER_REPLICA)
    few_sequences = f"{running} < 0.5 * {SCOPE.peak('max_num_seqs', by=PER_REPLICA)}"
    return Alert(
        "BrimfulQueueGrowsWhileStepsAreNarrow",
        "\nand ".join((waits, not_shrinking, few_tokens, few_sequences)),
        "5m",
        "warning",
        "{{ $labels.replica }} ({{ $labels.model_name }}) has waiting requests that don't get into half-empty steps.",
    )


def _kv_cache_at_limit() -> Alert:
    full = f"{SCOPE.peak('kv_cache_usage_perc', by=PER_REPLICA)} > 0.95"
    preempts = f"{SCOPE.per_second('num_preemptions', by=PER_REPLICA)} > 0"
    return Alert(
        "BrimfulKvCacheAtLimit",
        f"{full}\nand {preempts}",
        "5m",
        "warning",
        "{{ $labels.replica }} ({{ $labels.model_name }}) holds over 95 % of its KV cache and preempts.",
    )


def _no_replicas() -> Alert:
    return Alert(
        "BrimfulNoReplicas",
        f"absent({SCOPE.series('max_num_seqs')})",
        "2m",
        "critical",
        "Prometheus sees no brimful replica: nothing serves, or discovery at /metrics/targets is broken.",
    )


def _error_ratio() -> Alert:
    by = ("model_name",)
    failed = SCOPE.per_second("request_success", by=by, where=('finished_reason=~"error|timeout|rejected"',))
    ended = SCOPE.per_second("request_success", by=by)
    return Alert(
        "BrimfulErrorRatio",
        f"{ratio(failed, ended)} > 0.05",
        "5m",
        "critical",
        "Over 5 % of the sequences of {{ $labels.model_name }} end in an error, a timeout or a refusal.",
    )


def _http_errors() -> Alert:
    """A replica that died took its counters along; the ingress saw its requests fail."""
    answered = SCOPE.per_second("http_requests")
    failed = SCOPE.per_second("http_requests", where=('status=~"5.."',))
    cut = SCOPE.per_second("http_stream_errors")
    return Alert(
        "BrimfulHttpErrors",
        f"{ratio(failed, answered)} > 0.05\nor {ratio(cut, answered)} > 0.05",
        "5m",
        "critical",
        "Over 5 % of HTTP requests are answered with a 5xx status, or their stream ends in an error.",
    )
