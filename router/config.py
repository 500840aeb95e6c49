"""Every setting of one router: one frozen tree, checked when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from replica.errors import SettingError

DEFAULT_WEIGHTS = {"cost_s": 1.0, "kv_headroom": 0.0, "queue_depth": 0.0, "prefix_affinity": 0.0}
POLICIES = ("scores", "round_robin", "power_of_two", "least_in_flight", "session_affinity")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How replicas are chosen.

    `policy`: one of `POLICIES`; `scores` adds up the scorers, the others are simple ones that need no weights
    (`router/policy.py`).
    `weights`: scorer name -> weight from 0 (off) to 100; a scorer that isn't named keeps its default.
    `tau_s`: seconds of cost that halve the score of `cost_s`. `ramp_s`: a replica that was first heard of less than
    this ago gets its share step by step. `prefix_caching`: the replicas keep prompts' prefixes.
    `stale_after_s`: a report older than this is treated as loaded. `expected_output_tokens`: what a sequence is
    expected to make when its `max_tokens` is larger. `imbalance_cap`: a favourite for its cached prefix is let go when
    it has this many requests more than the least loaded candidate. `max_num_queued_seqs`: the replicas' own bound of
    their waiting queues. `max_prefix_blocks`: size of the prefix index. `expire_after_s`: a request of which nothing
    was heard for so long leaves the ledger. `num_routers`: processes that route to the same replicas; it is measured,
    too, but not before reports come.
    """

    weights: dict[str, float] = field(default_factory=dict)
    policy: str = "scores"
    tau_s: float = 1.0
    ramp_s: float = 10.0
    prefix_caching: bool = True
    stale_after_s: float = 5.0
    expected_output_tokens: int = 256
    imbalance_cap: int = 4
    max_num_queued_seqs: int = 1024
    max_prefix_blocks: int = 100_000
    expire_after_s: float = 300.0
    num_routers: int = 1

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if name not in DEFAULT_WEIGHTS:
                raise SettingError("weights", name, f"one of {', '.join(DEFAULT_WEIGHTS)}")
            if not (math.isfinite(weight) and 0.0 <= weight <= 100.0):
                raise SettingError(f"weights.{name}", weight, "from 0 to 100")
        if self.policy not in POLICIES:
            raise SettingError("router_policy", self.policy, f"one of {', '.join(POLICIES)}")
        if not any(self.all_weights.values()):
            raise SettingError("weights", self.weights, "at least one weight above 0")
        for name in ("stale_after_s", "expire_after_s", "tau_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingError(name, value, "more than 0 seconds")
        if not (math.isfinite(self.ramp_s) and self.ramp_s >= 0):
            raise SettingError("ramp_s", self.ramp_s, "0 seconds (no ramp) or more")
        counts = ("expected_output_tokens", "imbalance_cap", "max_num_queued_seqs", "max_prefix_blocks", "num_routers")
        for name in counts:
            value = getattr(self, name)
            if value < 1:
                raise SettingError(name, value, "at least 1")

    @property
    def all_weights(self) -> dict[str, float]:
        """Every scorer's weight, defaults filled in."""
        return {**DEFAULT_WEIGHTS, **self.weights}

    @property
    def uses_prefixes(self) -> bool:
        """Whether prompts' block hashes decide anything."""
        weights = self.all_weights
        knows = self.policy == "scores" and (weights["cost_s"] > 0 or weights["prefix_affinity"] > 0)
        return self.prefix_caching and (knows or self.policy == "session_affinity")
