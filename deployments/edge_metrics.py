"""Counts what happens at the HTTP edge into the series of `deployments/metrics.py`."""

from __future__ import annotations

from replica.metrics import Metrics

GENERATION_ROUTES = ("/v1/chat/completions", "/v1/completions")
REJECTION_REASONS = ("in_flight", "queue_full", "body_too_large", "not_ready")
CLIENT_LEFT = "499"  # nginx's number for a client that closed the connection; never on the wire


class EdgeMetrics:
    """One ingress process. `route` is a served path without its model's prefix, so that clients can't make series.

    Counters start at 0 for what is known beforehand: Prometheus sees no increase in a series that appears with 1.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        for route in GENERATION_ROUTES:
            for status in ("200", "400", "404", "413", "500", "503", CLIENT_LEFT):
                metrics.inc("http_requests", 0, route=route, status=status)
            metrics.inc("http_client_disconnects", 0, route=route)
            metrics.inc("http_stream_errors", 0, route=route)
            metrics.inc("http_continuations", 0, route=route)
        for reason in REJECTION_REASONS:
            metrics.inc("admission_rejections", 0, reason=reason)

    def answered(self, route: str, status: str, duration_s: float) -> None:
        """An answer has been sent whole, or as much of it as the client waited for (`CLIENT_LEFT`)."""
        self._metrics.inc("http_requests", route=route, status=status)
        self._metrics.observe("http_request_duration_seconds", duration_s, route=route)
        if status == CLIENT_LEFT:
            self._metrics.inc("http_client_disconnects", route=route)

    def stream_failed(self, route: str) -> None:
        """A stream ended in an error event after its 200."""
        self._metrics.inc("http_stream_errors", route=route)

    def continued(self, route: str) -> None:
        """An answer lost its replica and was sent on to another one."""
        self._metrics.inc("http_continuations", route=route)

    def rejected(self, reason: str) -> None:
        """Refused before anything was tokenized; one of `REJECTION_REASONS`."""
        self._metrics.inc("admission_rejections", reason=reason)

    def in_flight(self, count: int) -> None:
        self._metrics.set("http_requests_in_flight", count)

    def tokenized(self, duration_s: float) -> None:
        self._metrics.observe("tokenize_seconds", duration_s)
