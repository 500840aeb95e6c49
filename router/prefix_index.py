"""Which replica holds which prompt block: block hash -> set of replicas, bounded, least recently used out first.

A block's hash is chained (it covers everything before it, see `replica/scheduler/block_hash.py`), so a request's
leading run of known hashes is what a replica can reuse. The set is an integer with one bit a replica: following a
chain of 32 blocks through any number of replicas is 32 dictionary look-ups and bitwise ands.

Learned from two sources. Requests sent make it hopeful: their blocks are expected where they were sent, before any
report. Reports make it exact: `block_hashes_added` and `block_hashes_evicted`. Limit: a block of a request that was
refused after it was sent is believed until it is evicted here; the cost is a missed reuse, never a wrong answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence

MAX_DEAD_BITS = 64
"""Bits of dead replicas are only masked out; after so many of them one sweep cleans all entries."""


class Matched(Mapping[str, int]):
    """Replica -> how many leading blocks of one chain it holds; replicas that hold none are absent.

    Names nobody before somebody asks: in a large cluster hundreds may hold the same beginning. `runs`: how many blocks,
    and the bits of those that hold exactly so many, shortest first. A replica that is forgotten meanwhile is left out.
    """

    __slots__ = ("_bits", "_replica_of", "_runs")

    def __init__(self, runs: list[tuple[int, int]], bits: Mapping[str, int], replica_of: Mapping[int, str]) -> None:
        self._runs = runs
        self._bits = bits
        self._replica_of = replica_of

    @property
    def most(self) -> int:
        """Blocks that the best one holds; 0 when nobody holds any."""
        return self._runs[-1][0] if self._runs else 0

    def num_of(self, replica_id: str) -> int:
        """0 for a replica that holds none."""
        return self.counts((replica_id,))[0]

    def num_holding(self, num_blocks: int) -> int:
        """Replicas that hold so many blocks or more."""
        return sum(holders.bit_count() for num, holders in self._runs if num >= num_blocks)

    def counts(self, replica_ids: Sequence[str]) -> list[int]:
        """How many blocks each of these holds."""
        bit_of = self._bits.get
        bits = [bit_of(replica_id, 0) for replica_id in replica_ids]
        counts = [0] * len(bits)
        for num_blocks, holders in self._runs:
            counts = [num_blocks if holders & bit else count for bit, count in zip(bits, counts, strict=True)]
        return counts

    def longest(self, start: int = 0) -> Iterator[str]:
        """Those that hold most first; among equals those that the index came to know as its `start`-th or later."""
        for _, holders in reversed(self._runs):
            late = holders >> start << start
            for bits in (late, holders ^ late):
                yield from self._names(bits)

    def items(self) -> ItemsView[str, int]:
        """Those that hold most first. One pass, where looking up each replica would take a pass each."""
        return _Items(self)

    def runs(self) -> Iterator[tuple[int, Iterator[str]]]:
        """Numbers of blocks, the largest first, and who holds exactly so many."""
        return ((num_blocks, self._names(holders)) for num_blocks, holders in reversed(self._runs))

    def _names(self, bits: int) -> Iterator[str]:
        while bits:
            bit = bits & -bits
            bits ^= bit
            if (replica_id := self._replica_of.get(bit)) is not None:
                yield replica_id

    def __getitem__(self, replica_id: str) -> int:
        if num_blocks := self.num_of(replica_id):
            return num_blocks
        raise KeyError(replica_id)

    def __iter__(self) -> Iterator[str]:
        return self.longest()

    def __len__(self) -> int:
        return sum(holders.bit_count() for _, holders in self._runs)


class _Items(ItemsView[str, int]):
    def __init__(self, matched: Matched) -> None:
        super().__init__(matched)
        self._matched = matched

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for num_blocks, replica_ids in self._matched.runs():
            for replica_id in replica_ids:
                yield replica_id, num_blocks


NOBODY = Matched([], {}, {})


class PrefixIndex:
    """Thread-safe. Holds at most `max_blocks` hashes."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}  # live replica -> its bit
        self._replica_of: dict[int, str] = {}
        self._live = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._holders)

    def learn(self, replica_id: str, block_hashes: Iterable[bytes]) -> None:
        """The replica holds these blocks, or will soon."""
        with self._lock:
            bit, holders = self._bit_of(replica_id), self._holders
            for block_hash in block_hashes:
                holders[block_hash] = holders.get(block_hash, 0) | bit
                holders.move_to_end(block_hash)
            while len(holders) > self._max_blocks:
                holders.popitem(last=False)

    def unlearn(self, replica_id: str, block_hashes: Iterable[bytes]) -> None:
        """The replica evicted these blocks."""
        with self._lock:
            bit = self._bits.get(replica_id, 0)
            for block_hash in block_hashes:
                holders = self._holders.get(block_hash, 0) & ~bit
                if holders:
                    self._holders[block_hash] = holders
                else:
                    self._holders.pop(block_hash, None)

    def match(self, block_hashes: Sequence[bytes]) -> Matched:
        """How many leading blocks of this chain the replicas hold."""
        runs: list[tuple[int, int]] = []
        with self._lock:
            holding, num_blocks = self._live, 0
            for block_hash in block_hashes:
                still = self._holders.get(block_hash, 0) & holding
                if still != holding and num_blocks:
                    runs.append((num_blocks, holding ^ still))
                holding = still
                if not holding:
                    break
                num_blocks += 1
            if holding and num_blocks:
                runs.append((num_blocks, holding))
        return Matched(runs, self._bits, self._replica_of)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        with self._lock:
            bit = self._bits.pop(replica_id, 0)
            if not bit:
                return
            del self._replica_of[bit]
            self._live &= ~bit
            self._dead |= bit
            if self._dead.bit_count() > MAX_DEAD_BITS:
                self._sweep()

    def _bit_of(self, replica_id: str) -> int:
        bit = self._bits.get(replica_id)
        if bit is None:
            used = self._live | self._dead
            bit = ~used & (used + 1)  # the lowest bit that is free
            self._bits[replica_id] = bit
            self._replica_of[bit] = replica_id
            self._live |= bit
        return bit

    def _sweep(self) -> None:
        for block_hash, holders in list(self._holders.items()):
            if holders & self._live:
                self._holders[block_hash] = holders & self._live
            else:
                del self._holders[block_hash]
        self._dead = 0
