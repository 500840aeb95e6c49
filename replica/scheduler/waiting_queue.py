"""Sequences that wait for a place, in the order of the policy; preempted ones return to their place in it.

The order never changes while a sequence waits: `fcfs` orders by arrival, and under `priority` every waiting sequence
ages alike, so that `priority * ageing + arrival time` compares the same at any moment. Hence heaps: all that wait but
the parked; the parked (long prompts for which no long-prefill slot is free, so that each step doesn't meet them
again); and, beside the first, those small enough to pass a head that waits for KV space. Entries of sequences that
left are dropped when they surface. What a step asks is O(log) in the number waiting.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush

from replica.scheduler.sequence import Sequence

_Entry = tuple[tuple[float, int], int, Sequence]


class WaitingQueue:
    """`fresh`: never admitted (bounds and expiry are about them); `returned`: admitted before."""

    def __init__(self) -> None:
        self.fresh: OrderedDict[int, Sequence] = OrderedDict()
        self.returned: dict[int, Sequence] = {}
        self.num_fresh_tokens = 0
        self.num_parked = 0
        self._in_order: list[_Entry] = []
        self._parked: list[_Entry] = []
        self._small: list[_Entry] = []
        self._not_overtaken: list[Sequence] = []
        self._overtaken: deque[_Entry] = deque()
        self._overdue: list[_Entry] = []
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self.fresh) + len(self.returned)

    @property
    def num_tokens(self) -> int:
        """Known tokens of all that wait."""
        return self.num_fresh_tokens + self.num_returned_tokens

    @property
    def num_returned_tokens(self) -> int:
        return sum(len(seq.tokens) for seq in self.returned.values())

    def add_fresh(self, seq: Sequence) -> None:
        self.fresh[seq.seq_id] = seq
        self.num_fresh_tokens += seq.input_len
        self._enter(seq)

    def add_returned(self, seq: Sequence) -> None:
        self.returned[seq.seq_id] = seq
        self._enter(seq)

    def remove(self, seq: Sequence) -> None:
        if self.fresh.pop(seq.seq_id, None) is not None:
            self.num_fresh_tokens -= seq.input_len
        else:
            del self.returned[seq.seq_id]
        self.num_parked -= seq.parked
        seq.parked = False
        seq.overtaken_since_s = seq.kv_blocked_since_s = None
        seq.ticket = 0

    def park(self, seq: Sequence) -> None:
        """Set aside until `first_parked` is asked for: others may pass it."""
        self._num_tickets += 1
        seq.ticket = self._num_tickets
        seq.parked = True
        self.num_parked += 1
        self._not_overtaken.append(seq)
        heappush(self._parked, (seq.queue_key, seq.ticket, seq))

    def note_overtaken(self, by: Sequence, now_s: float) -> None:
        """`by` enters past whoever is parked and comes before it. Amortised O(1): each is noted once."""
        for seq in self._not_overtaken:
            if seq.parked and seq.queue_key < by.queue_key:
                seq.overtaken_since_s = now_s
                self._overtaken.append((seq.queue_key, seq.ticket, seq))
        if self._not_overtaken:
            self._not_overtaken = [s for s in self._not_overtaken if s.parked and s.overtaken_since_s is None]

    def first(self) -> Sequence | None:
        """The first that isn't parked, left in place."""
        return _first(self._in_order)

    def first_parked(self) -> Sequence | None:
        return _first(self._parked)

    def first_overdue(self, before_s: float) -> Sequence | None:
        """The first of the parked that was overtaken at `before_s` or earlier: nobody may pass it. `before_s` never
        falls. Amortised O(log): each of the parked comes once."""
        while (seq := self._first_overtaken()) is not None and (seq.overtaken_since_s or 0.0) <= before_s:
            heappush(self._overdue, self._overtaken.popleft())
        return _first(self._overdue)

    def _first_overtaken(self) -> Sequence | None:
        while self._overtaken and self._overtaken[0][1] != self._overtaken[0][2].ticket:
            self._overtaken.popleft()
        return self._overtaken[0][2] if self._overtaken else None

    def first_small(self) -> Sequence | None:
        """The first whose whole demand is small enough to pass a head that waits for KV space."""
        seq = _first(self._small)
        while seq is not None and seq.parked:
            heappop(self._small)
            seq = _first(self._small)
        return seq

    def expired(self, before_s: float) -> list[Sequence]:
        """Fresh ones queued before `before_s`, oldest first; left in place."""
        found = []
        for seq in self.fresh.values():
            if seq.queued_at_s >= before_s:
                break
            found.append(seq)
        return found

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the one that has waited longest has been waiting (a preempted one: since its preemption)."""
        since = [seq.waiting_since_s for seq in self.returned.values()]
        if self.fresh:
            since.append(next(iter(self.fresh.values())).waiting_since_s)
        return max(0.0, now_s - min(since)) if since else 0.0

    def check(self) -> None:
        """Raises AssertionError unless everyone who waits is in one of the two orders, once."""
        entries = [*self._in_order, *self._parked]
        valid = [seq.seq_id for _, ticket, seq in entries if ticket == seq.ticket]
        assert len(valid) == len(self) and set(valid) == self.fresh.keys() | self.returned.keys(), (
            "a waiting sequence is lost, or has two places"
        )
        assert self.num_fresh_tokens == sum(seq.input_len for seq in self.fresh.values())
        waiting = [*self.fresh.values(), *self.returned.values()]
        assert self.num_parked == sum(seq.parked for seq in waiting)

    def _enter(self, seq: Sequence) -> None:
        self._num_tickets += 1
        seq.ticket = self._num_tickets
        entry = (seq.queue_key, seq.ticket, seq)
        for heap in (self._in_order, self._small) if seq.is_small else (self._in_order,):
            heappush(heap, entry)
            if len(heap) > 2 * len(self) + 64:
                heap[:] = [kept for kept in heap if kept[1] == kept[2].ticket]
                heapify(heap)


def _first(heap: list[_Entry]) -> Sequence | None:
    while heap and heap[0][1] != heap[0][2].ticket:
        heappop(heap)
    return heap[0][2] if heap else None
