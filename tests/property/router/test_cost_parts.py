"""The parts of a cost, as they are shown, are the cost by which `cost_s` decides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.peers import PeerEstimate
from router.scorers.cost_s import CostS, cost_parts
from router.types import ReplicaView, RouteRequest
from tests.unit.router.loads import request, view

COUNT = st.integers(0, 50)
RATE = st.sampled_from([0.0, 150.0, 4000.0])


@st.composite
def a_view(draw: st.DrawFn, name: str) -> ReplicaView:
    reported: dict[str, Any] = {"num_running": draw(COUNT), "num_waiting": draw(COUNT)}
    reported |= {"num_waiting_tokens": draw(COUNT) * 100, "num_prefill_tokens": draw(COUNT) * 10}
    reported |= {"num_blocks_free": draw(COUNT), "num_blocks_cached": draw(COUNT)}
    reported |= {"prefill_tokens_per_s": draw(RATE), "decode_tokens_per_s": draw(RATE)}
    counts = draw(st.tuples(COUNT, COUNT, st.integers(0, 5000), st.integers(0, 5000)))
    seen = view(name, counts=counts, matched_blocks=draw(st.integers(0, 12)), silent=draw(st.booleans()), **reported)
    return seen._replace(ramp=draw(st.sampled_from([0.0, 0.4, 1.0, 1.0])), is_home=draw(st.booleans()))


@st.composite
def some_peers(draw: st.DrawFn) -> PeerEstimate:
    peers = PeerEstimate()
    peers.lag_s, peers.prompt_tokens = draw(st.sampled_from([0.0, 0.7])), draw(st.sampled_from([0.0, 300.0]))
    peers.routers, peers._mean_pending = draw(st.sampled_from([1.0, 3.0])), draw(st.floats(0, 40))
    return peers


@given(
    wanted=st.builds(
        request, num_prompt_tokens=st.integers(1, 400), max_tokens=st.integers(1, 400), n=st.integers(1, 3)
    ),
    views=st.integers(1, 6).flatmap(lambda count: st.tuples(*[a_view(str(i)) for i in range(count)])),
    peers=some_peers(),
)
def test_the_parts_sum_up_to_the_cost(
    wanted: RouteRequest, views: tuple[ReplicaView, ...], peers: PeerEstimate
) -> None:
    scorer = CostS(1.0, 256, peers)
    parts = cost_parts(scorer, wanted, list(views))
    assert [part.total_s for part in parts] == pytest.approx(scorer.costs(wanted, list(views)), rel=1e-9, abs=1e-9)
