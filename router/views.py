"""The newest load report of every replica, whatever the order in which reports arrive.

Reports ride on answers to polls and to new requests and on Serve's routing stats, so old ones come late and the same
one comes often. Within one epoch (one life of a replica's engine) the number orders them. An epoch that wasn't seen
before replaces the current one; one that was replaced is never believed again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replica.request import LoadReport

NEVER = float("-inf")
"""When the last believable report came, if none did."""

SILENT_AFTER_S = 15.0
"""A replica reports at every step, and once a second without any; a step may take seconds (a long prompt, a CPU)."""

MAX_RETIRED_EPOCHS = 8
"""Remembered per replica: a late report is at most seconds old, and an engine isn't replaced that often."""


class SeenReport(NamedTuple):
    """A report and when it arrived here; `NEVER` when it isn't believed any more."""

    report: LoadReport
    arrived_at_s: float


@dataclass(slots=True)
class _Replica:
    seen: SeenReport
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_RETIRED_EPOCHS))


class ReplicaViews:
    """Thread-safe. Times are seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._unheard: set[str] = set()  # that never spoke, and didn't answer
        self._changed: set[str] = set()

    def observe(self, report: LoadReport, now: float) -> bool:
        """Keep `report` if it is news; returns whether it was. The age of a view counts from its last news."""
        with self._lock:
            replica = self._replicas.get(report.replica_id)
            if replica is None:
                self._replicas[report.replica_id] = _Replica(SeenReport(report, now))
                self._unheard.discard(report.replica_id)
                self._changed.add(report.replica_id)
                return True
            current = replica.seen.report
            if report.epoch == current.epoch:
                if report.number <= current.number:
                    return False
            elif report.epoch in replica.retired:
                return False
            else:
                replica.retired.append(current.epoch)
            replica.seen = SeenReport(report, now)
            self._changed.add(report.replica_id)
            return True

    def distrust(self, replica_id: str) -> None:
        """What the replica last said is too old to be believed, however lately it came. The next news ends that."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None:
                self._unheard.add(replica_id)
            else:
                replica.seen = SeenReport(replica.seen.report, NEVER)
                self._changed.add(replica_id)

    def num_answering(self, replica_ids: Collection[str], now: float) -> int:
        """How many are believed to live: their last news came lately, or they are new and haven't failed yet."""
        with self._lock:
            seen = [replica.seen for name in replica_ids if (replica := self._replicas.get(name)) is not None]
            num_new = len(set(replica_ids) - self._replicas.keys() - self._unheard)
        return num_new + sum(now - report.arrived_at_s <= SILENT_AFTER_S for report in seen)

    def newest(self) -> dict[str, SeenReport]:
        """The newest report of every replica that has spoken."""
        with self._lock:
            return {replica_id: replica.seen for replica_id, replica in self._replicas.items()}

    def seen(self, replica_id: str) -> SeenReport | None:
        """The replica's newest report, None when it has not spoken."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            return replica.seen if replica is not None else None

    def take_changed(self) -> set[str]:
        """The replicas of which there was news since the last call. For one reader."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def look_again(self, replica_ids: Collection[str]) -> None:
        """`take_changed` is to name these once more."""
        with self._lock:
            self._changed.update(replica_ids)

    def forget(self, replica_id: str) -> None:
        with self._lock:
            self._unheard.discard(replica_id)
            if self._replicas.pop(replica_id, None) is not None:
                self._changed.add(replica_id)
