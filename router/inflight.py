"""The ledger of what this router sent: how it knows of load that no report shows yet.

A report is always a little old. Requests sent since then would be invisible, and a burst between two reports would
pile onto the replica that looked idle. So each request has an entry here from the decision to its end:

    sent ----------> accepted ----------> reported ----------> ended
    (decided)        (first message        (a newer report      (any exit: finish, error,
                      of its stream)        includes it)         client gone, expiry, death)
    |--------- pending: no report includes it ---------|
    |------------------------- in flight ---------------------------|

A report includes a request when it was made after the request was accepted, so an entry stops pending at the first
report with a number above the one that was current at acceptance. Until then it may be counted twice (in the ledger
and in a report): for one report's time too much load, never too little. Another epoch means that the replica's engine
began anew: what the old one had accepted is lost, and pends no more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replica.request import LoadReport
    from router.types import RouteRequest


class LedgerCounts(NamedTuple):
    """One replica's share of the ledger: sequences of open requests, and those that no report includes yet with their
    tokens. A request for n answers is n sequences, as in reports; its prompt counts once. `prefill_tokens`: what the
    requests without a first token have to compute of their prompts (the cached beginning is left out), and how much
    of that is of pending ones. `drawn_percent`, `drawn_token_percent`: pending sequences and those tokens once more,
    each times how surely other routers send their requests of that kind there too, in percent."""

    num_in_flight: int = 0
    num_pending: int = 0
    pending_tokens: int = 0
    pending_output_tokens: int = 0
    prefill_tokens: int = 0
    pending_prefill_tokens: int = 0
    drawn_percent: int = 0
    drawn_token_percent: int = 0


NOTHING = LedgerCounts()

LAG_WEIGHT = 0.05
"""Of one request in the smoothed lag."""
MAX_OVER = 4096
"""Calls that are over of which it is known where they went, the latest ones."""


@dataclass(slots=True)
class _Entry:
    """`accepted_at` is the report position (epoch, number) current at acceptance, None before it. `prefill_tokens`: 0
    from the first token on. `request`: the very object, which tells this try from others of the same id."""

    request: RouteRequest
    replica_id: str
    num_sequences: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens: int
    drawn_percent: int
    heard_at_s: float
    accepted_at_s: float = 0.0
    accepted_at: tuple[str, int] | None = None
    pending: bool = True


class InflightLedger:
    """Thread-safe. Times are seconds of the caller's monotonic clock.

    `ended` is remembered for `remember_ended_s`: the router works in another thread than the ingress, and a decision
    that was already under way when the caller gave up must not open an entry that nobody will close. An entry of which
    nothing was heard for `expire_after_s` is dropped: the last resort against a lost end.

    Tries of one request share its id, but each has a `RouteRequest` object of its own. `routed` and `released`, which
    Serve calls when it gets round to it, say of which they speak: of one that another has followed they change nothing.
    """

    def __init__(
        self, *, expected_output_tokens: int = 256, expire_after_s: float = 300.0, remember_ended_s: float = 30.0
    ) -> None:
        self._expected_output_tokens = expected_output_tokens
        self._expire_after_s = expire_after_s
        self._remember_ended_s = remember_ended_s
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._counts: dict[str, LedgerCounts] = {}
        self._accepted: dict[str, set[str]] = {}  # replica -> requests accepted there that still pend
        self._newest: dict[str, tuple[str, int]] = {}  # replica -> position of its newest report
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._over: OrderedDict[str, str] = OrderedDict()  # request whose call is over unheard -> where it went
        self._changed: set[str] = set()
        self.report_lag_s = 0.0
        """How long reports are behind: from a request's acceptance to the report that includes it, smoothed."""

    def __len__(self) -> int:
        return len(self._entries)

    def counts(self) -> dict[str, LedgerCounts]:
        """Each replica's counts now; a replica without open requests is absent."""
        with self._lock:
            return dict(self._counts)

    def counts_of(self, replica_id: str) -> LedgerCounts:
        """One replica's counts now; `NOTHING` without open requests."""
        with self._lock:
            return self._counts.get(replica_id, NOTHING)

    def take_changed(self) -> set[str]:
        """The replicas whose counts changed since the last call. For one reader."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def sent(
        self, request: RouteRequest, replica_id: str, now: float, cached_tokens: int = 0, drawn_percent: int = 0
    ) -> bool:
        """A decision fell; so much of the prompt is expected in the cache there. `drawn_percent`: how surely other
        routers decide likewise. A request sent again (retry, continued
        stream) moves: it is open at one replica only. False: it has ended meanwhile, and nothing was opened."""
        with self._lock:
            self._forget_ended(now)
            if request.request_id in self._ended:
                return False
            self._remove(request.request_id)
            self._over.pop(request.request_id, None)
            output_tokens = request.expected_output_tokens(self._expected_output_tokens)
            num_prompt = request.num_prompt_tokens
            to_compute = max(1, num_prompt - cached_tokens)
            entry = _Entry(request, replica_id, request.n, num_prompt, output_tokens, to_compute, drawn_percent, now)
            self._entries[request.request_id] = entry
            self._count(entry, 1, 1)
            return True

    def replica_of(self, request_id: str) -> str | None:
        """Where the request was sent, taken there or not; None before the decision and after the end."""
        with self._lock:
            entry = self._entries.get(request_id)
            return None if entry is None else entry.replica_id

    def last_replica_of(self, request_id: str) -> str | None:
        """As `replica_of`, but also when the call is over and nothing was heard of it: where it went, until the end."""
        with self._lock:
            entry = self._entries.get(request_id)
            return self._over.get(request_id) if entry is None else entry.replica_id

    def routed(self, request: RouteRequest, replica_id: str) -> bool:
        """The request went to `replica_id`, which need not be the replica ranked first. False: it is open no more, or
        this try of it isn't."""
        with self._lock:
            entry = self._entries.get(request.request_id)
            if entry is None or entry.request is not request:
                return False
            if entry.replica_id != replica_id:
                self._move(request.request_id, entry, replica_id)
            return True

    def accepted(self, request_id: str, replica_id: str, report: LoadReport | None, now: float) -> None:
        """The first message of its stream came, with `report` on it: reports made from now on include the request.

        Later messages may be told too: they say that the request is alive.
        """
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                self._over.pop(request_id, None)
                return
            if entry.replica_id != replica_id:
                self._move(request_id, entry, replica_id)
            entry.heard_at_s = now
            if entry.accepted_at is not None:
                return
            newest = self._newest.get(replica_id)
            entry.accepted_at_s = now
            entry.accepted_at = (report.epoch, report.number) if report is not None else newest or ("", -1)
            if newest is not None and _made_after(newest, entry.accepted_at):
                self._settle(request_id, entry)
            else:
                self._accepted.setdefault(replica_id, set()).add(request_id)

    def started(self, request_id: str) -> None:
        """Its first token came: nothing of its prompt is left to compute. Calling it again does nothing."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None and entry.prefill_tokens:
                self._count(entry, -1, -1 if entry.pending else 0)
                entry.prefill_tokens = 0
                self._count(entry, 1, 1 if entry.pending else 0)

    def reported(self, report: LoadReport, now: float | None = None) -> None:
        """A report came that is newer than all before it from that replica (`ReplicaViews` tells)."""
        with self._lock:
            newest = (report.epoch, report.number)
            self._newest[report.replica_id] = newest
            for request_id in list(self._accepted.get(report.replica_id, ())):
                entry = self._entries[request_id]
                if entry.accepted_at is not None and _made_after(newest, entry.accepted_at):
                    self._settle(request_id, entry)
                    if now is not None:
                        self.report_lag_s += LAG_WEIGHT * (now - entry.accepted_at_s - self.report_lag_s)

    def ended(self, request_id: str, now: float) -> None:
        """The caller is done with the request, however it ended. Calling it again does nothing."""
        with self._lock:
            self._forget_ended(now)
            self._ended[request_id] = now
            self._remove(request_id)
            self._over.pop(request_id, None)

    def released(self, request: RouteRequest) -> None:
        """The call of this try is over; the caller may still send the request again, or have done so."""
        request_id = request.request_id
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None or entry.request is not request:
                return
            self._remove(request_id)
            if entry.accepted_at is None:
                self._over[request_id] = entry.replica_id
                if len(self._over) > MAX_OVER:
                    self._over.popitem(last=False)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its requests with it."""
        with self._lock:
            for request_id in [r for r, entry in self._entries.items() if entry.replica_id == replica_id]:
                self._remove(request_id)
            self._newest.pop(replica_id, None)

    def expire(self, now: float) -> int:
        """Drop what was silent for too long; returns how many requests that were."""
        with self._lock:
            self._forget_ended(now)
            deadline = now - self._expire_after_s
            silent = [r for r, entry in self._entries.items() if entry.heard_at_s < deadline]
            for request_id in silent:
                self._remove(request_id)
            return len(silent)

    # Every change of `_entries` and `_counts` is below; the callers hold the lock.

    def _remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._count(entry, -1, -1 if entry.pending else 0)
            self._stop_awaiting(request_id, entry)

    def _move(self, request_id: str, entry: _Entry, replica_id: str) -> None:
        """To another replica, where it begins as sent, not accepted."""
        self._count(entry, -1, -1 if entry.pending else 0)
        self._stop_awaiting(request_id, entry)
        entry.replica_id, entry.accepted_at, entry.pending = replica_id, None, True
        entry.prefill_tokens, entry.drawn_percent = entry.prompt_tokens, 0
        self._count(entry, 1, 1)

    def _settle(self, request_id: str, entry: _Entry) -> None:
        """Reports include it from here on."""
        self._count(entry, 0, -1)
        entry.pending = False
        self._stop_awaiting(request_id, entry)

    def _stop_awaiting(self, request_id: str, entry: _Entry) -> None:
        waiting = self._accepted.get(entry.replica_id)
        if waiting is not None:
            waiting.discard(request_id)
            if not waiting:
                del self._accepted[entry.replica_id]

    def _count(self, entry: _Entry, in_flight: int, pending: int) -> None:
        self._changed.add(entry.replica_id)
        old = self._counts.get(entry.replica_id, NOTHING)
        new = LedgerCounts(
            old.num_in_flight + in_flight * entry.num_sequences,
            old.num_pending + pending * entry.num_sequences,
            old.pending_tokens + pending * entry.prompt_tokens,
            old.pending_output_tokens + pending * entry.output_tokens,
            old.prefill_tokens + in_flight * entry.prefill_tokens,
            old.pending_prefill_tokens + pending * entry.prefill_tokens,
            old.drawn_percent + pending * entry.num_sequences * entry.drawn_percent,
            old.drawn_token_percent + pending * entry.prefill_tokens * entry.drawn_percent,
        )
        if new.num_in_flight:
            self._counts[entry.replica_id] = new
        else:
            self._counts.pop(entry.replica_id, None)

    def _forget_ended(self, now: float) -> None:
        deadline = now - self._remember_ended_s
        while self._ended and next(iter(self._ended.values())) < deadline:
            self._ended.popitem(last=False)


def _made_after(newest: tuple[str, int], accepted_at: tuple[str, int]) -> bool:
    return newest[0] != accepted_at[0] or newest[1] > accepted_at[1]
