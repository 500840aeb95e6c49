"""Builders of router inputs for tests: everything has a quiet default, a test names what it is about."""

from __future__ import annotations

from typing import Any

from replica.request import LoadReport
from router.inflight import LedgerCounts
from router.load import load_of
from router.types import ReplicaView, RouteRequest
from router.views import SeenReport

IDLE: dict[str, Any] = {
    "epoch": "life-1",
    "number": 1,
    "made_at_s": 0.0,
    "num_running": 0,
    "num_waiting": 0,
    "num_waiting_tokens": 0,
    "num_prefill_tokens": 0,
    "num_blocks_total": 100,
    "num_blocks_free": 100,
    "num_blocks_cached": 0,
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
}


def report(replica_id: str = "a", **changes: Any) -> LoadReport:
    """An idle replica of 100 free blocks of 16, but for `changes`."""
    return LoadReport(replica_id=replica_id, **{**IDLE, **changes})


def request(request_id: str = "r", **changes: Any) -> RouteRequest:
    """160 prompt tokens (10 blocks of 16) and 160 tokens of output, but for `changes`."""
    return RouteRequest(request_id=request_id, **{"num_prompt_tokens": 160, "max_tokens": 160, **changes})


def view(
    replica_id: str = "a",
    *,
    counts: tuple[int, int, int, int] = (0, 0, 0, 0),
    matched_blocks: int = 0,
    is_stale: bool = False,
    silent: bool = False,
    **changes: Any,
) -> ReplicaView:
    """A candidate: its report is idle but for `changes`; `silent` has none. `counts` as in `LedgerCounts`."""
    seen = None if silent else SeenReport(report(replica_id, **changes), 0.0)
    return ReplicaView(load_of(replica_id, seen, LedgerCounts(*counts)), matched_blocks, is_stale or silent)


CHAIN = tuple(bytes([i]) for i in range(4))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
