"""The block pool: states, reference counts, and the order in which free blocks are taken."""

from __future__ import annotations

import pytest

from replica.scheduler.block_pool import BlockPool
from replica.scheduler.prefix_cache import PrefixCache


def named(pool: BlockPool, *contents: bytes) -> tuple[PrefixCache, list[int]]:
    cache = PrefixCache(pool)
    blocks = pool.take(len(contents))
    for content, block in zip(contents, blocks, strict=True):
        cache.register(content, block)
    return cache, blocks


def test_every_block_is_free_held_or_cached_free() -> None:
    pool = BlockPool(4)
    cache, (a, b) = named(pool, b"a", b"b")
    assert (pool.num_held, pool.num_free, pool.num_cached_free) == (2, 2, 0)
    pool.release([a, b])
    assert (pool.num_held, pool.num_free, pool.num_cached_free) == (0, 4, 2)
    pool.check([])
    cache.check()


def test_free_blocks_are_taken_before_cached_ones_and_the_last_freed_first() -> None:
    pool = BlockPool(4)
    _, blocks = named(pool, b"a", b"b")
    c, d = pool.take(2)
    pool.release(blocks)
    pool.release([c])
    pool.release([d])
    assert pool.take(3) == [d, c, blocks[1]], "unnamed first, then the cached block released first: the tail"


def test_the_least_recently_freed_prefix_goes_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(4)
    _, (a, b, c, d) = named(pool, b"a", b"b", b"c", b"d")
    pool.release([c, d])
    pool.release([a, b])
    assert pool.take(4) == [d, c, b, a]


def test_a_hit_takes_a_block_out_of_the_free_list_and_counts_holders() -> None:
    pool = BlockPool(2)
    _, (a,) = named(pool, b"a")
    pool.hold([a])
    pool.release([a])
    assert (pool.ref_count(a), pool.num_free) == (1, 1)
    pool.release([a])
    pool.hold([a])
    assert (pool.ref_count(a), pool.num_free) == (1, 1)
    pool.check([[a]])


def test_a_name_lives_until_its_block_is_taken_again() -> None:
    pool = BlockPool(1)
    cache, (a,) = named(pool, b"a")
    pool.release([a])
    assert cache.match(lambda i: b"a", 1) == [a]
    pool.take(1)
    assert cache.match(lambda i: b"a", 1) == []


def test_blocks_are_poisoned_when_their_content_loses_its_meaning() -> None:
    poisoned: list[list[int]] = []
    pool = BlockPool(2, on_poison=lambda blocks: poisoned.append(list(blocks)))
    _, (a,) = named(pool, b"a")
    (b,) = pool.take(1)
    pool.release([a, b])
    assert poisoned == [[b]], "a cached block keeps its content"
    pool.take(2)
    assert poisoned == [[b], [a]]


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(1)
    (a,) = pool.take(1)
    pool.release([a])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([a])


def test_the_first_block_with_a_content_keeps_the_name() -> None:
    pool = BlockPool(2)
    cache, (a,) = named(pool, b"a")
    (b,) = pool.take(1)
    cache.register(b"a", b)
    assert cache.match(lambda i: b"a", 1) == [a]
    pool.release([b])
    assert pool.num_cached_free == 0


def test_changes_since_the_last_report_are_netted_and_come_in_pieces() -> None:
    pool = BlockPool(3)
    cache, blocks = named(pool, b"a", b"b", b"c")
    assert cache.take_changes(2) == ((b"a", b"b"), ())
    pool.release(blocks)
    pool.take(3)
    assert cache.take_changes(10) == ((), (b"b", b"a")), "c came and went: no news"
    assert cache.take_changes(10) == ((), ())
    pool.release(pool_blocks := blocks)
    (again,) = pool.take(1)
    cache.register(b"a", again)
    pool.release([again])
    pool.take(3)
    assert cache.take_changes(10) == ((), ()), "nothing that the reader knew has changed"
    assert len(pool_blocks) == 3


def test_a_content_evicted_and_computed_again_is_no_news() -> None:
    pool = BlockPool(1)
    cache, (a,) = named(pool, b"a")
    cache.take_changes(10)
    pool.release([a])
    (a,) = pool.take(1)
    cache.register(b"a", a)
    assert cache.take_changes(10) == ((), ())


def test_dropped_contents_are_found_no_more_and_their_blocks_are_free_once_nobody_holds_them() -> None:
    poisoned: list[int] = []
    pool = BlockPool(3, on_poison=poisoned.extend)
    cache, (a, b, c) = named(pool, b"a", b"b", b"c")
    pool.release([a])
    cache.take_changes(10)
    cache.drop([b"a", b"b", b"unknown"])
    cache.check()
    pool.check([[b, c]])
    assert cache.match(lambda i: (b"a", b"b")[i], 2) == []
    assert (pool.num_cached_free, pool.num_free, poisoned) == (0, 1, [a])
    pool.release([b])
    assert (pool.num_cached_free, pool.num_free, poisoned) == (0, 2, [a, b])
    assert cache.take_changes(10) == ((), (b"a", b"b"))
