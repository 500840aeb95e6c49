"""Sequences that wait for a place, in order of arrival; preempted ones return to their place in it.

Two ordered lists whose heads are compared: `fresh` (never admitted, arrival order comes for free) and `returned`
(admitted before; few, kept sorted). Bounds and expiry are about fresh ones only. Everything a step asks is O(1) in the
number waiting.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from operator import attrgetter

from replica.scheduler.sequence import Sequence

_by_arrival = attrgetter("arrival")


class WaitingQueue:
    """`num_tokens`: known tokens of all that wait. `num_fresh_*`: of those never admitted."""

    def __init__(self) -> None:
        self._fresh: OrderedDict[int, Sequence] = OrderedDict()
        self._returned: list[Sequence] = []
        self._num_fresh_tokens = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    @property
    def num_fresh(self) -> int:
        return len(self._fresh)

    @property
    def num_fresh_tokens(self) -> int:
        return self._num_fresh_tokens

    @property
    def num_tokens(self) -> int:
        return self._num_fresh_tokens + sum(len(seq.tokens) for seq in self._returned)

    def add_fresh(self, seq: Sequence) -> None:
        self._fresh[seq.seq_id] = seq
        self._num_fresh_tokens += seq.input_len

    def add_returned(self, seq: Sequence) -> None:
        insort(self._returned, seq, key=_by_arrival)

    def head(self) -> Sequence | None:
        """The next in order, left in place."""
        fresh = next(iter(self._fresh.values()), None)
        if self._returned and (fresh is None or self._returned[0].arrival < fresh.arrival):
            return self._returned[0]
        return fresh

    def remove(self, seq: Sequence) -> None:
        if self._fresh.pop(seq.seq_id, None) is not None:
            self._num_fresh_tokens -= seq.input_len
        else:
            self._returned.remove(seq)

    def expired(self, before_s: float) -> list[Sequence]:
        """Fresh ones queued before `before_s`, oldest first; left in place."""
        found = []
        for seq in self._fresh.values():
            if seq.queued_at_s >= before_s:
                break
            found.append(seq)
        return found

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the one that has waited longest has been waiting (a preempted one: since its preemption)."""
        waits = [now_s - seq.waiting_since_s for seq in self._returned]
        if self._fresh:
            waits.append(now_s - next(iter(self._fresh.values())).waiting_since_s)
        return max(waits, default=0.0)

    def members(self) -> list[Sequence]:
        """All that wait, in order."""
        return sorted([*self._fresh.values(), *self._returned], key=_by_arrival)
