"""Step plans by hand, for tests of the runner without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from replica.request import SamplingParams
from replica.scheduler.plan import JoinedSequence, StepPlan


class Row(NamedTuple):
    """One row of a step; `num_logits` 0 means that it doesn't sample."""

    lane: int
    start: int
    token_ids: Sequence[int]
    table: list[int]
    num_logits: int = 1


def make_plan(step: int, rows: Sequence[Row], *, joined: Sequence[int] = (), temperature: float = 0.0) -> StepPlan:
    """Step i makes draw number i. `joined`: lanes that are taken in this step, with greedy sampling unless a
    temperature is given."""
    sampling = SamplingParams(max_tokens=99, temperature=temperature)
    return StepPlan(
        step=step,
        seq_ids=[row.lane for row in rows],
        lanes=[row.lane for row in rows],
        starts=[row.start for row in rows],
        num_tokens=[len(row.token_ids) for row in rows],
        block_tables=[row.table for row in rows],
        samples=[row.num_logits > 0 for row in rows],
        num_logits=[row.num_logits for row in rows],
        output_index=[step for _ in rows],
        token_ids=[token for row in rows for token in row.token_ids],
        joined=[JoinedSequence(lane, lane, sampling, lane, 0) for lane in joined],
    )
