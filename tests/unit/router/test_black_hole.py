"""Requests in virtual time through the router's own state, past replicas of which one fails all it gets at once and
therefore always looks idle."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from router.config import RouterConfig
from router.state import RouterState
from tests.unit.router.loads import report, request

NUM_REPLICAS = 8
NUM_REQUESTS = 2000
SERVICE_S = 1.0
FAILS_IN_S = 0.002
REPORT_EVERY_S = 0.1


class Cluster:
    """Routers that take turns, and replicas that answer after a second, with first token and end at once; those of
    `broken` fail it after two milliseconds. A failed request is sent on once. Every replica reports to all routers."""

    def __init__(self, num_routers: int, broken: set[str], policy: str) -> None:
        self.now_s = 100.0
        config = RouterConfig(policy=policy)
        self.routers = [
            RouterState(config, clock=lambda: self.now_s, rng=random.Random(seed)) for seed in range(num_routers)
        ]
        self.names = [f"replica-{number}" for number in range(NUM_REPLICAS)]
        self.broken = broken
        self.sent: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.num_failed = 0
        self._running: Counter[str] = Counter()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._order), act))

    def run(self, rate: float, poison_share: float = 0.0) -> None:
        end_s = self.now_s + NUM_REQUESTS / rate
        draw = random.Random(7)
        for number in range(NUM_REQUESTS):
            router, is_poison = self.routers[number % len(self.routers)], draw.random() < poison_share
            self.at(self.now_s + number / rate, partial(self._send, router, f"r{number}", is_poison))
        for number in range(int((end_s - self.now_s) / REPORT_EVERY_S) + 1):
            self.at(self.now_s + number * REPORT_EVERY_S, partial(self._report, number + 1))
        while self._due:
            self.now_s, _, act = heapq.heappop(self._due)
            act()

    def _report(self, number: int) -> None:
        for router in self.routers:
            for name in self.names:
                router.observe(report(name, number=number, num_running=self._running[name]))

    def _send(self, router: RouterState, root: str, is_poison: bool, exclude: tuple[str, ...] = ()) -> None:
        request_id = root + "~" * len(exclude)
        name = router.choose(request(request_id, num_prompt_tokens=32), self.names, exclude).replica_id
        router.accepted(request_id, name, None)
        self.sent[name] += 1
        self._running[name] += 1
        fails = name in self.broken or is_poison

        def over() -> None:
            self._running[name] -= 1
            router.ended(request_id)
            if not fails:
                self.answered[name] += 1
                router.health.succeeded(root, name)
                return
            router.health.failed(root, name)
            if exclude:
                self.num_failed += 1
            else:
                self._send(router, root, is_poison, (name,))

        self.at(self.now_s + (FAILS_IN_S if fails else SERVICE_S), over)


@pytest.mark.parametrize(
    ("policy", "rate"),
    [("scores", 40.0), ("scores", 200.0), ("power_of_two", 40.0), ("least_in_flight", 40.0), ("round_robin", 40.0)],
)
@pytest.mark.parametrize("num_routers", [1, 4])
def test_a_black_hole_gets_little_and_the_others_stay_even(num_routers: int, policy: str, rate: float) -> None:
    hole = "replica-3"
    cluster = Cluster(num_routers, {hole}, policy)
    cluster.run(rate)
    assert cluster.num_failed == 0
    assert cluster.sent[hole] < 0.05 * NUM_REQUESTS
    shares = [cluster.answered[name] for name in cluster.names if name != hole]
    assert max(shares) <= 1.2 * sum(shares) / len(shares)


@pytest.mark.parametrize("num_routers", [1, 4])
def test_of_several_black_holes_clients_notice_next_to_nothing(num_routers: int) -> None:
    holes = {"replica-1", "replica-4", "replica-6"}
    cluster = Cluster(num_routers, holes, "scores")
    cluster.run(100.0)
    assert max(cluster.sent[hole] for hole in holes) < 0.05 * NUM_REQUESTS
    assert cluster.num_failed < 0.005 * NUM_REQUESTS


@pytest.mark.parametrize("poison_share", [0.2, 0.9, 1.0])
def test_poison_requests_eject_nobody_and_leave_the_load_even(poison_share: float) -> None:
    cluster = Cluster(1, set(), "scores")
    cluster.run(100.0, poison_share)
    assert cluster.routers[0].health.ejected() == set()
    shares = [cluster.answered[name] for name in cluster.names]
    assert max(shares) <= 1.2 * sum(shares) / len(shares) + 3
