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
from collections.abc import Iterable, Sequence

MAX_DEAD_BITS = 64
"""Bits of dead replicas are only masked out; after so many of them one sweep cleans all entries."""


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
            bit = self._bit_of(replica_id)
            for block_hash in block_hashes:
                self._holders[block_hash] = self._holders.get(block_hash, 0) | bit
                self._holders.move_to_end(block_hash)
            while len(self._holders) > self._max_blocks:
                self._holders.popitem(last=False)

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

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Replica -> how many leading blocks of this chain it holds; replicas that hold none are absent."""
        matched: dict[str, int] = {}
        if not block_hashes:
            return matched
        with self._lock:
            holding = self._live
            for num_blocks, block_hash in enumerate(block_hashes):
                still = self._holders.get(block_hash, 0) & holding
                if still != holding and num_blocks:
                    self._name(holding & ~still, num_blocks, matched)
                holding = still
                if not holding:
                    return matched
            self._name(holding, len(block_hashes), matched)
        return matched

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

    def _name(self, bits: int, num_blocks: int, matched: dict[str, int]) -> None:
        """Note `num_blocks` for every replica in `bits`."""
        while bits and num_blocks:
            bit = bits & -bits
            matched[self._replica_of[bit]] = num_blocks
            bits ^= bit

    def _sweep(self) -> None:
        for block_hash, holders in list(self._holders.items()):
            if holders & self._live:
                self._holders[block_hash] = holders & self._live
            else:
                del self._holders[block_hash]
        self._dead = 0
