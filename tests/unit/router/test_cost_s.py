"""`cost_s`: seconds that a request would wait and make others wait, table by table."""

from __future__ import annotations

from typing import Any

import pytest

from replica.request import LoadReport
from router.inflight import LedgerCounts
from router.load import load_of
from router.peers import MEMORY_S, Others, PeerEstimate
from router.scorers.cost_s import COMPANY, CostS, water_level
from router.types import ReplicaLoad, ReplicaView
from router.views import SeenReport
from tests.unit.router.loads import report, request, view

RATES: dict[str, Any] = {"prefill_tokens_per_s": 1000.0, "decode_tokens_per_s": 100.0}
WANTED = request(block_hashes=tuple(bytes([i]) for i in range(10)))
PAIR = (("a", 40), ("b", 20))
EACH_S = COMPANY * 160 / 100
"""What one request of company counts."""


def costs(*views: ReplicaView, peers: PeerEstimate | None = None) -> list[float]:
    return CostS(1.0, 256, peers or PeerEstimate()).costs(WANTED, list(views))


def test_an_idle_replica_costs_the_prefill_of_the_prompt() -> None:
    assert costs(view(**RATES)) == [pytest.approx(0.16)]


def test_the_score_is_a_half_where_the_cost_is_tau() -> None:
    assert CostS(0.16, 256, PeerEstimate())(WANTED, [view(**RATES)]) == [pytest.approx(0.5)]


@pytest.mark.parametrize(
    ("busy", "more_s"),
    [
        ({"num_running": 2}, 2 * EACH_S),
        ({"num_running": 2, "num_prefill_tokens": 300}, 2 * EACH_S + 0.3),
        ({"num_waiting": 1, "num_waiting_tokens": 500}, EACH_S + 0.5),
        ({"counts": (1, 1, 100, 50, 100, 100)}, EACH_S + 0.1),
        ({"num_running": 2, "counts": (2, 0)}, 4 * EACH_S),
        ({"num_running": 64}, 65 * EACH_S),
    ],
    ids=["company", "mid-prefill", "waiting", "just sent", "ours for certain", "no place"],
)
def test_what_is_there_already_costs_seconds(busy: dict[str, Any], more_s: float) -> None:
    idle, loaded = costs(view("a", **RATES), view("b", **(RATES | busy)))
    assert loaded - idle == pytest.approx(more_s)


def test_waiting_requests_weigh_more_when_the_cache_is_full() -> None:
    empty, full = costs(
        view("a", num_waiting=2, num_blocks_total=1000, num_blocks_free=1000, **RATES),
        view("b", num_waiting=2, num_blocks_total=1000, num_blocks_free=100, **RATES),
    )
    assert full - empty == pytest.approx(2 * 6 * 0.4 * EACH_S)


def test_blocks_that_are_missing_cost_the_time_in_which_requests_end() -> None:
    fits, short = costs(
        view("a", num_running=3, num_blocks_free=20, **RATES), view("b", num_running=3, num_blocks_free=10, **RATES)
    )
    assert short - fits == pytest.approx(10 / 20 * EACH_S * 4, rel=0.3)


def test_a_cached_prefix_is_let_go_when_more_waits_in_front_of_it() -> None:
    cached = view("a", matched_blocks=10, num_prefill_tokens=300, **RATES)
    drowned = view("a", matched_blocks=10, num_prefill_tokens=1000, **RATES)
    other = view("b", **RATES)
    assert costs(cached, other)[0] < costs(cached, other)[1]
    assert costs(drowned, other)[0] > costs(drowned, other)[1]


def test_the_level_is_where_the_amount_is_used_up() -> None:
    loads = [1.0, 2.0, 5.0]
    assert [water_level(loads, amount) for amount in (0.0, 1.0, 3.0, 30.0)] == [1.0, 2.0, 3.0, pytest.approx(38 / 3)]


def test_beside_other_routers_the_lowest_loads_no_longer_differ() -> None:
    """Eight more see the same two reports, and each has sent one request to both since."""
    peers = PeerEstimate(num_routers=9)
    low, high = report("a", num_running=16, **RATES), report("b", num_running=20, **RATES)
    for _ in range(200):
        for one in (low, high):
            peers.look(one.replica_id, SeenReport(one, 0.0), LedgerCounts(2, 1, 160, 160))
        peers.decided(request(), 0, 0.5)
    assert peers.routers == pytest.approx(36 / 4)
    assert peers.unseen == pytest.approx(8 * 2)
    first, second = costs(known(low), known(high), peers=peers)
    assert first == pytest.approx(second)
    alone = costs(known(low), known(high))
    assert alone[1] - alone[0] == pytest.approx(4 * EACH_S)


def test_how_many_routers_there_are_is_believed_until_reports_say_otherwise() -> None:
    peers = PeerEstimate(num_routers=16)
    assert (peers.routers, peers.others.routers) == (16.0, 16.0)
    one = report("a", num_running=8)
    peers.look("a", SeenReport(one, 0.0), LedgerCounts(4, 0, 0, 0, 0, 0))
    for _ in range(400):
        peers.decided(request(), 0, 0.0)
    assert peers.routers == pytest.approx(2.0, abs=0.01)


def test_where_a_prefix_draws_more_than_usual_other_routers_are_taken_to_have_sent_as_many_more() -> None:
    """Four pending requests of ours with 100 tokens each, on their way to the only one that holds their prefix; half a
    request is on its way so to a replica in the mean. So 2.5 are more than usual, of each of four routers."""
    own = LedgerCounts(4, 4, 640, 640, 400, 400, 400, 40_000)
    seen = SeenReport(report("a", num_running=1), 0.0)
    alone, beside_three = load_of("a", seen, own), load_of("a", seen, own, Others(routers=4.0, drawn=0.5))
    assert (alone.own_company, alone.pending_prefill_tokens) == (4.0, 400.0)
    assert (beside_three.own_company, beside_three.pending_prefill_tokens) == (4.0 + 3 * 2.5, 400.0 + 3 * 250.0)


def test_what_a_prefix_draws_in_the_mean_is_counted_over_all_replicas_that_were_looked_at() -> None:
    peers = PeerEstimate()
    for name, drawn_percent in (("a", 300), ("b", 50), ("c", 0)):
        own = LedgerCounts(4, 4, 0, 0, 0, 0, drawn_percent, 0)
        peers.look(name, SeenReport(report(name), 0.0), own)
    peers.look("a", SeenReport(report("a"), 0.0), LedgerCounts(1, 1, 0, 0, 0, 0, 100, 0))
    assert peers.others.drawn == pytest.approx(0.5)


def test_an_old_report_turns_into_what_is_ours_and_the_mean_of_what_others_have() -> None:
    """Two replicas with 40 and 20 requests, 10 of ours at each: others have 20 in the mean."""
    peers = PeerEstimate()
    seen = [SeenReport(report(name, num_running=num, num_prefill_tokens=8 * num), 0.0) for name, num in PAIR]
    for one in seen:
        peers.look(one.report.replica_id, one, LedgerCounts(10, 0, 0, 0, 40, 0))
    assert peers.others == Others(1.0, 20.0, 200.0)
    assert [load.company for load in loads_of(seen, peers)] == [40, 20]
    peers.decided(request(), 0, 10 * MEMORY_S)
    assert [load.company for load in loads_of(seen, peers)] == [pytest.approx(30, abs=0.01)] * 2
    assert [load.backlog_tokens for load in loads_of(seen, peers)] == [pytest.approx(240, abs=0.1)] * 2


def loads_of(seen: list[SeenReport], peers: PeerEstimate) -> list[ReplicaLoad]:
    return [load_of(one.report.replica_id, one, LedgerCounts(10, 0, 0, 0, 40, 0), peers.others) for one in seen]


def test_a_cold_replica_counts_nearly_as_busy_as_the_others_at_first() -> None:
    busy, idle = view("a", num_running=20, **RATES), view("b", **RATES)
    cold, half = idle._replace(ramp=0.1), idle._replace(ramp=0.9)
    warm_s = costs(busy, idle)
    assert costs(busy, cold) == [warm_s[0], pytest.approx(0.9 * warm_s[0])]
    assert costs(busy, half)[1] == pytest.approx(max(warm_s[1], 0.1 * warm_s[0]))
    assert costs(cold, half) == [warm_s[1], warm_s[1]]


def known(one: LoadReport) -> ReplicaView:
    return ReplicaView(load_of(one.replica_id, SeenReport(one, 0.0), LedgerCounts()))
