"""Which full, computed blocks can be reused: content hash -> block, and what changed since the last load report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from operator import eq

from replica.scheduler.block_pool import BlockPool


class PrefixCache:
    """Names of blocks in a pool. One block has at most one name; the first block with a content keeps the name.

    A name lives until its block is taken again, or until a sequence that used it fails. Changes since the last
    `take_changes` are netted (added and evicted in between is no news), so what is kept of them is bounded by the
    number of blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._added: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hash_at: Callable[[int], bytes], limit: int) -> list[int]:
        """The blocks of the longest cached prefix, at most `limit`. `hash_at(i)` is the chain's i-th hash, asked for
        in order and only as far as blocks match. Holds nothing yet: hold them before anything is taken."""
        blocks: list[int] = []
        while len(blocks) < limit:
            block = self._block_of.get(hash_at(len(blocks)))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, content: bytes, block: int) -> None:
        """This held, full and computed block has this content. A content that has a block already keeps it."""
        if content in self._block_of or block in self._hash_of:
            return
        self._block_of[content] = block
        self._hash_of[block] = content
        self._pool.name(block)
        if content in self._evicted:
            del self._evicted[content]
        else:
            self._added[content] = None

    def drop(self, contents: Iterable[bytes]) -> None:
        """Forget these contents, whoever holds their blocks: what a failed sequence read and wrote is under
        suspicion."""
        for content in contents:
            if (block := self._block_of.get(content)) is not None:
                self._forget(block)
                self._pool.unname(block)

    def take_changes(self, limit: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Hashes added and evicted since they were last taken, at most `limit` of each; the rest stays for later."""
        return _take(self._added, limit), _take(self._evicted, limit)

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block)
        del self._block_of[content]
        if content in self._added:
            del self._added[content]
        else:
            self._evicted[content] = None

    def check(self) -> None:
        """Raises AssertionError unless both directions agree with each other and with the pool."""
        names, blocks = map(self._hash_of.get, self._block_of.values()), self._hash_of
        assert len(blocks) == len(self._block_of), "blocks and names differ in number"
        assert all(map(eq, names, self._block_of)), "a block has another name than the one that leads to it"
        assert self._pool.names_exactly(blocks), "the pool takes other blocks for named"


def _take(changes: dict[bytes, None], limit: int) -> tuple[bytes, ...]:
    if not changes:
        return ()
    taken = tuple(islice(changes, limit))
    for content in taken:
        del changes[content]
    return taken
