"""A plan's columns as tensors: positions, slots, fresh blocks, logits rows, pending tokens."""

from __future__ import annotations

import pytest
import torch

from replica.model.inputs import StepInputs, build_inputs
from replica.scheduler.plan import PENDING_TOKEN
from tests.model.plans import Row, make_plan

_CPU = torch.device("cpu")


def _inputs(*rows: Row, block_size: int = 4) -> StepInputs:
    return build_inputs(make_plan(1, rows), block_size, _CPU)


def test_the_example_of_the_docstring() -> None:
    inputs = _inputs(Row(0, 41, [5], [0] * 10 + [18]), Row(1, 6, [1, 2, 3, 4], [9, 3, 10]))
    assert inputs.token_ids.tolist() == [5, 1, 2, 3, 4]
    assert inputs.positions.tolist() == [41, 6, 7, 8, 9]
    slots = inputs.layout.slot_blocks * 4 + inputs.layout.slot_places
    assert slots.tolist() == [73, 14, 15, 40, 41]
    assert inputs.logits_rows.tolist() == [0, 4]
    assert inputs.layout.offsets.tolist() == [0, 1]
    assert inputs.layout.context_lens.tolist() == [42, 10]


def test_a_block_is_fresh_when_the_chunk_enters_it_without_filling_it() -> None:
    cases = [
        (Row(0, 0, [1], [7]), [7]),
        (Row(0, 1, [1], [7]), []),
        (Row(0, 0, [1] * 4, [7]), []),
        (Row(0, 2, [1] * 3, [7, 8]), [8]),
        (Row(0, 2, [1] * 2, [7, 8]), []),
        (Row(0, 2, [1] * 10, [7, 8, 9]), []),
        (Row(0, 2, [1] * 9, [7, 8, 9]), [9]),
        (Row(0, 8, [1], [7, 8, 9]), [9]),
    ]
    for row, fresh in cases:
        assert _inputs(row).layout.fresh_blocks.tolist() == fresh, row


def test_a_live_table_that_grew_ahead_is_cut_to_the_context() -> None:
    assert _inputs(Row(0, 3, [1], [4, 5, 6])).layout.block_tables == [[4]]


def test_a_table_too_short_for_its_context_is_an_error_that_names_the_row() -> None:
    with pytest.raises(IndexError, match="row 1 has 1 blocks for a context of 5 tokens"):
        _inputs(Row(0, 0, [1], [2]), Row(1, 4, [1], [3]))


def test_pending_tokens_are_found_with_their_lanes() -> None:
    inputs = _inputs(Row(5, 0, [1, 2], [0]), Row(2, 1, [PENDING_TOKEN], [1]), Row(7, 3, [PENDING_TOKEN], [2]))
    assert inputs.pending.tolist() == [2, 3]
    assert inputs.pending_lanes == [2, 7]
    assert inputs.pending_draws == [0, 0]
    assert inputs.token_ids.tolist() == [1, 2, 0, 0]


def test_logits_rows_follow_the_plans_counts() -> None:
    rows = Row(0, 0, [1, 2, 3], [0], num_logits=0), Row(1, 0, [1, 2, 3], [1], num_logits=3), Row(2, 5, [1], [2, 3])
    assert _inputs(*rows).logits_rows.tolist() == [3, 4, 5, 6]
    assert _inputs(rows[0]).logits_rows.tolist() == []
