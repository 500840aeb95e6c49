"""One case of the comparison: so many running decodes, so many waiting. Both sides build the same requests from it.

Standard library only: the peer's interpreter, which has nothing of ours, imports this file too.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from typing import Literal, Protocol

BLOCK_SIZE = 16
VOCAB_SIZE = 49_152
MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 8192
PROMPT_TOKENS = 256
"""The shortest prompt. Lengths are spread over one block, so that in every step the same share of the running sequences
fills a block: what a long-running replica sees."""

_STRIDE = 7919


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_running` sequences decode, `num_waiting` wait; nobody ends. `blocked_by`: they wait because every place is
    taken (`seqs`: whoever plans needs to look no further), or because the first finds too few free KV blocks
    (`blocks`: in every step it is looked up in the prefix cache and measured against the pool, and so is the next that
    is small enough to pass it)."""

    num_running: int
    num_waiting: int
    blocked_by: Literal["seqs", "blocks"] = "seqs"

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def num_blocks(self) -> int:
        """Enough for every running sequence at its longest, so that nothing is preempted."""
        return self.num_running * (MAX_MODEL_LEN // BLOCK_SIZE + 1)

    def prompt_ids(self, number: int) -> list[int]:
        """The prompt of request `number`. No two share a block: who asks the prefix cache finds nothing."""
        length = PROMPT_TOKENS + number % BLOCK_SIZE
        return [(number * _STRIDE + place * place) % VOCAB_SIZE for place in range(length)]

    def max_tokens(self, number: int) -> int:
        """As many output tokens as the model's limit allows: nobody ends while times are taken. Of those who wait for
        blocks all but the first want one token, which makes them small."""
        if self.blocked_by == "blocks" and number > self.num_running:
            return 1
        return MAX_MODEL_LEN - PROMPT_TOKENS - number % BLOCK_SIZE

    def sampled_ids(self, step: int) -> list[int]:
        """What the model that isn't there samples in a step of `num_running` rows."""
        return [(step * _STRIDE + row) % VOCAB_SIZE for row in range(self.num_running)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Mean microseconds of this thread's CPU time a step over one round: what other processes take meanwhile isn't
    counted. `report_us`: stats and load report, for the side that makes them."""

    plan_us: float
    commit_us: float
    report_us: float = 0.0

    @property
    def step_us(self) -> float:
        return self.plan_us + self.commit_us


class Side(Protocol):
    """One scheduler under measurement."""

    def start(self, workload: Workload) -> None:
        """Build a scheduler, prefill all who run, then queue all who wait."""

    def run_round(self, num_steps: int) -> StepTimes:
        """Time that many steps of decoding."""


def settle_memory() -> None:
    """What was built so far is never looked at again by the garbage collector: what both engines do before they serve,
    so that a collection in the middle of a step doesn't walk through every waiting request."""
    gc.collect()
    gc.freeze()


def unsettle_memory() -> None:
    """Undo `settle_memory`, so that what a new case replaces can be freed."""
    gc.unfreeze()
    gc.collect()


def mean_us(seconds: list[float]) -> float:
    return statistics.fmean(seconds) * 1e6
