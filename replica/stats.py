"""What every step reports, as plain data. Exporters live elsewhere (`replica/metrics.py`, `replica/service.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """Joint signals of one step, counted in the plan, where a chunk is a chunk.

    Tokens planned split into prefill, decode and recomputed (work that a preemption threw away); `token_budget` is the
    limit they were planned under (without a step: the one in force). Blocks: held + cached_free + free = total.
    `num_waiting_by_reason`: what stopped admission: one of `budget`, `seqs`, `blocks`, `long_prefill` for every waiting
    sequence. `prefix_*` are in tokens. Times in seconds; `step_s` is from the step's planning to its end, less what the
    step before it took of that time (two may overlap), so that all steps together last as long as the engine works.
    """

    step: int
    num_running: int
    num_waiting: int
    num_waiting_by_reason: dict[str, int]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_recomputed_tokens: int
    token_budget: int
    num_blocks_held: int
    num_blocks_cached: int
    num_blocks_total: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    oldest_waiting_s: float
    step_s: float
    idle_s: float

    @property
    def num_tokens(self) -> int:
        """All tokens planned in the step."""
        return self.num_prefill_tokens + self.num_decode_tokens + self.num_recomputed_tokens


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """The engine's clock readings of one sequence, seconds on its monotonic clock; None = didn't happen.

    `queued_at_s` when its request came to the replica, `scheduled_at_s` its first chunk, `first_token_at_s`,
    `finished_at_s`.
    `num_cached_tokens`: how much of its input came from the prefix cache when it was first scheduled.
    """

    queued_at_s: float
    scheduled_at_s: float | None
    first_token_at_s: float | None
    finished_at_s: float | None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
