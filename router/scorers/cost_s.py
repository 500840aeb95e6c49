"""Scorer `cost_s`: seconds of waiting that the request would meet and cause there. `score = 1 / (1 + cost / tau)`.

    cost = max(load, level) + just sent + own prefill + headroom

    load        of what reports include: tokens to prefill / prefill rate, and requests (waiting ones weighted by KV
                pressure) * seconds of one request's decode
    level       what other routers have filled up to meanwhile
    just sent   the same of our own requests that no report includes yet, and once more for those without a place; where
                a prefix drew more of them than usual, other routers are taken to have sent as many more each
    own prefill its tokens that aren't cached there / prefill rate
    headroom    share of its KV blocks that aren't free * the time in which a running request ends

Routers that see the same reports all see the same idle replica. So what they sent since (`PeerEstimate.unseen`) is
taken to lie where it was to be sent, in the lowest loads, up to a level:  sum(max(0, level - load)) = unseen requests
* seconds of one. Below it loads don't differ, and prefixes and our own requests decide. Alone, a router has no level.

A cached prefix is worth the seconds that it saves, so it is let go as soon as more than that waits in front of it.
Computing again what lies elsewhere counts `AGAIN` times: others wait for it too, and the copy displaces another prefix.
While nobody is known to hold its beginning, a prompt costs a little less at its home, which every router finds alike.
Rates are the best that any candidate has measured: a low one mostly says how little there was to compute. Seconds of
one decode: the expected output over the decode rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.load import stale_as_loaded
from router.peers import PeerEstimate
from router.types import ReplicaView, RouteRequest

COMPANY = 0.3
"""Seconds of company for a second of one request's decode: requests share their steps."""

AGAIN = 3.0
"""A token that is cached elsewhere and computed again counts so many times: it delays others, and its copy takes the
place of another prefix."""

AT_HOME = 0.5
"""Share of its prefill (of a usual prompt's, if it is longer) that a request saves others where it is looked for."""

DEFAULT_PREFILL_TOKENS_PER_S = 5000.0
DEFAULT_DECODE_TOKENS_PER_S = 1000.0
"""Until a replica has measured its own."""


@dataclass(frozen=True, slots=True)
class CostParts:
    """A cost taken apart, seconds: see the top of this file. `level_s`: from the load up to the level, 0 above it.
    `home_s` is negative at home. `ramp_s`: so much more counts a replica that has just come."""

    load_s: float
    level_s: float
    just_sent_s: float
    own_prefill_s: float
    home_s: float
    headroom_s: float
    ramp_s: float

    @property
    def total_s(self) -> float:
        return (
            self.load_s
            + self.level_s
            + self.just_sent_s
            + self.own_prefill_s
            + self.home_s
            + self.headroom_s
            + self.ramp_s
        )


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
        return stale_as_loaded(
            views, [tau_s / (tau_s + cost) if cost > 0.0 else 1.0 for cost in self.costs(request, views)]
        )

    def costs(self, request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        """Seconds, in the order given."""
        peers, num_prompt = self.peers, request.num_prompt_tokens
        num_output = request.expected_output_tokens(self.expected_output_tokens)
        token_s, each_s = _seconds(views, num_output / request.n)
        there, lag_s = [view.load for view in views], peers.lag_s
        holders = [i for i, view in enumerate(views) if view.matched_blocks]
        cached = [min(num_prompt, views[i].matched_blocks * there[i].block_size) for i in holders]
        loads = [
            load.company * each_s + (backlog_s if (backlog_s := load.backlog_tokens * token_s - lag_s) > 0.0 else 0.0)
            for load in there
        ]
        prompt_s = (num_prompt + (AGAIN - 1.0) * max(cached, default=0)) * token_s
        costs = [load.own_company * each_s + load.pending_prefill_tokens * token_s + prompt_s for load in there]
        for i, num_cached in zip(holders, cached, strict=True):
            costs[i] -= AGAIN * token_s * num_cached
        num_tokens = num_prompt + num_output
        for i in [i for i, load in enumerate(there) if load.num_blocks_available * load.block_size < num_tokens]:
            costs[i] += each_s * _headroom(views[i], num_tokens)
        for i in [i for i, view in enumerate(views) if view.is_home]:
            costs[i] -= AT_HOME * min(num_prompt, peers.prompt_tokens or num_prompt) * token_s
        unseen_s = peers.unseen * len(views) / max(len(views), peers.num_replicas)
        level = water_level(loads, unseen_s * (each_s + peers.prompt_tokens * token_s))
        costs = [cost + (load if load > level else level) for load, cost in zip(loads, costs, strict=True)]
        return _ramped(views, costs)


def _seconds(views: list[ReplicaView], num_output: float) -> tuple[float, float]:
    """Of a token's prefill, and of a request's company."""
    reports = [report for view in views if (report := view.load.report) is not None]
    prefill_rate = max([report.prefill_tokens_per_s for report in reports], default=0.0)
    decode_rate = max([report.decode_tokens_per_s for report in reports], default=0.0)
    each_s = COMPANY * num_output / (decode_rate or DEFAULT_DECODE_TOKENS_PER_S)
    return 1.0 / (prefill_rate or DEFAULT_PREFILL_TOKENS_PER_S), each_s


def _headroom(view: ReplicaView, num_tokens: int) -> float:
    """Requests that have to end before all of one with so many tokens has a place; a part of one that fits in part."""
    load, report = view.load, view.load.report
    num_blocks = -(-num_tokens // load.block_size)
    missing = num_blocks - view.matched_blocks - load.num_blocks_available
    if missing <= 0 or report is None:
        return 0.0
    return min(1.0, missing / num_blocks) * (1 + report.num_running)


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


def cost_parts(scorer: CostS, request: RouteRequest, views: list[ReplicaView]) -> list[CostParts]:
    """What `scorer.costs` adds up, in the order given. Written apart because `costs` is in the way of every request;
    `tests/property/router/test_cost_parts.py` holds both together."""
    peers, num_prompt = scorer.peers, request.num_prompt_tokens
    num_output = request.expected_output_tokens(scorer.expected_output_tokens)
    token_s, each_s = _seconds(views, num_output / request.n)
    most_cached = min(num_prompt, max([view.matched_blocks * view.load.block_size for view in views]))
    loads = [view.load.company * each_s + max(0.0, view.load.backlog_tokens * token_s - peers.lag_s) for view in views]
    unseen_s = peers.unseen * len(views) / max(len(views), peers.num_replicas)
    level = water_level(loads, unseen_s * (each_s + peers.prompt_tokens * token_s))
    parts = []
    for view, load_s in zip(views, loads, strict=True):
        load, report = view.load, view.load.report
        num_cached = min(num_prompt, view.matched_blocks * load.block_size)
        num_again = most_cached - num_cached
        num_blocks = -(-(num_prompt + num_output) // load.block_size)
        missing = max(0.0, num_blocks - view.matched_blocks - load.num_blocks_available)
        end_s = each_s * (1 + report.num_running) if report is not None else 0.0
        home_tokens = min(num_prompt, peers.prompt_tokens or num_prompt) if view.is_home else 0.0
        parts.append(
            CostParts(
                load_s=load_s,
                level_s=max(0.0, level - load_s),
                just_sent_s=load.own_company * each_s + load.pending_prefill_tokens * token_s,
                own_prefill_s=(num_prompt - num_cached + (AGAIN - 1.0) * num_again) * token_s,
                home_s=-AT_HOME * home_tokens * token_s,
                headroom_s=min(1.0, missing / num_blocks) * end_s,
                ramp_s=0.0,
            )
        )
    totals = [part.total_s for part in parts]
    ramped = _ramped(views, list(totals))
    return [
        replace(part, ramp_s=cost - total) if cost != total else part
        for part, cost, total in zip(parts, ramped, totals, strict=True)
    ]
