"""Whatever reports and ledgers say, also nonsense: scores stay in [0, 1] and somebody is chosen."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from router.config import RouterConfig
from router.peers import PeerEstimate
from router.policy import build_policy
from router.scorers.cost_s import CostS
from router.scorers.kv_headroom import KvHeadroom
from router.scorers.least_in_flight import LeastInFlight
from router.scorers.prefix_affinity import PrefixAffinity
from router.scorers.queue_depth import QueueDepth
from router.types import ReplicaView, RouteRequest, Scorer
from tests.unit.router.loads import request, view

COST_S = CostS(1.0, 256, PeerEstimate())
ANY_COUNT = st.one_of(st.integers(0, 20), st.integers(-5, 10**7))


@st.composite
def any_view(draw: st.DrawFn, name: str) -> ReplicaView:
    fields = ["num_running", "num_waiting", "num_waiting_tokens", "num_prefill_tokens", "num_blocks_total"]
    fields += ["num_blocks_free", "num_blocks_cached", "block_size", "max_num_seqs"]
    counts = draw(st.tuples(*[st.integers(0, 10**6)] * 4))
    return view(
        name,
        counts=counts,
        matched_blocks=draw(st.integers(0, 6)),
        is_stale=draw(st.booleans()),
        silent=draw(st.booleans()),
        draining=draw(st.booleans()),
        **{field: draw(ANY_COUNT) for field in fields},
    )


@st.composite
def any_views(draw: st.DrawFn) -> list[ReplicaView]:
    return [draw(any_view(str(i))) for i in range(draw(st.integers(1, 6)))]


any_request = st.builds(
    request,
    num_prompt_tokens=st.integers(1, 10**6),
    max_tokens=st.integers(1, 10**6),
    n=st.integers(1, 128),
    block_hashes=st.lists(st.binary(max_size=2), max_size=6).map(tuple),
)


@given(any_request, any_views())
def test_scores_are_in_the_unit_interval_and_pure(wanted: RouteRequest, views: list[ReplicaView]) -> None:
    scorers: list[Scorer] = [KvHeadroom(256), QueueDepth(), PrefixAffinity(4), COST_S, LeastInFlight()]
    for scorer in scorers:
        scores = scorer(wanted, views)
        assert len(scores) == len(views)
        assert all(0.0 <= score <= 1.0 for score in scores), (scorer.name, scores)
        assert scorer(wanted, views) == scores


@given(any_request, any_views(), st.integers())
def test_a_policy_never_excludes_everyone(wanted: RouteRequest, views: list[ReplicaView], seed: int) -> None:
    policy = build_policy(RouterConfig(), random.Random(seed))
    decision = policy.decide(wanted, views, 0.0)
    ranked = [replica_id for replica_id, _ in decision.ranking]
    assert len(ranked) == len(set(ranked)) >= 1
    assert set(ranked) <= {candidate.load.replica_id for candidate in views}
    assert all(0.0 <= total <= 1.0 + 1e-9 for _, total in decision.ranking)
    assert all(0.0 <= part <= 1.0 for part in decision.parts.values())
    assert decision.reason in policy.reasons


@given(any_request, any_views())
def test_a_stale_replica_never_outscores_a_fresh_one_on_load(wanted: RouteRequest, views: list[ReplicaView]) -> None:
    for scorer in (KvHeadroom(256), QueueDepth(), COST_S, LeastInFlight()):
        scores = scorer(wanted, views)
        fresh = [score for candidate, score in zip(views, scores, strict=True) if not candidate.is_stale]
        stale = [score for candidate, score in zip(views, scores, strict=True) if candidate.is_stale]
        assert not fresh or not stale or max(stale) <= min(fresh)
