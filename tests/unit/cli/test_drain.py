"""The order of a drain: who is told what, and for how long open requests are waited for."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.cli.drain import LAST_EVENTS_S, drain


class FakeApplication:
    """Ingress processes that say how many requests are in flight, one entry of `in_flight` after the other; None: no
    answer. The last entry stays. Time passes only in `sleep`."""

    def __init__(self, *in_flight: list[int] | None, after_replicas: list[int] | None = None) -> None:
        self._in_flight = list(in_flight)
        self._after_replicas = after_replicas
        self.told: list[str] = []
        self.now_s = 0.0

    def drain(self, deployment: str) -> list[dict[str, Any]] | None:
        self.told.append(deployment)
        if deployment != "ingress":
            if self._after_replicas is not None:
                self._in_flight = [self._after_replicas]
            return []
        counts = self._in_flight.pop(0) if len(self._in_flight) > 1 else self._in_flight[0]
        return None if counts is None else [{"in_flight": count} for count in counts]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self, limit_s: float) -> bool:
        return drain(self, ["replica-0", "replica-1"], limit_s, lambda: self.now_s, self.sleep)


def test_an_idle_application_is_drained_at_once() -> None:
    application = FakeApplication([0, 0])
    assert application.run(30.0)
    assert (application.told, application.now_s) == (["ingress", "replica-0", "replica-1"], 0.0)


def test_replicas_are_told_only_when_nothing_is_in_flight_any_more() -> None:
    application = FakeApplication([1, 2], [0, 1], [0, 0])
    assert application.run(30.0)
    assert application.told == ["ingress", "ingress", "ingress", "replica-0", "replica-1"]


@pytest.mark.parametrize("limit_s", [0.0, 4.0])
def test_what_outlasts_the_limit_is_ended_by_the_replicas_and_its_clients_are_told(limit_s: float) -> None:
    application = FakeApplication([1], after_replicas=[0])
    assert not application.run(limit_s)
    assert application.now_s == limit_s
    assert application.told[-3:] == ["replica-0", "replica-1", "ingress"]


def test_an_ingress_that_does_not_answer_may_have_requests_in_flight() -> None:
    application = FakeApplication(None, [0])
    assert application.run(30.0)
    assert application.told[:2] == ["ingress", "ingress"]


def test_a_client_that_takes_nothing_holds_the_end_up_no_longer_than_its_limit() -> None:
    application = FakeApplication([1])
    assert not application.run(2.0)
    assert application.now_s == 2.0 + LAST_EVENTS_S
