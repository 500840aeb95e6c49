"""What a routing decision is made of: plain data shared by filters, scorers and the picker. Pure: no Ray here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from replica.request import LoadReport


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router knows of a request. `block_hashes` is the chain of its full prompt blocks, first block first."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    n: int = 1
    block_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One candidate as this router sees it: the last report and what this router sent since.

    `report` is None until the replica has spoken; `report_age_s` is how long ago it arrived here. `pending_*` is this
    router's ledger: requests sent that no report includes yet. `num_in_flight` counts all of this router's open
    requests there. `matched_blocks` is how many of the request's leading blocks are believed to lie in the replica's
    prefix cache.
    """

    replica_id: str
    report: LoadReport | None
    report_age_s: float
    pending_requests: int
    pending_tokens: int
    num_in_flight: int
    matched_blocks: int = 0


class Filter(Protocol):
    """Keeps the candidates that may serve the request. Never returns none of them when there were some (see policy)."""

    def __call__(self, request: RouteRequest, views: list[ReplicaView]) -> list[ReplicaView]: ...


class Scorer(Protocol):
    """Scores every candidate in [0, 1], 1 is best, in the order given. Pure: the same input gives the same scores."""

    name: str

    def __call__(self, request: RouteRequest, views: list[ReplicaView]) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """Which replica, and why: the ranking best first with total scores, and each scorer's part for the winner."""

    policy: str
    ranking: tuple[tuple[str, float], ...]
    parts: dict[str, float]
    report_age_s: float
