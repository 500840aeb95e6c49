"""Whom the simple policies look at, and what they choose."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from router.config import RouterConfig
from router.prefix_index import NOBODY, Matched, PrefixIndex
from router.shortlist import NUM_LISTED, FavouritesAndSample, InTurn, OnRing, TwoDrawn
from router.state import RouterState
from tests.unit.router.loads import report, request

MANY = [f"replica-{i}" for i in range(100)]


def state(policy: str, seed: int = 0) -> RouterState:
    return RouterState(RouterConfig(policy=policy), clock=lambda: 0.0, rng=random.Random(seed))


def matched(held: dict[str, int]) -> Matched:
    index = PrefixIndex(1000)
    chain = [bytes([i]) for i in range(30)]
    for replica_id, num_blocks in held.items():
        index.learn(replica_id, chain[:num_blocks])
    return index.match(chain)


def test_of_many_the_favourites_and_a_sample_are_listed() -> None:
    held = matched({f"replica-{i}": i for i in range(1, 20)})
    listed = FavouritesAndSample(random.Random(0))(request(), MANY, held)
    assert (len(listed) <= 64, set(listed) >= {f"replica-{i}" for i in range(12, 20)}) == (True, True)
    assert FavouritesAndSample(random.Random(0))(request(), MANY[:64], NOBODY) == MANY[:64]


def test_favourites_are_among_those_that_may_be_chosen() -> None:
    held = matched({"gone": 20, "replica-1": 3})
    listed = FavouritesAndSample(random.Random(0))(request(), MANY, held)
    assert listed[0] == "replica-1"
    assert set(listed) <= set(MANY)


def test_of_equal_favourites_other_ones_are_listed_each_time() -> None:
    held = matched(dict.fromkeys(MANY, 5))
    listing = FavouritesAndSample(random.Random(0))
    assert len({listing(request(), MANY, held)[0] for _ in range(30)}) > 10


def test_two_are_drawn() -> None:
    draw = TwoDrawn(random.Random(0))
    seen = Counter(one for _ in range(500) for one in draw(request(), MANY, NOBODY))
    assert (len(draw(request(), MANY, NOBODY)), len(seen)) == (2, 100)


def test_round_robin_goes_round() -> None:
    turn = InTurn(random.Random(0))
    winners = [turn(request(), MANY[:5], NOBODY)[0] for _ in range(10)]
    assert sorted(winners[:5]) == MANY[:5]
    assert winners[5:] == winners[:5]
    assert len(turn(request(), MANY, NOBODY)) == NUM_LISTED


def test_a_session_keeps_its_replica_when_another_one_leaves() -> None:
    ring = OnRing()
    sessions = [request(f"r{i}", session=f"s{i}") for i in range(200)]
    before = [list(ring(one, MANY[:10], NOBODY)) for one in sessions]
    after = [ring(one, MANY[1:10], NOBODY)[0] for one in sessions]
    assert all(new == (old[0] if old[0] != MANY[0] else old[1]) for old, new in zip(before, after, strict=True))
    shares = Counter(order[0] for order in before)
    assert max(shares.values()) < 50


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"session": "s"}, {"session": "s", "block_hashes": (b"x",)}),
        ({"block_hashes": (b"a", b"b", b"c", b"d", b"e")}, {"block_hashes": (b"a", b"b", b"c", b"d", b"f")}),
    ],
    ids=["named", "the same beginning"],
)
def test_what_belongs_together_goes_to_one_replica(one: dict[str, Any], other: dict[str, Any]) -> None:
    ring = OnRing()
    first, second = (ring(request(f"r{i}", **given), MANY, NOBODY)[0] for i, given in enumerate((one, other)))
    assert first == second


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "least_in_flight", "session_affinity", "scores"])
def test_every_policy_decides_and_passes_over_a_draining_replica(policy: str) -> None:
    router = state(policy)
    for name in "abc":
        router.observe(report(name, draining=name == "a"))
    winners = Counter(router.choose(request(f"r{i}"), ["a", "b", "c"]).replica_id for i in range(30))
    assert "a" not in winners or policy == "power_of_two"
    assert set(winners) >= {"b", "c"}


def test_least_in_flight_knows_only_its_own() -> None:
    router = state("least_in_flight")
    router.observe(report("a", num_running=50))
    router.observe(report("b"))
    winners = [router.choose(request(f"r{i}"), ["a", "b"]).replica_id for i in range(4)]
    assert sorted(winners) == ["a", "a", "b", "b"]


def test_power_of_two_takes_the_less_loaded() -> None:
    router = state("power_of_two")
    router.observe(report("a", num_running=50))
    router.observe(report("b"))
    assert {router.choose(request(f"r{i}"), ["a", "b"]).replica_id for i in range(8)} == {"b"}
