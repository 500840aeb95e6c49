"""What reports say about prefix caches, applied to the index so that arrival order does not matter.

A replica's changes ride on answers to polls and to new requests, each change only on one of them. All answers of one
step carry the same report number and overtake each other, so whether a report is news as a *load* says nothing
about whether its changes were seen. They have an order of their own, `block_hashes_number`: a batch of changes states
what became of its blocks, so a batch that comes late applies to the blocks of which no later batch has spoken.
Nothing waits for a batch that never comes (its call was given up before it was answered).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from router.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from replica.request import LoadReport

MAX_BATCHES = 64
"""Remembered per replica. Of the answers that are under way at once few carry changes."""


class PrefixChanges:
    """Thread-safe. Keeps `index` up to date; whose reports may be believed is the caller's to judge."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._applied: dict[str, dict[int, frozenset[bytes]]] = {}  # replica -> batch number -> its blocks

    def apply(self, report: LoadReport) -> None:
        """Take over what is new in the report's changes. The same batch again changes nothing."""
        added, evicted = frozenset(report.block_hashes_added), frozenset(report.block_hashes_evicted)
        if not added and not evicted:
            return
        with self._lock:
            applied = self._applied.setdefault(report.replica_id, {})
            number = report.block_hashes_number
            if number in applied:
                return
            settled = frozenset[bytes]().union(*(blocks for later, blocks in applied.items() if later > number))
            applied[number] = added | evicted
            if len(applied) > MAX_BATCHES:
                del applied[min(applied)]
            self._index.unlearn(report.replica_id, evicted - added - settled)
            self._index.learn(report.replica_id, [h for h in report.block_hashes_added if h not in settled])

    def forget(self, replica_id: str) -> None:
        """The replica is gone or its engine began a new life: its cache is empty, its batches count from the start."""
        with self._lock:
            self._applied.pop(replica_id, None)
            self._index.forget(replica_id)
