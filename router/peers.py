"""How far this router's knowledge reaches: how many routers send to the same replicas, and how old reports are.

Both are measured; how many routers there are is told at first, because reports may be late. What reports count, over
all replicas, is what all routers sent: over our own it is their number. (Reports are older than our own count; where
traffic is steady that is the same.) How long it takes until a report includes a request of ours is how late they are.

    routers     = requests reported / our own in flight, smoothed
    unseen      = (routers - 1) * our own that no report includes yet, smoothed: what others sent and no report tells of
    trust       = exp(-lag / `MEMORY_S`): how much of a report still holds where it differs from what follows
    drawn       = our own that no report includes yet where a prefix drew them; of what is more than usual, each other
                  router is taken to have sent as much
    others      = what reports include and isn't ours, mean of the replicas: what an old report is likely to have become
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from router.inflight import LedgerCounts
from router.types import RouteRequest
from router.views import SeenReport

MEMORY_S = 1.0
MAX_ROUTERS = 256.0
_WEIGHT = 0.02
"""Of one decision in what is smoothed; at the start more, so that all decisions weigh alike, but in the number of
routers, of which something is known."""


class Others(NamedTuple):
    """What an old report is likely to have become: `trust` of it, and for the rest what is ours there plus what others
    have at a replica in the mean, `requests` with `tokens` to prefill. `routers`: all, we too. `drawn`: our own
    pending requests that a prefix drew to a replica, mean of the replicas."""

    trust: float = 1.0
    requests: float = 0.0
    tokens: float = 0.0
    routers: float = 1.0
    drawn: float = 0.0


class PeerEstimate:
    """Not thread-safe. `look` at every replica that changed; `decided` at every decision. `num_routers`: how many there
    are to be, as far as somebody knows."""

    def __init__(self, num_routers: int = 1) -> None:
        self._counted: dict[str, tuple[int, int, int, float, int]] = {}
        self._reported = self._own = self._pending = 0
        self._others_tokens = 0.0
        self._drawn_percent = 0
        self._mean_pending = 0.0
        self.lag_s = 0.0
        """From a request's acceptance to a report that includes it, smoothed. The ledger tells (`RouterState`)."""
        self._num_decisions = 0
        self.routers = float(num_routers)
        self.prompt_tokens = 0.0
        """Of a request, smoothed."""
        self._computed_tokens = 0.0

    @property
    def unseen(self) -> float:
        """Requests of other routers that no report includes yet, over all replicas that were looked at."""
        return (self.routers - 1.0) * self._mean_pending

    @property
    def computed_ratio(self) -> float:
        """Share of prompts that isn't cached where they are sent."""
        return self._computed_tokens / self.prompt_tokens if self.prompt_tokens else 1.0

    @property
    def num_replicas(self) -> int:
        return max(1, len(self._counted))

    @property
    def others(self) -> Others:
        num = self.num_replicas
        requests = (self._reported - self._own + self._pending) / num
        trust, tokens = exp(-self.lag_s / MEMORY_S), self._others_tokens / num
        return Others(trust, max(0.0, requests), max(0.0, tokens), self.routers, self._drawn_percent / (100 * num))

    def look(self, replica_id: str, seen: SeenReport | None, own: LedgerCounts) -> None:
        reported, in_flight, pending, tokens, drawn = self._counted.pop(replica_id, (0, 0, 0, 0.0, 0))
        self._reported -= reported
        self._own -= in_flight
        self._pending -= pending
        self._others_tokens -= tokens
        self._drawn_percent -= drawn
        if seen is None:
            return
        report = seen.report
        reported, in_flight, pending = report.num_running + report.num_waiting, own.num_in_flight, own.num_pending
        tokens = report.num_waiting_tokens * self.computed_ratio + report.num_prefill_tokens
        tokens -= own.prefill_tokens - own.pending_prefill_tokens
        self._counted[replica_id] = (reported, in_flight, pending, tokens, own.drawn_percent)
        self._drawn_percent += own.drawn_percent
        self._reported += reported
        self._own += in_flight
        self._pending += pending
        self._others_tokens += tokens

    def decided(self, request: RouteRequest, cached_tokens: int, report_lag_s: float) -> None:
        self.lag_s = report_lag_s
        self._num_decisions += 1
        weight = max(_WEIGHT, 1.0 / self._num_decisions)
        if self._own and self._reported:
            ratio = min(MAX_ROUTERS, max(1.0, self._reported / self._own))
            self.routers += _WEIGHT * (ratio - self.routers)
        self._mean_pending += weight * (self._pending - self._mean_pending)
        num_prompt = request.num_prompt_tokens
        self.prompt_tokens += weight * (num_prompt - self.prompt_tokens)
        self._computed_tokens += weight * (max(1, num_prompt - cached_tokens) - self._computed_tokens)
