"""A real replica (engine, service and registry; the model is the fake one) under load, seen through Prometheus.

The load has everything that panels show: waiting, preemption, prefix hits, aborts, refusals.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from dashboards.generate import boards
from replica.request import GenerationRequest
from replica.service import ReplicaService
from tests.dashboards.exporters import Prometheus, discovery, prometheus, serving
from tests.dashboards.test_prometheus import METRICS_TYPE, chosen, shipped_config
from tests.fake_replica import FakeFactory, answer, fake_shape, request_of, running, small_config
from tests.replica_reader import read

BINARY = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(BINARY is None, reason="prometheus (Debian package prometheus) isn't installed")

REPLICA_PANELS = [
    target["expr"]
    for board in boards()
    for panel in board.json()["panels"]
    for target in panel.get("targets", [])
    if "$replica" in target["expr"]
]
LIMIT_LINES = {
    target["legendFormat"]: target["expr"]
    for board in boards()
    for panel in board.json()["panels"]
    for target in panel.get("targets", [])
}
NUM_CLIENTS = 8
NUM_BLOCKS = 16
"""Of 4 tokens: four sequences of 5 + 20 tokens don't fit together, so some are preempted."""
THINK_TIME_S = 0.05
"""Of a client between two requests: clients and exporter share one interpreter, and without a pause the exporter's
answers can take seconds. The engine has its own process, as in a replica, for the same reason."""


class Clients:
    """Send requests until told to stop, and count what comes back as clients see it."""

    def __init__(self, service: ReplicaService) -> None:
        self._service = service
        self._numbers = itertools.count()
        self.stop = asyncio.Event()
        self.ends: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(NUM_CLIENTS)))

    async def _client(self) -> None:
        while not self.stop.is_set():
            number = next(self._numbers)
            if number % 10 == 3:
                await self._leave_early(request_of(f"r{number}", 5, 20))
            elif number % 10 == 7:
                await self._finish(request_of(f"r{number}", 5, 500))  # longer than the model's limit: refused
            else:
                await self._finish(request_of(f"r{number}", 9, 16, first=number % 2))
            await asyncio.sleep(THINK_TIME_S)

    async def _finish(self, request: GenerationRequest) -> None:
        answered = await answer(self._service, request)
        self.ends[str(answered.end().finish_reason)] += 1

    async def _leave_early(self, request: GenerationRequest) -> None:
        stream = read(self._service, request)
        async for message in stream:
            if message.events:
                break
        await stream.aclose()
        self.ends["abort"] += 1


async def test_every_panel_has_values_and_the_books_balance(tmp_path: Path) -> None:
    assert BINARY is not None
    factory = FakeFactory(tmp_path, fake_shape(num_blocks=NUM_BLOCKS))
    async with running(small_config(watermark=0.0), factory, in_thread=False) as service:
        with ExitStack() as stack:
            exposition = partial(generate_latest, service.metrics.registry)
            port = stack.enter_context(serving({"/metrics": lambda: (METRICS_TYPE, exposition())}))
            ingress = stack.enter_context(serving({"/metrics/targets": lambda: discovery([port])}))
            config = shipped_config(f"http://127.0.0.1:{ingress}/metrics/targets")
            server = stack.enter_context(prometheus(BINARY, config, tmp_path))
            clients = Clients(service)
            load = asyncio.create_task(clients.run())
            try:
                await asyncio.to_thread(server.wait_for, "min(rate(brimful_num_preemptions_total[10s]))", 0.1)
                await asyncio.to_thread(_panels_show_finite_values, server)
            finally:
                clients.stop.set()
                await load
            await asyncio.to_thread(server.wait_for, "sum(brimful_request_success_total)", sum(clients.ends.values()))
            await asyncio.to_thread(_books_balance, server, clients)
            await _limits_follow(server, service)


def _panels_show_finite_values(server: Prometheus) -> None:
    shown = {expr: server.values(chosen(expr)) for expr in REPLICA_PANELS}
    assert [expr for expr, values in shown.items() if not values] == []
    assert [expr for expr, values in shown.items() if not all(math.isfinite(value) for value in values)] == []


async def _limits_follow(server: Prometheus, service: ReplicaService) -> None:
    """The overview's lines of the two limits show a live change."""
    for name, value in {"max_num_seqs": 2, "max_num_batched_tokens": 8}.items():
        service.set_budgets(**{name: value})
        line = chosen(LIMIT_LINES[f"limit: {name}"])
        await asyncio.to_thread(server.wait_for, f"({line}) == bool {value}", 1.0)


def _books_balance(server: Prometheus, clients: Clients) -> None:
    """What Prometheus has is what the clients counted, and a replica without requests shows none. An answer may end
    just before the client that leaves it is noticed: that one is no abort any more."""
    samples = server.query("brimful_request_success_total > 0")
    ended = {sample["metric"]["finished_reason"]: int(sample["value"][1]) for sample in samples}
    overtaken = ended["length"] - clients.ends["length"]
    assert 0 <= overtaken < clients.ends["abort"]
    assert ended == clients.ends - Counter(abort=overtaken) + Counter(length=overtaken)
    assert server.values("brimful_e2e_request_latency_seconds_count") == [ended["length"]]
    had_tokens = clients.ends["length"] + clients.ends["abort"]
    assert server.values("brimful_time_to_first_token_seconds_count") == [had_tokens]
    for idle in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_for(f"brimful_{idle} == bool 0", 1.0, limit_s=5.0)
