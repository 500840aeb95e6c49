"""Times of single steps: the same step again and again, over a pool that holds real keys and values.

Before, the pool is filled once by prefills; whose context a block was doesn't matter for its speed. A step's rows have
blocks of their own, so that no cache serves two of them. Steps run as in the engine, two in flight: the next one is
submitted before the last one's tokens are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from replica.model.api import ModelRunner, ModelShape
from replica.request import SamplingParams
from replica.scheduler.plan import JoinedSequence, StepPlan

_SERIES = 3
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class StepKind:
    """`width` rows, each with `context` tokens before the `count` that it computes."""

    width: int
    context: int
    count: int

    @property
    def name(self) -> str:
        if self.count == 1:
            return f"{self.width} x decode, context {self.context}"
        after = f" after {self.context}" if self.context else ""
        return f"{self.width} x {self.count} tokens of prefill{after}"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median seconds of one of many steps in a row, and of one alone from submission to its tokens."""

    kind: StepKind
    plan: StepPlan
    step_s: float
    alone_s: float


def fits(kind: StepKind, shape: ModelShape, max_num_seqs: int, max_num_batched_tokens: int) -> bool:
    """Whether pool, context and budgets allow this step."""
    length = kind.context + kind.count
    return (
        kind.width <= max_num_seqs
        and kind.width * kind.count <= max_num_batched_tokens
        and length <= shape.max_model_len
        and kind.width * _num_blocks(length, shape) <= shape.num_blocks
    )


def plan_of(kind: StepKind, shape: ModelShape, step: int = 0) -> StepPlan:
    """Every row samples; its last token is greedy."""
    each = _num_blocks(kind.context + kind.count, shape)
    rows = list(range(kind.width))
    num_tokens = kind.width * kind.count
    return StepPlan(
        step=step,
        seq_ids=rows,
        lanes=rows,
        starts=[kind.context] * kind.width,
        num_tokens=[kind.count] * kind.width,
        block_tables=[list(range(row * each, (row + 1) * each)) for row in rows],
        samples=[True] * kind.width,
        num_logits=[1] * kind.width,
        output_index=[0] * kind.width,
        token_ids=[place * 7919 % shape.vocab_size for place in range(num_tokens)],
        joined=[JoinedSequence(row, row, SamplingParams(max_tokens=1, temperature=0.0), row, 0) for row in rows],
    )


def fill_pool(runner: ModelRunner, kinds: Sequence[StepKind], max_num_batched_tokens: int) -> int:
    """Write keys and values into all blocks that these steps read, one row a prefill; how many slots these have. (What
    a step can't fill of a block is zero.)"""
    shape = runner.shape
    num_blocks = max(kind.width * _num_blocks(kind.context + kind.count, shape) for kind in kinds)
    longest = min(max_num_batched_tokens, shape.max_model_len)
    each = max(longest // shape.block_size, 1)
    for first in range(0, num_blocks, each):
        count = min(each, num_blocks - first)
        plan = plan_of(StepKind(1, 0, min(count * shape.block_size, longest)), shape)
        plan.block_tables[0] = list(range(first, first + count))
        runner.submit(plan).result()
    return num_blocks * shape.block_size


def time_step(runner: ModelRunner, kind: StepKind, clock: Callable[[], float], repeats: int) -> StepTime:
    """`clock` counts seconds."""
    plan = plan_of(kind, runner.shape)
    for _ in range(_WARM_UP):
        runner.submit(plan).result()
    in_a_row, alone = [], []
    for _ in range(_SERIES):
        began_s = clock()
        before = runner.submit(plan)
        for _ in range(repeats - 1):
            ahead = runner.submit(plan)
            before.result()
            before = ahead
        before.result()
        in_a_row.append((clock() - began_s) / repeats)
        began_s = clock()
        runner.submit(plan).result()
        alone.append(clock() - began_s)
    return StepTime(kind, plan, median(in_a_row), median(alone))


def _num_blocks(num_tokens: int, shape: ModelShape) -> int:
    return -(-num_tokens // shape.block_size)
