"""The cluster's way in: routers that decide with the real router's code, from reports that are a little old.

In order of time, one at a time: streams tell (`accepted`, `started`, `ended`), a report comes (`observe`), or a request
arrives (`choose`; it reaches its replica a network delay later). Every router hears every report, all at the same time,
which is the worst case for herding; a request is known to the router that it came to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
_NO_LOAD: tuple[Any, ...] = (*[0] * (len(LOAD_FIELDS) - 2), (), ())


class Front:
    """`columns` fills up as news comes in."""

    def __init__(self, settings: ClusterSettings, trace: Trace) -> None:
        self.columns = RequestColumns(trace.arrival_s)
        self.now_s = 0.0
        self._settings = settings
        self._trace = trace
        self._names = [f"replica-{index}" for index in range(settings.num_replicas)]
        config = replace(settings.router, num_routers=settings.num_routers)
        self._routers = [
            RouterState(config, clock=lambda: self.now_s, rng=Random(f"{settings.seed}/{number}"))
            for number in range(settings.num_routers)
        ]
        for router in self._routers:
            router.retain(self._names)
        self._hashes_prompts = self._routers[0].uses_prefixes and settings.scheduler.enable_prefix_caching
        # By (time, replica, report, is a report), which no two pieces of news share.
        self._coming: list[tuple[float, int, int, bool, News]] = []
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
        """Replicas said something; it comes in later."""
        back_s, streams_back_s = self._settings.back_s, self._settings.streams_back_s
        self._coming += [
            (one.made_at_s + streams_back_s, one.replica, one.report, False, one)
            for one in news
            if one.accepted or one.started or one.ended
        ]
        self._coming += [
            (one.made_at_s + back_s, one.replica, one.report, True, one) for one in news if one.load is not None
        ]

    def run(self, until_s: float) -> list[Sent]:
        """All that happens before `until_s`; returns what was sent, in order of time."""
        self._coming.sort()
        arrivals, sent = self._trace.arrival_s, []
        num_heard = 0
        for at_s, _, _, is_report, news in self._coming:
            if at_s >= until_s:
                break
            while self._next_request < len(arrivals) and arrivals[self._next_request] < at_s:
                sent.append(self._decide())
            self.now_s = at_s
            if is_report:
                self._observe(news)
            else:
                self._follow(news)
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
        session = ""
        if self._hashes_prompts:
            shape = self._settings.shape
            hashes = block_hashes(self._trace.prompt_ids(number, shape.vocab_size), shape.block_size)
            session = self._session(number)
        trace = self._trace
        return RouteRequest(str(number), trace.prompt_tokens[number], trace.output_tokens[number], 1, hashes, session)

    def _session(self, number: int) -> str:
        """The conversation: what its prompts begin with, beyond the first block, which may be common to all."""
        blocks: Sequence[int] = self._trace.block_ids[number] if self._trace.block_ids else ()
        return f"conversation-{blocks[1]}" if len(blocks) > 1 else ""

    def _observe(self, news: News) -> None:
        assert news.load is not None
        report = self._report(news, news.report, news.load)
        for router in self._routers:
            router.observe(report)

    def _follow(self, news: News) -> None:
        """What the streams told, each to the router of its request. Who is new was taken after the report before."""
        if news.accepted:
            name = self._names[news.replica]
            before = self._report(news, news.report - (news.load is not None), _NO_LOAD)
            for number in news.accepted:
                self._router_of(number).accepted(str(number), name, before)
        for number in news.started:
            self._router_of(number).started(str(number))
        for request in news.ended:
            self._router_of(request.number).ended(str(request.number))
            self.columns.end(request, self._settings.network_delay_s)

    def _report(self, news: News, number: int, load: tuple[Any, ...]) -> LoadReport:
        return LoadReport(
            replica_id=self._names[news.replica],
            number=number,
            made_at_s=news.made_at_s,
            block_hashes_number=number,
            **self._same,
            **dict(zip(LOAD_FIELDS, load, strict=True)),
        )

    def _router_of(self, number: int) -> RouterState:
        return self._routers[number % len(self._routers)]
