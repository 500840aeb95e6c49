"""What a routing decision is made of: plain data shared by filters, scorers and the picker. Pure: no Ray here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from replica.request import LoadReport


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router knows of a request. `block_hashes` is the chain of its full prompt blocks, first block first.
    `session`: what belongs together, where somebody says so ("" otherwise)."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    n: int = 1
    block_hashes: tuple[bytes, ...] = ()
    session: str = ""

    def expected_output_tokens(self, limit: int) -> int:
        """Tokens that all n sequences are expected to make: `max_tokens` each, but no more than `limit` each."""
        return self.n * min(self.max_tokens, limit)


@dataclass(slots=True)
class ReplicaLoad:
    """How loaded one replica is: its last report and what this router sent since. Built by `router/load.py`, and never
    changed. (Not frozen: that would take half of the time that making one takes, and decisions make several.)

    `report` is None until the replica has spoken; `arrived_at_s` is when it came, by this router's clock.
    `num_pending` is this router's ledger: sequences sent that no report includes yet. `num_in_flight` counts all that
    this router has open there. What follows is both together: `num_waiting`; `num_outstanding` (waiting and
    running, never less than our own); `cost` (the same, waiting ones weighted by KV pressure); `would_wait` (one more
    finds no free place in the running batch); `kv_usage_ratio` (prompts just sent count as held);
    `num_blocks_available` (free and cached blocks less what waiting, mid-prefill and just-sent requests are about to
    take; may be negative); `block_size` and `num_blocks_total` are the report's, but at
    least 1. What `cost_s` looks at, reports and our pending requests apart: `company` (requests there, weighted as in
    `cost`) with the `backlog_tokens` that they have to prefill; `own_company` (our pending ones and those of other
    routers that the same prefixes drew there, once more for those without a place, and something for all that are ours)
    with `pending_prefill_tokens`.
    """

    replica_id: str
    report: LoadReport | None
    arrived_at_s: float
    num_pending: int
    num_in_flight: int
    num_waiting: int
    num_outstanding: int
    cost: float
    would_wait: bool
    kv_usage_ratio: float
    num_blocks_available: float
    block_size: int
    num_blocks_total: int
    company: float
    backlog_tokens: float
    own_company: float
    pending_prefill_tokens: float


class ReplicaView(NamedTuple):
    """One candidate of one decision. A tuple, because a decision may make one for every replica.

    `matched_blocks` is how many of the request's leading blocks are believed to lie in the replica's prefix cache.
    `is_stale`: no report, or one too old to be believed. `ramp`: its place on the way from cold (0: just heard of) to
    warm (1). `is_home`: nobody is known to hold the prompt's beginning, and all routers would look for it here.
    """

    load: ReplicaLoad
    matched_blocks: int = 0
    is_stale: bool = False
    ramp: float = 1.0
    is_home: bool = False


class Filter(Protocol):
    """Keeps the candidates that may serve the request. One that keeps nobody is passed over (see `Policy`)."""

    @property
    def name(self) -> str: ...

    def __call__(self, request: RouteRequest, views: list[ReplicaView], /) -> list[ReplicaView]: ...


class Scorer(Protocol):
    """Scores every candidate in [0, 1], 1 is best, in the order given. Pure: the same input gives the same scores."""

    @property
    def name(self) -> str: ...

    def __call__(self, request: RouteRequest, views: list[ReplicaView], /) -> list[float]: ...


class Picker(Protocol):
    """Orders candidates by their total scores: indices, best first. `chose` tells it where the request went."""

    def __call__(self, totals: list[float], replica_ids: Sequence[str], /) -> list[int]: ...

    def chose(self, replica_id: str, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """Which replica, and why: the best ones in order with total scores, and each scorer's part for the winner.

    `reason` is the one word for it that metrics count: see `Policy`. `report_age_s` is the age of the winner's report,
    infinite when it has none. `cost_s`: seconds that the winner was expected to cost; None when nobody asked, and when
    it is stale and others aren't: then it isn't known.
    """

    policy: str
    ranking: tuple[tuple[str, float], ...]
    parts: dict[str, float]
    report_age_s: float
    reason: str = ""
    cost_s: float | None = None

    @property
    def replica_id(self) -> str:
        """The winner."""
        return self.ranking[0][0]
