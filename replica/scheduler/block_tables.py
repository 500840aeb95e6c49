"""Sequences' hold on KV blocks: growing a table, giving it back, reusing a cached prefix, naming computed blocks."""

from __future__ import annotations

from functools import partial

from replica.scheduler.block_pool import BlockPool
from replica.scheduler.prefix_cache import PrefixCache
from replica.scheduler.sequence import Sequence


class BlockTables:
    """The one place where blocks change hands. `cache` is None when prefix caching is off."""

    def __init__(self, pool: BlockPool, block_size: int, cache: PrefixCache | None) -> None:
        self.pool = pool
        self.block_size = block_size
        self.cache = cache

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def room(self, seq: Sequence) -> int:
        """Most tokens that fit after those scheduled and in this step's chunk, with nobody preempted."""
        return seq.num_slots + self.pool.num_free * self.block_size - seq.num_scheduled - seq.chunk

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Make the table hold positions below `num_tokens`. The caller has checked that free blocks suffice."""
        if num_tokens > seq.num_slots:
            seq.block_table += self.pool.take(-(-(num_tokens - seq.num_slots) // self.block_size))
            seq.hold_slots(len(seq.block_table) * self.block_size)

    def grow_each(self, seqs: list[Sequence]) -> None:
        """One block more for each. The caller has checked that free blocks suffice."""
        for seq, block in zip(seqs, self.pool.take(len(seqs)), strict=True):
            seq.block_table.append(block)
            seq.hold_slots(seq.num_slots + self.block_size)

    def release(self, seq: Sequence) -> None:
        """Give everything back. The plan's columns keep the old list, so the sequence gets a new one."""
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.hold_slots(0)

    def lookup(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix of the known tokens. At least one known token never hits: it must be
        computed for its logits."""
        if self.cache is None:
            return []
        hash_at = partial(seq.hash_at, block_size=self.block_size)
        return self.cache.match(hash_at, (len(seq.tokens) - 1) // self.block_size)

    def num_unheld(self, blocks: list[int]) -> int:
        return sum(self.pool.ref_count(block) == 0 for block in blocks)

    def adopt(self, seq: Sequence, hits: list[int]) -> None:
        """Start a table with these cached blocks; their tokens count as computed."""
        self.pool.hold(hits)
        seq.block_table = list(hits)
        seq.num_scheduled = seq.num_computed = len(hits) * self.block_size
        seq.hold_slots(seq.num_computed)
        seq.num_hashed = len(hits)

    def register_computed(self, seq: Sequence) -> None:
        """Name the blocks that `num_computed` has filled since last time."""
        full = seq.num_computed // self.block_size
        if full > seq.num_hashed:
            if self.cache is not None:
                if len(seq.hashes) < full:
                    seq.hash_at(full - 1, self.block_size)
                for i in range(seq.num_hashed, full):
                    self.cache.register(seq.hashes[i], seq.block_table[i])
            seq.num_hashed = full
        if seq.num_computed >= seq.input_len:  # before that, every commit is looked at for the first token
            seq.commit_due = min((full + 1) * self.block_size, seq.max_len - 1)

    def distrust(self, seq: Sequence) -> None:
        """Nobody may start from KV of this sequence's context again. It failed, perhaps on non-finite values, which
        show only where a row samples: blocks that it computed, or found in the cache, may have them for long."""
        if self.cache is not None:
            self.cache.drop(seq.hashes)
