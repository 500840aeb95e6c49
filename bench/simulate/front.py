"""The cluster's way in: routers that decide with the real router's code, from reports that are a little old.

In order of time, one at a time: a report comes (`observe`, then `accepted` and `ended` for the requests it tells of),
or a request arrives (`choose`; it reaches its replica a network delay later). Every router hears every report; a
request is known to the router that it came to.
"""

from __future__ import annotations

from random import Random
from typing import Any

from bench.simulate.outcome import RequestColumns
from bench.simulate.settings import ClusterSettings
from bench.simulate.shard import LOAD_FIELDS, News, Sent
from bench.traces.trace import Trace
from replica.request import LoadReport
from replica.scheduler.block_hash import block_hashes
from router.state import RouterState
from router.types import RouteRequest

EPOCH = "1"


class Front:
    """`columns` fills up as news comes in."""

    def __init__(self, settings: ClusterSettings, trace: Trace) -> None:
        self.columns = RequestColumns(trace.arrival_s)
        self.now_s = 0.0
        self._settings = settings
        self._trace = trace
        self._names = [f"replica-{index}" for index in range(settings.num_replicas)]
        self._routers = [
            RouterState(settings.router, clock=lambda: self.now_s, rng=Random(f"{settings.seed}/{number}"))
            for number in range(settings.num_routers)
        ]
        for router in self._routers:
            router.retain(self._names)
        self._hashes_prompts = self._routers[0].uses_prefixes and settings.scheduler.enable_prefix_caching
        self._coming: list[tuple[float, int, News]] = []  # by (time, replica), which no two reports share
        self._next_request = 0
        scheduler, shape = settings.scheduler, settings.shape
        self._same: dict[str, Any] = {
            "epoch": EPOCH,
            "num_blocks_total": shape.num_blocks,
            "block_size": shape.block_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        }

    @property
    def num_arrived(self) -> int:
        return self._next_request

    @property
    def is_done(self) -> bool:
        """Every request has ended."""
        return self.columns.num_ended == len(self.columns)

    @property
    def quiet_until_s(self) -> float | None:
        """When the next request arrives, while nobody is being served; None when somebody is."""
        if self.columns.num_ended < self._next_request or self._next_request == len(self._trace):
            return None
        return self._trace.arrival_s[self._next_request]

    def hear(self, news: list[News]) -> None:
        """Replicas reported; it comes in later."""
        back_s = self._settings.back_s
        self._coming += [(one.made_at_s + back_s, one.replica, one) for one in news]

    def run(self, until_s: float) -> list[Sent]:
        """All that happens before `until_s`; returns what was sent, in order of time."""
        self._coming.sort()
        arrivals, sent = self._trace.arrival_s, []
        num_heard = 0
        for at_s, _, news in self._coming:
            if at_s >= until_s:
                break
            while self._next_request < len(arrivals) and arrivals[self._next_request] < at_s:
                sent.append(self._decide())
            self.now_s = at_s
            self._observe(news)
            num_heard += 1
        del self._coming[:num_heard]
        while self._next_request < len(arrivals) and arrivals[self._next_request] < until_s:
            sent.append(self._decide())
        return sent

    def _decide(self) -> Sent:
        number = self._next_request
        self._next_request += 1
        self.now_s = self._trace.arrival_s[number]
        router = self._router_of(number)
        decision = router.choose(self._route_request(number), self._names)
        replica = int(decision.replica_id.rpartition("-")[2])
        self.columns.replica[number] = replica
        return Sent(self.now_s + self._settings.network_delay_s, number, replica)

    def _route_request(self, number: int) -> RouteRequest:
        hashes: tuple[bytes, ...] = ()
        if self._hashes_prompts:
            shape = self._settings.shape
            hashes = block_hashes(self._trace.prompt_ids(number, shape.vocab_size), shape.block_size)
        trace = self._trace
        return RouteRequest(str(number), trace.prompt_tokens[number], trace.output_tokens[number], 1, hashes)

    def _observe(self, news: News) -> None:
        report = LoadReport(
            replica_id=self._names[news.replica],
            number=news.report,
            made_at_s=news.made_at_s,
            block_hashes_number=news.report,
            **self._same,
            **dict(zip(LOAD_FIELDS, news.load, strict=True)),
        )
        for router in self._routers:
            router.observe(report)
        for number in news.accepted:
            self._router_of(number).accepted(str(number), report.replica_id, report)
        for request in news.ended:
            self._router_of(request.number).ended(str(request.number))
            self.columns.end(request, self._settings.network_delay_s)

    def _router_of(self, number: int) -> RouterState:
        return self._routers[number % len(self._routers)]
