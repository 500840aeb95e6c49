"""A policy: filters, then weighted scorers, then a picker. Pure: views in, decision out.

    candidates = all views
    for each filter: candidates = those it keeps, unless it keeps none
    total(candidate) = sum(weight * score) / sum(weights), in [0, 1]
    ranking = the picker's order of the totals, its first `MAX_RANKED`

The decision's reason, in the order in which it is looked for:
    all_<filter>      a filter kept nobody and was passed over (all_draining, all_queue_full)
    only_candidate    there was no choice
    tie               the runner-up scored the same, within the picker's margin
    <scorer>          the scorer in which the winner is furthest ahead of the runner-up
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from replica.errors import Unavailable
from router.config import RouterConfig
from router.filters import NotDraining, QueueNotFull
from router.picker import BestWithRandomTies
from router.scorers.kv_headroom import KvHeadroom
from router.scorers.prefix_affinity import PrefixAffinity
from router.scorers.queue_depth import QueueDepth
from router.types import Decision, Filter, Picker, ReplicaView, RouteRequest, Scorer

TIE_MARGIN = 0.01
RETRY_AFTER_S = 1.0
MAX_RANKED = 8
"""A decision names so many replicas. When none of them takes the request, it is time for another decision."""


class Policy:
    """`scorers` are pairs of scorer and weight; a weight of 0 switches its scorer off."""

    def __init__(
        self, name: str, filters: Sequence[Filter], scorers: Sequence[tuple[Scorer, float]], picker: Picker
    ) -> None:
        self.name = name
        self._filters = tuple(filters)
        total = sum(weight for _, weight in scorers)
        self._scorers = tuple((scorer, weight / total) for scorer, weight in scorers if weight > 0)
        self._picker = picker
        all_filtered = [f"all_{keep.name}" for keep in self._filters]
        self.reasons = (*all_filtered, "only_candidate", "tie", *(scorer.name for scorer, _ in self._scorers))

    def decide(self, request: RouteRequest, views: list[ReplicaView], now: float) -> Decision:
        """Rank the candidates; `now` is on the clock by which reports arrived.

        Raises `Unavailable` when there are none; never excludes all of them itself.
        """
        if not views:
            raise Unavailable("no replica is running", retry_after_s=RETRY_AFTER_S)
        candidates, ignored = self._filter(request, views)
        columns = [(scorer.name, weight, scorer(request, candidates)) for scorer, weight in self._scorers]
        _, weight, scores = columns[0]
        totals = [weight * score for score in scores]
        for _, weight, scores in columns[1:]:
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        order = self._picker(totals)
        winner = order[0]
        return Decision(
            policy=self.name,
            ranking=tuple([(candidates[i].load.replica_id, totals[i]) for i in order[:MAX_RANKED]]),
            parts={name: scores[winner] for name, _, scores in columns},
            report_age_s=now - candidates[winner].load.arrived_at_s,
            reason=ignored or _reason(columns, totals, order),
        )

    def _filter(self, request: RouteRequest, views: list[ReplicaView]) -> tuple[list[ReplicaView], str]:
        ignored = ""
        for keep in self._filters:
            kept = keep(request, views)
            if kept:
                views = kept
            else:
                ignored = ignored or f"all_{keep.name}"
        return views, ignored


def build_policy(config: RouterConfig, rng: random.Random) -> Policy:
    """The policy that `config` describes."""
    weights = config.all_weights
    scorers: list[Scorer] = [
        KvHeadroom(config.expected_output_tokens),
        QueueDepth(),
        PrefixAffinity(config.imbalance_cap),
    ]
    return Policy(
        "weighted",
        [NotDraining(), QueueNotFull(config.max_num_queued_seqs)],
        [(scorer, weights[scorer.name]) for scorer in scorers],
        BestWithRandomTies(rng, TIE_MARGIN),
    )


def _reason(columns: list[tuple[str, float, list[float]]], totals: list[float], order: list[int]) -> str:
    if len(order) == 1:
        return "only_candidate"
    winner, second = order[0], order[1]
    if totals[winner] - totals[second] <= TIE_MARGIN:
        return "tie"
    return max(columns, key=lambda column: column[1] * (column[2][winner] - column[2][second]))[0]
