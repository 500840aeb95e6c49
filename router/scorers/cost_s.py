"""Scorer `cost_s`: seconds of waiting that the request would meet and cause there. `score = 1 / (1 + cost / tau)`.

    cost = max(load, level) + just sent + own prefill + headroom

    load        of what reports include: tokens to prefill / prefill rate, and requests (waiting ones weighted by KV
                pressure) * seconds of one request's decode
    level       what other routers have filled up to meanwhile
    just sent   the same of our own requests that no report includes yet, and once more for those without a place
    own prefill its tokens that aren't cached there / prefill rate
    headroom    share of its KV blocks that aren't free * the time in which a running request ends

Routers that see the same reports all see the same idle replica. So what they sent since (`PeerEstimate.unseen`) is
taken to lie where it was to be sent, in the lowest loads, up to a level:  sum(max(0, level - load)) = unseen requests
* seconds of one. Below it loads don't differ, and prefixes and our own requests decide. Alone, a router has no level.

A cached prefix is worth the seconds that it saves, so it is let go as soon as more than that waits in front of it.
Rates are those that replicas measure. A replica's own prefill rate counts while it has a full step of prefill to do;
with less, its rate says how little there was, and the best rate of all candidates is taken. Seconds of one decode: the
expected output over the best decode rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from router.load import KV_PRESSURE_FROM, WAITING_WEIGHT, stale_as_loaded
from router.peers import PeerEstimate
from router.shortlist import session_of
from router.types import ReplicaView, RouteRequest

SLOWEST = 4.0
"""A measured rate is believed to be at most so many times below the best."""

OWN = 0.5
COMPANY = 0.1
SAVE = 3.0
HOME = 0.0
"""So much more counts a request there that is our own: of those we know that they are still there."""

DEFAULT_PREFILL_TOKENS_PER_S = 5000.0
DEFAULT_DECODE_TOKENS_PER_S = 1000.0
"""Until a replica has measured its own."""


@dataclass(frozen=True, slots=True)
class CostS:
    """`tau_s`: cost that halves the score. `expected_output_tokens` bounds what a large `max_tokens` counts. `peers`
    is only read."""

    tau_s: float
    expected_output_tokens: int
    peers: PeerEstimate
    name: str = "cost_s"

    def __call__(self, request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        tau_s = self.tau_s
        return stale_as_loaded(views, [tau_s / (tau_s + max(0.0, cost)) for cost in self.costs(request, views)])

    def costs(self, request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        """Seconds, in the order given."""
        reports = [report for view in views if (report := view.load.report) is not None]
        prefill_rate = max([report.prefill_tokens_per_s for report in reports], default=0.0)
        prefill_rate = prefill_rate or DEFAULT_PREFILL_TOKENS_PER_S
        decode_rate = max([report.decode_tokens_per_s for report in reports], default=0.0)
        num_prompt = request.num_prompt_tokens
        num_output = request.expected_output_tokens(self.expected_output_tokens)
        each_s = COMPANY * num_output / request.n / (decode_rate or DEFAULT_DECODE_TOKENS_PER_S)
        best_cached = max([view.matched_blocks * view.load.block_size for view in views])
        lag_s = self.peers.lag_s
        loads, costs = [], []
        for load, matched_blocks, _, _ in views:
            report = load.report
            num_cached = matched_blocks * load.block_size
            tokens = (
                load.pending_prefill_tokens
                + (num_prompt - num_cached if num_cached < num_prompt else 1)
                + (SAVE - 1) * (best_cached - min(num_cached, num_prompt))
            )
            pending = load.num_pending + OWN * (load.num_in_flight - load.num_pending)
            if report is None:
                loads.append(load.num_settled * each_s + load.backlog_tokens / prefill_rate)
                costs.append(pending * each_s + tokens / prefill_rate)
                continue
            pressure = load.kv_usage_ratio - KV_PRESSURE_FROM
            company = load.num_settled
            if pressure > 0:
                company += report.num_waiting * WAITING_WEIGHT * pressure
                pending += pending * WAITING_WEIGHT * pressure
            backlog_s = load.backlog_tokens / prefill_rate - lag_s
            loads.append(company * each_s + (backlog_s if backlog_s > 0 else 0.0))
            beyond = load.num_settled + load.num_pending + 1 - report.max_num_seqs
            if beyond > 0:
                pending += beyond
            num_blocks = -(-(num_prompt + num_output) // load.block_size)
            missing = max(1, num_blocks - matched_blocks) - load.num_blocks_available
            cost = pending * each_s + tokens / prefill_rate
            if missing > 0:
                cost += min(1.0, missing / num_blocks) * each_s * (1 + report.num_running)
            costs.append(cost)
        if HOME:
            home = max(
                range(len(views)), key=lambda i: crc32(views[i].load.replica_id.encode(), crc32(session_of(request)))
            )
            costs[home] -= HOME * num_prompt / prefill_rate
        unseen_s = self.peers.unseen * len(views) / max(len(views), self.peers.num_replicas)
        unseen_s *= each_s + self.peers.prompt_tokens / prefill_rate
        level = water_level(loads, unseen_s)
        return _ramped(
            views, [cost + (load if load > level else level) for load, cost in zip(loads, costs, strict=True)]
        )


def water_level(loads: list[float], amount: float) -> float:
    """The level to which `amount` fills up the lowest loads; the lowest load when there is nothing to fill in."""
    ordered = sorted(loads)
    if amount <= 0:
        return ordered[0]
    below = 0.0
    for num, load in enumerate(ordered):
        if num * load - below >= amount:
            return (below + amount) / num
        below += load
    return (below + amount) / len(ordered)


def _ramped(views: list[ReplicaView], costs: list[float]) -> list[float]:
    """A replica that has just come is idle and would draw everything, with a cold cache: at first it counts as busy as
    the mean of the others. Changes `costs`; when all are new nobody is."""
    warm = [cost for view, cost in zip(views, costs, strict=True) if view.ramp >= 1.0]
    if not warm or len(warm) == len(views):
        return costs
    mean = sum(warm) / len(warm)
    for i, view in enumerate(views):
        if view.ramp < 1.0:
            costs[i] = max(costs[i], (1.0 - view.ramp) * mean)
    return costs
