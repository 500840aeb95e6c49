"""Metrics of an ingress process: what clients met at the HTTP edge. One table, as in `replica/metrics.py`."""

from __future__ import annotations

from replica.metrics import LATENCY_BUCKETS_S, MetricSpec

# `route` is one of the generation paths without a model's prefix; other paths aren't counted: a client can't make new
# series.
INGRESS_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("http_requests", "counter", "HTTP requests answered, by route and status.", ("route", "status")),
    MetricSpec(
        "http_request_duration_seconds",
        "histogram",
        "From the first byte of a request to the last byte of its answer.",
        ("route",),
        LATENCY_BUCKETS_S,
    ),
    MetricSpec("http_requests_in_flight", "gauge", "Generation requests that this process works on."),
    MetricSpec("http_client_disconnects", "counter", "Requests whose client left before the answer's end.", ("route",)),
    MetricSpec("http_stream_errors", "counter", "Streams that ended in an error event after a 200.", ("route",)),
    MetricSpec(
        "http_continuations",
        "counter",
        "Answers that lost their replica, or failed at it, and were sent on.",
        ("route",),
    ),
    MetricSpec("admission_rejections", "counter", "Requests refused before they were tokenized.", ("reason",)),
    MetricSpec("tokenize_seconds", "histogram", "Duration of turning one request into ids.", (), LATENCY_BUCKETS_S),
)
