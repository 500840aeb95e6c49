"""Metrics of routing, in the registry of the process that routes (the ingress).

`model_name` is a label here and not common to the process, because one ingress routes for several models.
"""

from __future__ import annotations

from replica.metrics import MetricSpec

DECISION_BUCKETS_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
COST_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
REPORT_AGE_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

ROUTER_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "router_decisions",
        "counter",
        "Replicas chosen, by what decided: see router/policy.py.",
        ("model_name", "policy", "reason"),
    ),
    MetricSpec(
        "router_decision_seconds", "histogram", "Duration of one decision.", ("model_name",), DECISION_BUCKETS_S
    ),
    MetricSpec(
        "router_report_age_seconds",
        "histogram",
        "Age of the chosen replica's load report at the decision.",
        ("model_name",),
        REPORT_AGE_BUCKETS_S,
    ),
    MetricSpec(
        "router_cost_seconds",
        "histogram",
        "Seconds of waiting that the request was expected to meet and cause at the chosen replica.",
        ("model_name",),
        COST_BUCKETS_S,
    ),
    MetricSpec("router_requests_in_flight", "gauge", "Requests sent and not ended.", ("model_name",)),
    MetricSpec("router_ejections", "counter", "Times a replica was ejected: see router/health.py.", ("model_name",)),
    MetricSpec("router_ejected_replicas", "gauge", "Replicas that are ejected or on trial.", ("model_name",)),
    MetricSpec("router_expired_requests", "counter", "Requests whose end was never told: a bug.", ("model_name",)),
)
