"""KV blocks as numbers: who holds which, which are free, and in what order free ones are taken.

Every block is in exactly one state:

    held         reference count >= 1
    cached-free  nobody holds it, but its content still has a name in the prefix cache
    free         nobody holds it and its content means nothing

Free blocks are taken first, the last one freed first; then cached-free ones, least recently freed first. Taking a
cached-free block is what makes the prefix cache forget it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence


class BlockPool:
    """`num_blocks` KV blocks. All methods are O(blocks named); none allocates more than it returns.

    `on_evict(block)`: a cached-free block is being taken, its name must go. `on_poison(blocks)`: the content of these
    blocks has just lost its meaning; debug builds and tests overwrite it, so that a stale read shows.
    """

    def __init__(self, num_blocks: int, on_poison: Callable[[Sequence[int]], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = _keep_no_names
        self.on_poison = on_poison
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached_free: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._named = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free and cached-free."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_cached_free(self) -> int:
        return len(self._cached_free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks with reference count 1. The caller has checked `num_free`."""
        free = self._free
        blocks = free[: -count - 1 : -1]
        del free[len(free) - len(blocks) :]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        assert count <= len(self._cached_free), "took more blocks than are free"
        evicted = [self._cached_free.popitem(last=False)[0] for _ in range(count)]
        for block in evicted:
            self._named[block] = 0
            self.on_evict(block)
        self._poison(evicted)
        return evicted

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these blocks, which hold a cached prefix (held or cached-free)."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached_free[block]
            self._ref_counts[block] += 1

    def release(self, block_table: Sequence[int]) -> None:
        """One holder less for each block of a sequence's table, tail first: a prefix outlives what builds on it."""
        freed = []
        for block in reversed(block_table):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, "a block was released twice"
            if self._ref_counts[block] == 0:
                if self._named[block]:
                    self._cached_free[block] = None
                else:
                    freed.append(block)
        self._free += freed
        if freed:
            self._poison(freed)

    def name(self, block: int) -> None:
        """This held block is in the prefix cache now: it becomes cached-free instead of free when released."""
        assert self._ref_counts[block] > 0, "only held blocks can be named"
        self._named[block] = 1

    def unname(self, block: int) -> None:
        """This block left the prefix cache: its content is nobody's any more once nobody holds it."""
        self._named[block] = 0
        if block in self._cached_free:
            del self._cached_free[block]
            self._free.append(block)
            self._poison([block])

    def names_exactly(self, blocks: Collection[int]) -> bool:
        """Whether these blocks, each once, are all that have a name."""
        return sum(self._named) == len(blocks) and all(map(self._named.__getitem__, blocks))

    def is_named(self, block: int) -> bool:
        return bool(self._named[block])

    def check(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless every block is in one state and the counts equal these tables' entries."""
        counts = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the block tables' entries"
        free, cached, held = set(self._free), self._cached_free, counts.__getitem__
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(cached), "a block is free and cached-free"
        assert not any(map(held, free)) and not any(map(held, cached)), "a free block is held"
        lost = counts.count(0) - len(free) - len(cached)
        assert lost == 0, f"{lost} blocks are neither held nor free"
        named = self._named.__getitem__
        assert not any(map(named, free)), "a free block has a name"
        assert all(map(named, cached)), "a cached-free block has no name"

    def _poison(self, blocks: Sequence[int]) -> None:
        if self.on_poison is not None:
            self.on_poison(blocks)


def _keep_no_names(block: int) -> None:
    raise AssertionError(f"block {block} had a name, but no prefix cache is attached")
