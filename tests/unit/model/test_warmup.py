"""The largest step that is run before the first request stays inside the pool and the budgets."""

from __future__ import annotations

import pytest

from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.model.warmup import peak_plan


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "max_model_len", "num_seqs", "budget", "rows", "tokens"),
    [
        (364, 128, 8192, 64, 512, 64, 512),
        (364, 128, 8192, 1, 512, 1, 512),
        (3, 16, 48, 8, 64, 3, 48),
        (1, 4, 4, 8, 64, 1, 4),
        (100, 16, 5, 2, 64, 2, 10),
        (9, 16, 144, 2, 1000, 2, 128),
    ],
)
def test_the_largest_step_fits(
    num_blocks: int, block_size: int, max_model_len: int, num_seqs: int, budget: int, rows: int, tokens: int
) -> None:
    shape = ModelShape(num_blocks, block_size, 100, max_model_len, ())
    plan = peak_plan(shape, SchedulerConfig(num_seqs, budget))
    assert (len(plan), len(plan.token_ids)) == (rows, tokens)
    used = [block for table in plan.block_tables for block in table]
    assert len(set(used)) == len(used) and max(used) < num_blocks
    for count, table in zip(plan.num_tokens, plan.block_tables, strict=True):
        assert 1 <= count <= min(max_model_len, len(table) * block_size)
