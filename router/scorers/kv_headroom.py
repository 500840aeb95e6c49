"""Scorer `kv_headroom`: does the whole request fit into the replica's free KV blocks?

The whole request is prompt plus expected output, less the leading blocks that lie in the cache there. Free to take
are free and cached blocks, less what waiting, mid-prefill and just-sent requests are about to take.

    fits        0.5 + 0.5 * blocks left over / all blocks      -> [0.5, 1]
    doesn't     0.5 * free to take / blocks needed             -> [0, 0.5)

A replica in which it fits always beats one in which it doesn't: there it would wait, or preempt others.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.load import stale_as_loaded
from router.types import ReplicaView, RouteRequest

UNKNOWN = 0.5
"""The score without any report."""


@dataclass(frozen=True, slots=True)
class KvHeadroom:
    """`expected_output_tokens`: what a sequence is expected to make when its `max_tokens` is larger."""

    expected_output_tokens: int
    name: str = "kv_headroom"

    def __call__(self, request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        num_tokens = request.num_prompt_tokens + request.expected_output_tokens(self.expected_output_tokens)
        scores = []
        for load, matched_blocks, *_ in views:
            if load.report is None:
                scores.append(UNKNOWN)
                continue
            available = load.num_blocks_available
            needed = -(-num_tokens // load.block_size) - matched_blocks
            if needed < 1:
                needed = 1
            if available >= needed:
                scores.append(0.5 + 0.5 * (available - needed) / load.num_blocks_total)
            else:
                scores.append(max(0.0, 0.5 * available / needed))
        return stale_as_loaded(views, scores)
