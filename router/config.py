"""Every setting of one router: one frozen tree, checked when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from replica.errors import SettingError

DEFAULT_WEIGHTS = {"kv_headroom": 1.0, "queue_depth": 1.0, "prefix_affinity": 1.0}


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How replicas are chosen.

    `weights`: scorer name -> weight from 0 (off) to 100; a scorer that isn't named keeps its default.
    `stale_after_s`: a report older than this is treated as loaded. `expected_output_tokens`: what a sequence is
    expected to make when its `max_tokens` is larger. `imbalance_cap`: a favourite for its cached prefix is let go when
    it has this many requests more than the least loaded candidate. `max_num_queued_seqs`: the replicas' own bound of
    their waiting queues. `max_prefix_blocks`: size of the prefix index. `expire_after_s`: a request of which nothing
    was heard for so long leaves the ledger.
    """

    weights: dict[str, float] = field(default_factory=dict)
    stale_after_s: float = 5.0
    expected_output_tokens: int = 256
    imbalance_cap: int = 4
    max_num_queued_seqs: int = 1024
    max_prefix_blocks: int = 100_000
    expire_after_s: float = 300.0

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if name not in DEFAULT_WEIGHTS:
                raise SettingError("weights", name, f"one of {', '.join(DEFAULT_WEIGHTS)}")
            if not (math.isfinite(weight) and 0.0 <= weight <= 100.0):
                raise SettingError(f"weights.{name}", weight, "from 0 to 100")
        if not any(self.all_weights.values()):
            raise SettingError("weights", self.weights, "at least one weight above 0")
        for name in ("stale_after_s", "expire_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingError(name, value, "more than 0 seconds")
        for name in ("expected_output_tokens", "imbalance_cap", "max_num_queued_seqs", "max_prefix_blocks"):
            value = getattr(self, name)
            if value < 1:
                raise SettingError(name, value, "at least 1")

    @property
    def all_weights(self) -> dict[str, float]:
        """Every scorer's weight, defaults filled in."""
        return {**DEFAULT_WEIGHTS, **self.weights}
