"""A step's layout as tensors on the device: what kernels over the pool read, and what a captured graph keeps.

row            0 (decode)   1 (chunk of 4)        block size 4
block_tables   [ 7 2 9 .. ] [ 4 11 3 0 .. ]       padded with block 0: never read
context_lens   [ 10 |         10 ]
query_starts   [ 0            1        5 ]        row r's tokens are the flat places [starts[r], starts[r + 1])
clears         [ F |          F F F T ]           the last token entered its block in this step and doesn't fill it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from replica.model.attention.interface import AttentionStep
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache
from replica.model.transfers import to_device

# Parts of one copy begin at multiples of 16 bytes: kernels are compiled anew for pointers of another alignment.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Per row `block_tables` int32 [R, W], `context_lens` int32 [R], `query_starts` int32 [R + 1]; per flat token
    `slot_blocks` and `slot_places` int64 [T], `clears` int32 [T], 0 or 1; `fresh_blocks` as in `StepLayout`, but
    repetitions are allowed.

    `max_queries` and `max_context` bound a row's tokens and context: no kernel needs to ask the device.
    """

    block_size: int
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor
    slot_blocks: Tensor
    slot_places: Tensor
    clears: Tensor
    fresh_blocks: Tensor
    max_queries: int
    max_context: int


@runtime_checkable
class PagedBackend(Protocol):
    """A backend whose decode steps a graph can hold."""

    def prepare_paged(self, layout: PagedLayout, cache: KVCache) -> AttentionStep:
        """What computes a step of one token a row. Nothing in it depends on a value of the layout's tensors, nothing
        is copied from the host and nothing waits for the device."""
        ...


def paged_layout(layout: StepLayout) -> PagedLayout:
    """One copy to the device, however many rows."""
    num_rows, num_tokens = len(layout.starts), len(layout.slot_blocks)
    width = max(len(table) for table in layout.block_tables)
    tables = np.zeros((num_rows, width), dtype=np.int32)
    for row, table in enumerate(layout.block_tables):
        tables[row, : len(table)] = table
    clears = np.zeros(num_tokens, dtype=np.int32)
    entered = layout.context_lens // layout.block_size * layout.block_size
    ends_within = (entered >= layout.starts) & (entered < layout.context_lens)
    clears[(layout.offsets + layout.num_tokens - 1)[ends_within]] = 1
    starts = np.append(layout.offsets, num_tokens)
    parts = _move([tables.ravel(), layout.context_lens, starts, clears], layout.slot_blocks.device)
    return PagedLayout(
        block_size=layout.block_size,
        block_tables=parts[0].view(num_rows, width),
        context_lens=parts[1],
        query_starts=parts[2],
        slot_blocks=layout.slot_blocks,
        slot_places=layout.slot_places,
        clears=parts[3],
        fresh_blocks=layout.fresh_blocks,
        max_queries=int(layout.num_tokens.max()),
        max_context=int(layout.context_lens.max()),
    )


def decode_layout(
    block_tables: Tensor, positions: Tensor, block_size: int, spare_block: int, max_context: int
) -> PagedLayout:
    """A step of one token a row, from tensors only: `block_tables` int32 [R, W], `positions` int64 [R].

    No shape depends on a value, so that a graph can hold it. Rows that enter no block clear the spare one instead.
    """
    num_rows = len(positions)
    slot_blocks = block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
    slot_places = positions % block_size
    # A block of one slot is filled by entering it.
    clears = slot_places == 0 if block_size > 1 else torch.zeros_like(slot_places, dtype=torch.bool)
    return PagedLayout(
        block_size=block_size,
        block_tables=block_tables,
        context_lens=(positions + 1).int(),
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=positions.device),
        slot_blocks=slot_blocks,
        slot_places=slot_places,
        clears=clears.int(),
        fresh_blocks=torch.where(clears, slot_blocks, spare_block),
        max_queries=1,
        max_context=max_context,
    )


def _move(parts: list[np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]], device: torch.device) -> list[Tensor]:
    """The parts as int32 on the device, by one copy."""
    starts = np.cumsum([0] + [-(-len(part) // _ALIGNMENT) * _ALIGNMENT for part in parts])
    packed = np.zeros(starts[-1], dtype=np.int32)
    for start, part in zip(starts, parts, strict=False):
        packed[start : start + len(part)] = part
    moved = to_device(packed, device)
    return [moved[start : start + len(part)] for start, part in zip(starts.tolist(), parts, strict=False)]
