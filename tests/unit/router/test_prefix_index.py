from collections.abc import Iterator

import pytest

from router import prefix_index
from router.prefix_index import Matched, PrefixIndex

CHAIN = tuple(bytes([i]) for i in range(6))


def test_match_counts_leading_blocks_of_every_holder() -> None:
    index = PrefixIndex(100)
    index.learn("a", CHAIN)
    index.learn("b", CHAIN[:2])
    index.learn("c", CHAIN[1:])
    assert index.match(CHAIN[:4]) == {"a": 4, "b": 2}
    assert index.match(()) == {}
    assert index.match((b"?", *CHAIN)) == {}


class Passes(list[tuple[int, int]]):
    """Counts how often somebody begins to go through it."""

    num = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.num += 1
        return super().__iter__()

    def __reversed__(self) -> Iterator[tuple[int, int]]:
        self.num += 1
        return super().__reversed__()


def test_all_holders_are_told_in_one_pass_those_of_most_first() -> None:
    runs = Passes([(1, 0b001), (3, 0b110)])
    matched = Matched(runs, {"a": 1, "b": 2, "c": 4}, {1: "a", 2: "b", 4: "c"})
    assert list(iter(matched.items())) == [("b", 3), ("c", 3), ("a", 1)]
    assert (runs.num, len(matched.items()), ("c", 3) in matched.items()) == (1, 3, True)


def test_a_replica_that_joins_mid_chain_holds_no_leading_block() -> None:
    index = PrefixIndex(100)
    index.learn("a", CHAIN[:1])
    index.learn("b", CHAIN[1:])
    assert index.match(CHAIN) == {"a": 1}


def test_an_evicted_block_ends_the_chain_there() -> None:
    index = PrefixIndex(100)
    index.learn("a", CHAIN)
    index.learn("b", CHAIN)
    index.unlearn("a", [CHAIN[2], b"never seen"])
    assert index.match(CHAIN) == {"a": 2, "b": 6}
    index.unlearn("b", CHAIN)
    assert index.match(CHAIN) == {"a": 2}
    assert len(index) == 5


def test_a_dead_replica_is_forgotten_and_its_successor_does_not_inherit() -> None:
    index = PrefixIndex(100)
    index.learn("a", CHAIN)
    index.forget("a")
    assert index.match(CHAIN) == {}
    index.learn("b", CHAIN[:1])
    assert index.match(CHAIN) == {"b": 1}
    index.forget("never seen")
    index.unlearn("never seen", CHAIN)
    assert index.match(CHAIN) == {"b": 1}


def test_the_least_recently_learned_block_goes_first() -> None:
    index = PrefixIndex(3)
    index.learn("a", CHAIN[:3])
    index.learn("a", CHAIN[:1])
    index.learn("a", [b"x"])
    assert len(index) == 3
    assert index.match(CHAIN) == {"a": 1}
    assert index.match([CHAIN[1]]) == {}
    assert index.match([CHAIN[2]]) == {"a": 1}


def test_many_dead_replicas_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_DEAD_BITS", 4)
    index = PrefixIndex(1000)
    index.learn("survivor", CHAIN)
    for life in range(50):
        index.learn(f"life-{life}", [*CHAIN, b"own-%d" % life])
        index.forget(f"life-{life}")
    assert index.match(CHAIN) == {"survivor": 6}
    assert max(holders.bit_length() for holders in index._holders.values()) <= 6
    assert len(index) <= 6 + 5


def test_who_holds_most_is_named_first_and_nobody_before_it_is_asked() -> None:
    index = PrefixIndex(100)
    for replica_id, num_blocks in (("a", 2), ("b", 6), ("c", 6), ("d", 4)):
        index.learn(replica_id, CHAIN[:num_blocks])
    found = index.match(CHAIN)
    assert (list(found), list(found.longest(start=2))) == (["b", "c", "d", "a"], ["c", "b", "d", "a"])
    assert (found.most, found.num_of("d"), found.num_of("nobody"), len(found)) == (6, 4, 0, 4)
    index.forget("c")
    assert list(found) == ["b", "d", "a"]
    assert (index.match([b"?"]).most, list(index.match([b"?"]))) == (0, [])
