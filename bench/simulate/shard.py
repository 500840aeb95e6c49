"""A part of the cluster's replicas, stepped one window of time at a time; knows nothing of other shards or routers.

A replica tells of its streams (who was taken, got a first token, ended) after every step in which there is such news.
It reports its load at the first step boundary that is `report_every_s` or more after its last report, at the first one
after it was idle, whenever it falls idle, and every `IDLE_REPORT_S` while it is (a live replica's sign of life). A
report includes all that the streams told before it.
"""

from __future__ import annotations

from collections import deque
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from bench.simulate.prompt import Prompts
from bench.simulate.replica import Ended, SimulatedReplica
from bench.simulate.requests import exactly
from bench.simulate.settings import ClusterSettings
from bench.simulate.step_totals import StepTotals
from bench.traces.trace import Trace
from replica.request import GenerationRequest

IDLE_REPORT_S = 1.0

LOAD_FIELDS = (
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "num_prefill_tokens",
    "num_blocks_free",
    "num_blocks_cached",
    "num_preempted",
    "num_preempted_tokens",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "block_hashes_added",
    "block_hashes_evicted",
)
"""What changes from report to report; the rest of a `LoadReport` is the same for all replicas."""

_RATES = LOAD_FIELDS.index("prefill_tokens_per_s")

_changing = attrgetter(*LOAD_FIELDS)


class Sent(NamedTuple):
    """A request on its way: reaches the replica at `at_s`."""

    at_s: float
    number: int
    replica: int


class News(NamedTuple):
    """What a replica says at `made_at_s`: what its streams tell, and `load`, its report number `report`, values as in
    `LOAD_FIELDS`; without one it is None, and `report` is the number of the one before."""

    made_at_s: float
    replica: int
    report: int
    load: tuple[Any, ...] | None
    accepted: list[int]
    started: list[int]
    ended: list[Ended]


class Shard(Protocol):
    """Some replicas, in this process or in another. `begin` windows and `finish` each, in order; several may have
    begun. One `finish` comes first, with a report of each replica that routers have at time 0."""

    def begin(self, until_s: float, sent: list[Sent]) -> None:
        """Run all steps that begin before `until_s`. `sent`: what reaches these replicas before then, and perhaps
        later, in order of time."""
        ...

    def finish(self) -> list[News]:
        """The news of the oldest window that has begun."""
        ...

    def close(self) -> StepTotals:
        """All steps of these replicas; gives everything back."""
        ...


class _Member:
    """One replica with its reporting. Nothing happens there before `wakes_s`, unless it is idle and a request comes."""

    __slots__ = ("due_s", "index", "is_idle", "num_reports", "replica", "wakes_s")

    def __init__(self, index: int, replica: SimulatedReplica) -> None:
        self.index = index
        self.replica = replica
        self.num_reports = 0
        self.due_s = 0.0
        self.wakes_s = 0.0
        self.is_idle = True


class LocalShard:
    """Replicas `first` to `last` - 1 in this process."""

    def __init__(self, settings: ClusterSettings, trace: Trace, first: int, last: int) -> None:
        self._prompts = Prompts(trace, settings.shape.vocab_size)
        self._output_tokens = trace.output_tokens
        self._report_every_s = settings.report_every_s
        self._first = first
        self._totals = StepTotals()
        self._tells_prefixes = settings.router.uses_prefixes
        self._news: list[News] = []
        self._members = [
            _Member(index, SimulatedReplica(settings.scheduler, settings.shape, settings.cost, self._totals))
            for index in range(first, last)
        ]
        self._begun: deque[tuple[float, list[Sent]]] = deque([(0.0, [])])  # nothing happens before time 0
        for member in self._members:
            self._report(member, -settings.back_s, settings.back_s + IDLE_REPORT_S)

    def begin(self, until_s: float, sent: list[Sent]) -> None:
        self._begun.append((until_s, sent))

    def finish(self) -> list[News]:
        until_s, sent = self._begun.popleft()
        for at_s, number, index in sent:
            member = self._members[index - self._first]
            member.replica.submit(number, self._request(number), at_s)
            if member.is_idle and at_s < member.wakes_s:
                member.wakes_s = at_s
        for member in self._members:
            if member.wakes_s < until_s:
                self._advance(member, until_s)
        news, self._news = self._news, []
        return news

    def close(self) -> StepTotals:
        return self._totals

    def _advance(self, member: _Member, until_s: float) -> None:
        replica = member.replica
        while (begins_s := replica.next_s()) is not None and begins_s < until_s:
            if member.is_idle:
                self._stay_idle(member, begins_s)
                member.due_s = begins_s
            replica.step()
            member.is_idle = not replica.scheduler.has_work
            if member.is_idle or replica.now_s >= member.due_s:
                self._report(member, replica.now_s, IDLE_REPORT_S if member.is_idle else self._report_every_s)
            elif replica.accepted or replica.started or replica.ended:
                self._tell(member, replica.now_s, None)
        wakes_s = inf if begins_s is None else begins_s
        if member.is_idle:
            self._stay_idle(member, until_s)
            wakes_s = min(wakes_s, member.due_s)
        member.wakes_s = wakes_s

    def _stay_idle(self, member: _Member, until_s: float) -> None:
        """Signs of life before `until_s`."""
        while member.due_s < until_s:
            self._report(member, member.due_s, IDLE_REPORT_S)

    def _report(self, member: _Member, now_s: float, next_in_s: float) -> None:
        replica = member.replica
        load = _changing(replica.load())
        changes = load[-2:] if self._tells_prefixes else ((), ())
        member.num_reports += 1
        member.due_s = now_s + next_in_s
        self._tell(member, now_s, (*load[:_RATES], *replica.rates, *changes))

    def _tell(self, member: _Member, now_s: float, load: tuple[Any, ...] | None) -> None:
        replica = member.replica
        streams = (replica.accepted, replica.started, replica.ended)
        self._news.append(News(now_s, member.index, member.num_reports, load, *streams))
        replica.accepted, replica.started, replica.ended = [], [], []

    def _request(self, number: int) -> GenerationRequest:
        return GenerationRequest("", self._prompts.lazy(number), exactly(self._output_tokens[number]))
