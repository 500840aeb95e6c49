"""A policy: filters, then weighted scorers, then a picker. Pure: views in, decision out.

    candidates = all views
    for each filter: candidates = those it keeps, unless it keeps none
    total(candidate) = sum(weight * score) / sum(weights), in [0, 1]
    ranking = the picker's order of the totals, its first `MAX_RANKED`

Simple policies, to compare with: `round_robin`, `power_of_two` (two drawn, the one with less of `num_outstanding`),
`least_in_flight` (by our own requests alone), `session_affinity` (consistent hashing of the session). They have one
scorer and say with their shortlist whom it sees.

The decision's reason, in the order in which it is looked for:
    all_<filter>      a filter kept nobody and was passed over (all_draining, all_queue_full)
    only_candidate    there was no choice
    tie               the runner-up scored the same, within the picker's margin
    <scorer>          the scorer in which the winner is furthest ahead of the runner-up
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from replica.errors import Unavailable
from router.config import RouterConfig
from router.filters import NotDraining, QueueNotFull
from router.peers import PeerEstimate
from router.picker import BestInTurn
from router.scorers.cost_s import CostS
from router.scorers.in_order import InOrder
from router.scorers.kv_headroom import KvHeadroom
from router.scorers.least_in_flight import LeastInFlight
from router.scorers.prefix_affinity import PrefixAffinity
from router.scorers.queue_depth import QueueDepth
from router.shortlist import FavouritesAndSample, InTurn, OnRing, Shortlist, TwoDrawn
from router.types import Decision, Filter, Picker, ReplicaView, RouteRequest, Scorer

TIE_MARGIN = 0.002
RETRY_AFTER_S = 1.0
MAX_RANKED = 8
"""A decision names so many replicas. When none of them takes the request, it is time for another decision."""


class Scored(NamedTuple):
    """All that a decision is made from. `candidates` passed the filters; of each scorer its name, its weight and its
    scores, in the order of the candidates, as `totals`. `order`: indices of candidates, best first. `ignored`: the
    reason for passing over a filter, "" when none was."""

    candidates: list[ReplicaView]
    ignored: str
    columns: list[tuple[str, float, list[float]]]
    totals: list[float]
    order: list[int]


class Policy:
    """`scorers` are pairs of scorer and weight; a weight of 0 switches its scorer off. `shortlist`: whom `decide` is to
    be shown of all replicas; None: everybody. `tau_s`: what turns the score of `cost_s` into seconds again."""

    def __init__(
        self,
        name: str,
        filters: Sequence[Filter],
        scorers: Sequence[tuple[Scorer, float]],
        picker: Picker,
        shortlist: Shortlist | None = None,
        tau_s: float = 1.0,
    ) -> None:
        self.name = name
        self.shortlist = shortlist
        self._tau_s = tau_s
        self.filters = tuple(filters)
        total = sum(weight for _, weight in scorers)
        self.scorers = tuple((scorer, weight / total) for scorer, weight in scorers if weight > 0)
        self._picker = picker
        all_filtered = [f"all_{keep.name}" for keep in self.filters]
        self.reasons = (*all_filtered, "only_candidate", "tie", *(scorer.name for scorer, _ in self.scorers))

    def decide(self, request: RouteRequest, views: list[ReplicaView], now: float) -> Decision:
        """Rank the candidates; `now` is on the clock by which reports arrived.

        Raises `Unavailable` when there are none; never excludes all of them itself.
        """
        return self.decided(self.score(request, views), now)

    def score(self, request: RouteRequest, views: list[ReplicaView]) -> Scored:
        """The part of `decide` that finds out; `decided` puts it into words. Raises `Unavailable`."""
        if not views:
            raise Unavailable("no replica is running", retry_after_s=RETRY_AFTER_S)
        candidates, ignored = self._filter(request, views)
        columns = [(scorer.name, weight, scorer(request, candidates)) for scorer, weight in self.scorers]
        _, weight, scores = columns[0]
        totals = [weight * score for score in scores]
        for _, weight, scores in columns[1:]:
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        order = self._picker(totals, [view.load.replica_id for view in candidates])
        return Scored(candidates, ignored, columns, totals, order)

    def decided(self, scored: Scored, now: float) -> Decision:
        candidates, ignored, columns, totals, order = scored
        winner = order[0]
        parts = {name: scores[winner] for name, _, scores in columns}
        return Decision(
            policy=self.name,
            ranking=tuple([(candidates[i].load.replica_id, totals[i]) for i in order[:MAX_RANKED]]),
            parts=parts,
            report_age_s=now - candidates[winner].load.arrived_at_s,
            reason=ignored or _reason(columns, totals, order),
            cost_s=self._cost_s(parts.get("cost_s", 0.0), candidates, winner),
        )

    def _cost_s(self, score: float, candidates: list[ReplicaView], winner: int) -> float | None:
        """The seconds of which `cost_s` made this score; None where it made none, or put a stale one below others."""
        if not score or (candidates[winner].is_stale and not all(view.is_stale for view in candidates)):
            return None
        return self._tau_s * (1.0 / score - 1.0)

    def chose(self, replica_id: str) -> None:
        """The request of the last decision goes there: next time it is the turn of others."""
        self._picker.chose(replica_id)

    def _filter(self, request: RouteRequest, views: list[ReplicaView]) -> tuple[list[ReplicaView], str]:
        ignored = ""
        for keep in self.filters:
            kept = keep(request, views)
            if kept:
                views = kept
            else:
                ignored = ignored or f"all_{keep.name}"
        return views, ignored


def build_policy(config: RouterConfig, rng: random.Random, peers: PeerEstimate | None = None) -> Policy:
    """The policy that `config` describes. `peers`: what is known of other routers; None: there are none."""
    filters: list[Filter] = [NotDraining(), QueueNotFull(config.max_num_queued_seqs)]
    tied, sample = BestInTurn(rng, TIE_MARGIN), FavouritesAndSample(rng)
    if config.policy == "scores":
        weights = config.all_weights
        scorers: list[Scorer] = [
            CostS(config.tau_s, config.expected_output_tokens, peers or PeerEstimate()),
            KvHeadroom(config.expected_output_tokens),
            QueueDepth(),
            PrefixAffinity(config.imbalance_cap),
        ]
        return Policy(
            "weighted", filters, [(scorer, weights[scorer.name]) for scorer in scorers], tied, sample, config.tau_s
        )
    exact = BestInTurn(rng, 0.0)
    simple: dict[str, tuple[Scorer, Shortlist]] = {
        "round_robin": (InOrder(), InTurn(rng)),
        "power_of_two": (QueueDepth(), TwoDrawn(rng)),
        "least_in_flight": (LeastInFlight(), sample),
        "session_affinity": (InOrder(), OnRing()),
    }
    scorer, shortlist = simple[config.policy]
    return Policy(config.policy, filters, [(scorer, 1.0)], exact, shortlist)


def _reason(columns: list[tuple[str, float, list[float]]], totals: list[float], order: list[int]) -> str:
    if len(order) == 1:
        return "only_candidate"
    winner, second = order[0], order[1]
    if totals[winner] - totals[second] <= TIE_MARGIN:
        return "tie"
    return max(columns, key=lambda column: column[1] * (column[2][winner] - column[2][second]))[0]
