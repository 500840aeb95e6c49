"""Counts what `RouterState` tells it into a registry that has `ROUTER_METRICS`; before `attach` it counts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.types import Decision

if TYPE_CHECKING:
    from replica.metrics import Metrics
    from router.policy import Policy


class RouterCounters:
    """Thread-safe as far as the registry is."""

    def __init__(self) -> None:
        self._metrics: Metrics | None = None
        self._model_name = ""

    def attach(self, metrics: Metrics, model_name: str) -> None:
        self._model_name = model_name
        self._metrics = metrics

    def start(self, policy: Policy) -> None:
        """Every reason starts at 0: a counter that appears at 1 has no rate for its first event."""
        if self._metrics is None:
            return
        model_name = self._model_name
        for reason in policy.reasons:
            self._metrics.inc("router_decisions", 0, model_name=model_name, policy=policy.name, reason=reason)
        self._metrics.inc("router_expired_requests", 0, model_name=model_name)

    def decided(self, decision: Decision, duration_s: float, num_in_flight: int) -> None:
        """`num_in_flight`: entries of the ledger."""
        if self._metrics is None:
            return
        model_name = self._model_name
        self._metrics.inc("router_decisions", model_name=model_name, policy=decision.policy, reason=decision.reason)
        self._metrics.observe("router_decision_seconds", duration_s, model_name=model_name)
        self._metrics.set("router_requests_in_flight", num_in_flight, model_name=model_name)
        if decision.cost_s is not None:
            self._metrics.observe("router_cost_seconds", decision.cost_s, model_name=model_name)
        if decision.report_age_s != float("inf"):
            self._metrics.observe("router_report_age_seconds", decision.report_age_s, model_name=model_name)

    def in_flight(self, count: int) -> None:
        if self._metrics is not None:
            self._metrics.set("router_requests_in_flight", count, model_name=self._model_name)

    def expired(self, count: int) -> None:
        if count and self._metrics is not None:
            self._metrics.inc("router_expired_requests", count, model_name=self._model_name)
