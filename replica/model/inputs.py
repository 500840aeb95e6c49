"""A step plan's columns as tensors: what the forward, the KV cache and the sampler index with.

row          0 (decode)   1 (chunk of 4)       block size 4
positions    [ 41 |        6  7  8  9 ]        = starts + 0, 1, ...
slots        [ 73 |       14 15 40 41 ]        = block_table[position // 4] * 4 + position % 4
logits_rows  [ 0, 4 ]                          flat places of the last `num_logits` tokens of each row
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replica.model.transfers import to_device
from replica.scheduler.plan import PENDING_TOKEN, StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where every row's tokens, context and blocks are; what an attention backend prepares a step from.

    Per row: `starts` (first position of the chunk), `num_tokens`, `offsets` (its first token in the flat step),
    `context_lens` (starts + num_tokens), `block_tables` (only the blocks of that context). Per flat token [T]: its slot
    as `slot_blocks` and `slot_places` (place within the block). `fresh_blocks`: blocks that this step enters first and
    doesn't fill.
    """

    block_size: int
    starts: IntArray
    num_tokens: IntArray
    offsets: IntArray
    context_lens: IntArray
    block_tables: list[list[int]]
    slot_blocks: Tensor
    slot_places: Tensor
    fresh_blocks: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`token_ids`, `positions` [T]; `logits_rows` [L] as above. `pending` [P]: flat places whose token is draw
    number `pending_draws` [P] of lane `pending_lanes` [P]: the one before the draw that the row is about to make."""

    token_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    pending: Tensor
    pending_lanes: list[int]
    pending_draws: list[int]
    layout: StepLayout


def build_inputs(plan: StepPlan, block_size: int, device: torch.device, num_blocks: int | None = None) -> StepInputs:
    """Raises IndexError when a block table is shorter than its row's context, or names a block that a pool of
    `num_blocks` hasn't (errors of the plan: compiled kernels would read and write elsewhere)."""
    starts = np.array(plan.starts, dtype=np.int64)
    num_tokens = np.array(plan.num_tokens, dtype=np.int64)
    context_lens = starts + num_tokens
    ends = np.cumsum(num_tokens)
    offsets = ends - num_tokens
    tables = _used_tables(plan.block_tables, context_lens, block_size)
    blocks = np.array([block for table in tables for block in table], dtype=np.int64)
    if num_blocks is not None and len(blocks) and blocks.max() >= num_blocks:
        raise IndexError(f"the plan names block {blocks.max()} of a pool of {num_blocks}")
    token_ids = np.array(plan.token_ids, dtype=np.int64)
    rows = np.repeat(np.arange(len(plan)), num_tokens)
    positions = np.arange(len(token_ids)) - offsets[rows] + starts[rows]
    pending = np.flatnonzero(token_ids == PENDING_TOKEN)
    token_ids[pending] = 0
    pending_rows = rows[pending].tolist()
    layout = StepLayout(
        block_size=block_size,
        starts=starts,
        num_tokens=num_tokens,
        offsets=offsets,
        context_lens=context_lens,
        block_tables=tables,
        slot_blocks=to_device(_slot_blocks(positions, rows, tables, blocks, block_size), device),
        slot_places=to_device(positions % block_size, device),
        fresh_blocks=to_device(_fresh_blocks(starts, context_lens, tables, block_size), device),
    )
    return StepInputs(
        token_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        logits_rows=to_device(_last_places(ends, np.array(plan.num_logits, dtype=np.int64)), device),
        pending=to_device(pending, device),
        pending_lanes=[plan.lanes[row] for row in pending_rows],
        pending_draws=[plan.output_index[row] - 1 for row in pending_rows],
        layout=layout,
    )


def _used_tables(block_tables: list[list[int]], context_lens: IntArray, block_size: int) -> list[list[int]]:
    """The plan's tables are live lists that grow ahead of the step: keep what this step's contexts need."""
    num_blocks = -(-context_lens // block_size)
    tables = [table[:count] for table, count in zip(block_tables, num_blocks.tolist(), strict=True)]
    for row, (table, count) in enumerate(zip(tables, num_blocks.tolist(), strict=True)):
        if len(table) < count:
            raise IndexError(f"row {row} has {len(table)} blocks for a context of {context_lens[row]} tokens")
    return tables


def _slot_blocks(
    positions: IntArray, rows: IntArray, tables: list[list[int]], blocks: IntArray, block_size: int
) -> IntArray:
    """`blocks`: the tables one after the other."""
    widths = np.array([len(table) for table in tables], dtype=np.int64)
    first = np.cumsum(widths) - widths
    found: IntArray = blocks[first[rows] + positions // block_size]
    return found


def _fresh_blocks(starts: IntArray, context_lens: IntArray, tables: list[list[int]], block_size: int) -> IntArray:
    """Each row's last block, when the chunk holds its first slot but not its last."""
    first = context_lens // block_size * block_size
    fresh = (first >= starts) & (first < context_lens)
    return np.array([tables[row][-1] for row in np.flatnonzero(fresh)], dtype=np.int64)


def _last_places(ends: IntArray, num_logits: IntArray) -> IntArray:
    total = int(num_logits.sum())
    within = np.arange(total) - np.repeat(np.cumsum(num_logits) - num_logits, num_logits)
    places: IntArray = np.repeat(ends - num_logits, num_logits) + within
    return places
