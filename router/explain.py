"""One decision laid open: what a router would decide now for a request, and all that it would look at.

Made from the very views, scores and order that the decision is made from. A router knows the reports that it has, and
of what was sent since only its own requests: another router may decide otherwise at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from router.config import RouterConfig
from router.peers import PeerEstimate
from router.policy import Policy, Scored
from router.scorers.cost_s import CostParts, CostS, cost_parts
from router.shortlist import session_by
from router.types import Decision, ReplicaView, RouteRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that the decision looked at. One that a filter kept out (`kept_out_by`) has no total and no scores.
    `cost` is None also where `cost_s` has no say."""

    view: ReplicaView
    total: float | None
    scores: dict[str, float]
    cost: CostParts | None
    kept_out_by: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """`candidates`: best first, those that a filter kept out last. `matched`: replica -> leading blocks of the request
    that its prefix cache is believed to hold, the longest first, also of replicas that weren't looked at; it names
    nobody before it is read, which needs no lock and is for whoever needs it. `num_routers`, `report_lag_s`
    and `num_unseen`: what `router/peers.py` has measured. `now_s`: on the clock by which reports arrived."""

    decision: Decision
    request: RouteRequest
    config: RouterConfig
    num_replicas: int
    candidates: tuple[Candidate, ...]
    weights: dict[str, float]
    matched: Mapping[str, int]
    num_routers: float
    report_lag_s: float
    num_unseen: float
    now_s: float

    @property
    def num_output_tokens(self) -> int:
        """That all sequences of the request together are expected to make."""
        return self.request.expected_output_tokens(self.config.expected_output_tokens)

    @property
    def session_by(self) -> str | None:
        """What a session policy goes by: see `router/shortlist.py`. By the `request` itself means by an id that it gets
        when it is sent, so that this explanation's place is only one of those where it may go."""
        return session_by(self.request) if self.config.policy == "session_affinity" else None


class Scope(NamedTuple):
    """What a router knows beside its views, as it knows it now. `num_replicas`: that run."""

    config: RouterConfig
    num_replicas: int
    matched: Mapping[str, int]
    peers: PeerEstimate


def explained(
    policy: Policy, request: RouteRequest, views: list[ReplicaView], now_s: float, scope: Scope
) -> Explanation:
    """`policy`'s decision about `views`, with its reasons. Raises `Unavailable` when there are none."""
    scored = policy.score(request, views)
    config, num_replicas, matched, peers = scope
    return Explanation(
        decision=policy.decided(scored, now_s),
        request=request,
        config=config,
        num_replicas=num_replicas,
        candidates=tuple(_scored_candidates(policy, request, scored) + _kept_out(policy, request, views)),
        weights={name: weight for name, weight, _ in scored.columns},
        matched=matched,
        num_routers=peers.routers,
        report_lag_s=peers.lag_s,
        num_unseen=peers.unseen,
        now_s=now_s,
    )


def _scored_candidates(policy: Policy, request: RouteRequest, scored: Scored) -> list[Candidate]:
    views = scored.candidates
    cost_s = next((scorer for scorer, _ in policy.scorers if isinstance(scorer, CostS)), None)
    costs = [None] * len(views) if cost_s is None else cost_parts(cost_s, request, views)
    return [
        Candidate(views[i], scored.totals[i], {name: scores[i] for name, _, scores in scored.columns}, costs[i])
        for i in scored.order
    ]


def _kept_out(policy: Policy, request: RouteRequest, views: list[ReplicaView]) -> list[Candidate]:
    """As the policy filters: one that keeps nobody is passed over."""
    out: list[Candidate] = []
    for keep in policy.filters:
        kept = keep(request, views)
        if kept:
            ids = {view.load.replica_id for view in kept}
            out += [Candidate(view, None, {}, None, keep.name) for view in views if view.load.replica_id not in ids]
            views = kept
    return out
