"""A cluster in virtual time: routers, replicas, and the windows in which they run beside each other.

What a replica says at time t is heard by the routers at t + back or later; what they send at t reaches a replica at t
or later. So with windows of back / 4 nobody has to wait for the present:

    window         k          k + 1      k + 2      k + 3      k + 4
    routers        done       done       done       done       run: know all that was said before the end of window k
    replicas       done       run: know all that was sent before the end of window k + 3

All run at the same time, in as many processes as wanted. A process of replicas has orders for several windows ahead, so
that it waits neither for the routers nor for another process before it is that far ahead of them. The result is the
same as in one process: everything that happens inside a window depends on what was handed over before it, and that is
ordered by time and replica. More and narrower windows would even out more, and cost more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bench.simulate.front import Front
from bench.simulate.outcome import Outcome
from bench.simulate.settings import ClusterSettings
from bench.simulate.shard import LocalShard, News, Sent, Shard
from bench.simulate.shard_process import RemoteShard, collections_paused
from bench.simulate.step_totals import StepTotals
from bench.traces.trace import Trace

WINDOWS = 4
"""So many windows make up `ClusterSettings.streams_back_s`: as many may have begun and not be finished."""


class Pace(NamedTuple):
    """How far a simulation is. Virtual seconds."""

    now_s: float
    num_arrived: int
    num_ended: int
    num_requests: int


def simulate_cluster(
    settings: ClusterSettings, trace: Trace, progress: Callable[[Pace], None], *, window_s: float | None = None
) -> Outcome:
    """Play the trace to the end of its last request. `progress` is called after every window. `window_s`: None for the
    widest in which nothing comes late; narrower ones give the same result, more slowly, wider ones a wrong one.

    Raises `RuntimeError` when a worker process fails, `ResourceError` when one is killed.
    """
    with collections_paused():
        return _simulate(settings, trace, progress, settings.streams_back_s / WINDOWS if window_s is None else window_s)


def _simulate(settings: ClusterSettings, trace: Trace, progress: Callable[[Pace], None], width_s: float) -> Outcome:
    front = Front(settings, trace)
    if settings.num_workers == 1:
        return _play(settings, front, [LocalShard(settings, trace, 0, settings.num_replicas)], progress, width_s)
    firsts = _splits(settings.num_replicas, min(settings.num_workers, settings.num_replicas))
    shards: list[RemoteShard] = []
    try:
        for first, last in zip(firsts, [*firsts[1:], settings.num_replicas], strict=True):
            shards.append(RemoteShard(settings, trace, first, last))
        return _play(settings, front, shards, progress, width_s, firsts)
    finally:
        for shard in shards:
            shard.kill()


def _play(
    settings: ClusterSettings,
    front: Front,
    shards: list[LocalShard] | list[RemoteShard],
    progress: Callable[[Pace], None],
    width_s: float,
    firsts: list[int] | None = None,
) -> Outcome:
    parts: list[Shard] = list(shards)
    for shard in parts:
        front.hear(shard.finish())
    orders = _Orders(front, parts, firsts or [0], width_s)
    for window in range(WINDOWS):
        orders.give(window)
    while not front.is_done:
        news: list[News] = []
        for shard in parts:
            news += shard.finish()
        front.hear(news)
        done = orders.given.popleft()
        progress(Pace((done + 1) * width_s, front.num_arrived, front.columns.num_ended, len(front.columns)))
        orders.give(_next_window(front, orders.given[-1], width_s))
    for shard in parts * len(orders.given):
        shard.finish()
    totals = StepTotals()
    for shard in parts:
        totals.merge(shard.close())
    num_blocks = settings.num_replicas * settings.shape.num_blocks
    peak = sum(shard.peak_rss_bytes for shard in shards if isinstance(shard, RemoteShard))
    return Outcome(front.columns, totals, settings.num_replicas, num_blocks, peak)


class _Orders:
    """Windows that the replicas have been told to run. `given`: those that aren't finished, in order."""

    def __init__(self, front: Front, shards: list[Shard], firsts: list[int], width_s: float) -> None:
        self.given: deque[int] = deque()
        self._front = front
        self._shards = shards
        self._firsts = firsts
        self._width_s = width_s

    def give(self, window: int) -> None:
        """Let the routers run the window, and then the replicas with what was sent."""
        until_s = (window + 1) * self._width_s
        sent = self._front.run(until_s)
        for shard, share in zip(self._shards, _shares(sent, self._firsts), strict=True):
            shard.begin(until_s, share)
        self.given.append(window)


def _next_window(front: Front, window: int, width_s: float) -> int:
    """The window after this one; or, when there is nothing to do until the next arrival, one that is finished before
    the routers come to it (with one to spare, for rounding)."""
    quiet_s = front.quiet_until_s
    return window + 1 if quiet_s is None else max(window + 1, math.floor(quiet_s / width_s) - WINDOWS - 1)


def _splits(num_replicas: int, num_shards: int) -> list[int]:
    """First replica of each shard; sizes differ by at most one."""
    return [num_replicas * number // num_shards for number in range(num_shards)]


def _shares(sent: list[Sent], firsts: list[int]) -> list[list[Sent]]:
    """What was sent to each shard, in order."""
    if len(firsts) == 1:
        return [sent]
    shares: list[list[Sent]] = [[] for _ in firsts]
    for one in sent:
        number = len(firsts) - 1
        while firsts[number] > one.replica:
            number -= 1
        shares[number].append(one)
    return shares
