"""What the prefix cache gained and lost, told once to each reader of this replica's load reports.

A report tells only what changed since the one before it, but a reader (an ingress process, named by the lease of its
streams) gets just the reports that ride on answers to it. So changes wait here for every reader until its next
answer, added and evicted ones settled against each other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from replica.request import LoadReport

_MAX_READERS = 64
_MAX_WAITING = 2048
"""Hashes that wait for a silent reader. The oldest are dropped beyond: it then believes in a few blocks wrongly."""


class CacheChanges:
    """Readers are learned by `for_reader`; the one silent for longest is forgotten when there are too many."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[bytes, bool]] = OrderedDict()
        self._num_told = 0

    def take(self, report: LoadReport) -> LoadReport:
        """Keeps a new report's changes for all readers and returns it without them."""
        changes = dict.fromkeys(report.block_hashes_evicted, False) | dict.fromkeys(report.block_hashes_added, True)
        if not changes:
            return report
        for waiting in self._waiting.values():
            waiting.update(changes)
            while len(waiting) > _MAX_WAITING:
                waiting.popitem(last=False)
        return replace(report, block_hashes_added=(), block_hashes_evicted=())

    def for_reader(self, reader: str, report: LoadReport) -> LoadReport:
        """The report with all changes that this reader hasn't been told yet, as a numbered batch.

        Answers to a reader may overtake each other: the number tells which batch is the later one.
        """
        waiting = self._waiting.setdefault(reader, OrderedDict())
        self._waiting.move_to_end(reader)
        if len(self._waiting) > _MAX_READERS:
            self._waiting.popitem(last=False)
        if not waiting:
            return report
        added = tuple(block_hash for block_hash, is_held in waiting.items() if is_held)
        evicted = tuple(block_hash for block_hash, is_held in waiting.items() if not is_held)
        waiting.clear()
        self._num_told += 1
        return replace(
            report, block_hashes_added=added, block_hashes_evicted=evicted, block_hashes_number=self._num_told
        )
