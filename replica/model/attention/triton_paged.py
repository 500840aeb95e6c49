"""Attention over the pool by Triton kernels of ours: CUDA's complete backend, and the one that needs nothing else.

A step's rows are cut into tiles once: rows of one token (decodes) and rows of several (chunks) make one launch each,
with tiles and shares of the context of their own. Which launches there are depends on the step, what is compiled
doesn't: one kernel for decodes and one for chunks a kind of layer, so that no request waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.attention.paged import PagedLayout, paged_layout
from replica.model.attention.triton_kernels import attend_tiles, merge_shares, write_slots
from replica.model.inputs import IntArray, StepLayout
from replica.model.kv_cache import KVCache
from replica.model.transfers import to_device

_DECODE_LINES = 16
_MAX_SPLITS = 32


class TritonBackend:
    """Any block size, head sizes, windows, soft caps and sinks. `num_processors`: of the device; more of them split
    long contexts further, down to `min_share` positions."""

    block_size = 64

    def __init__(self, num_processors: int, min_share: int = 256) -> None:
        self._splitting = _Splitting(num_processors, min_share)

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        device = layout.slot_blocks.device
        return _TritonStep(
            paged_layout(layout),
            cache,
            self._splitting,
            lambda group, chunk_lines: _cut(layout.num_tokens, group, chunk_lines, device),
        )

    def prepare_paged(self, layout: PagedLayout, cache: KVCache) -> AttentionStep:
        return _TritonStep(layout, cache, self._splitting, lambda group, _: [_decode_tiles(layout, group)])


class _KernelShape(NamedTuple):
    """What fits the registers and the shared memory of a processor: lines of a chunk's tile, positions a pass."""

    chunk_lines: int
    positions: int
    num_warps: int
    num_stages: int


def _kernel_shape(head_size: int) -> _KernelShape:
    if head_size <= 128:
        return _KernelShape(64, 64, num_warps=4, num_stages=2)
    if head_size <= 256:
        return _KernelShape(64, 32, num_warps=8, num_stages=2)
    return _KernelShape(32, 32, num_warps=8, num_stages=1)


class _Splitting(NamedTuple):
    """Into how many shares a context is cut: enough to keep every processor busy, none so short that merging costs
    more than it saves."""

    num_processors: int
    min_share: int

    def num_splits(self, num_programs: int, max_context: int) -> int:
        wanted = 2 * self.num_processors // num_programs
        return max(1, min(wanted, max_context // self.min_share, _MAX_SPLITS))


@dataclass(frozen=True, slots=True)
class _Tiles:
    """One launch: for each tile, int32 [tiles], its row and its first query within that row. `num_queries` and
    `num_lines` of a tile; decodes (`split`) have one query."""

    rows: Tensor
    firsts: Tensor
    num_queries: int
    num_lines: int
    split: bool


def _cut(num_tokens: IntArray, group: int, chunk_lines: int, device: torch.device) -> list[_Tiles]:
    """A step's tiles as layers see them whose KV heads serve `group` query heads each; chunks have `chunk_lines`."""
    single = num_tokens == 1
    launches = []

    def add(rows: IntArray, firsts: IntArray, num_queries: int, num_lines: int, *, split: bool) -> None:
        columns = [to_device(column.astype(np.int32), device) for column in (rows, firsts)]
        launches.append(_Tiles(columns[0], columns[1], num_queries, num_lines, split))

    if single.any():
        rows = np.flatnonzero(single)
        add(rows, np.zeros_like(rows), 1, _num_lines(_DECODE_LINES, group), split=True)
    if not single.all():
        num_lines = _num_lines(chunk_lines, group)
        num_queries = num_lines // group
        rows = np.flatnonzero(~single)
        counts = -(-num_tokens[rows] // num_queries)
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        add(np.repeat(rows, counts), places * num_queries, num_queries, num_lines, split=False)
    return launches


def _decode_tiles(layout: PagedLayout, group: int) -> _Tiles:
    """One tile a row, made on the device: a graph may not copy from the host."""
    rows = torch.arange(len(layout.context_lens), dtype=torch.int32, device=layout.context_lens.device)
    return _Tiles(rows, torch.zeros_like(rows), 1, _num_lines(_DECODE_LINES, group), split=True)


def _num_lines(least: int, group: int) -> int:
    return max(least, int(triton.next_power_of_2(group)))


class _TritonStep:
    def __init__(
        self, layout: PagedLayout, cache: KVCache, splitting: _Splitting, cut: Callable[[int, int], list[_Tiles]]
    ) -> None:
        self._layout = layout
        self._cache = cache
        self._splitting = splitting
        self._cut = cut
        self._launches: dict[tuple[int, int], list[_Tiles]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        write(call, self._cache, self._layout)
        num_heads, num_tokens, _ = call.query.shape
        out = call.query.new_empty(num_tokens, num_heads, call.value.shape[-1])
        shape = _kernel_shape(max(call.query.shape[-1], call.value.shape[-1]))
        cut = num_heads // call.key.shape[0], shape.chunk_lines
        if cut not in self._launches:
            self._launches[cut] = self._cut(*cut)
        for tiles in self._launches[cut]:
            self._launch(call, tiles, out)
        return out

    def _launch(self, call: AttentionCall, tiles: _Tiles, out: Tensor) -> None:
        num_heads, num_kv_heads, num_tiles = call.query.shape[0], call.key.shape[0], len(tiles.rows)
        num_splits, target, share_weight = 1, out, out
        if tiles.split:
            num_splits = self._splitting.num_splits(num_tiles * num_kv_heads, self._layout.max_context)
            target = torch.empty(num_splits, num_tiles, *out.shape[1:], dtype=torch.float32, device=out.device)
            share_weight = torch.empty(target.shape[:-1], dtype=torch.float32, device=out.device)
        # Some models turn queries to float32; a product has one precision.
        query = call.query.transpose(0, 1).to(self._cache.keys[call.layer].dtype).contiguous()
        layout = self._layout
        key_lanes, value_lanes = _lanes(query.shape[-1]), _lanes(out.shape[-1])
        shape = _kernel_shape(max(key_lanes, value_lanes))
        attend_tiles[(num_tiles, num_kv_heads, num_splits)](
            query,
            self._cache.keys[call.layer],
            self._cache.values[call.layer],
            query if call.sinks is None else call.sinks,
            target,
            share_weight,
            tiles.rows,
            tiles.firsts,
            layout.block_tables,
            layout.context_lens,
            layout.query_starts,
            call.scaling,
            layout.block_tables.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD_SIZE=query.shape[-1],
            VALUE_SIZE=out.shape[-1],
            KEY_LANES=key_lanes,
            VALUE_LANES=value_lanes,
            BLOCK_SIZE=layout.block_size,
            TILE_Q=tiles.num_queries,
            TILE_M=tiles.num_lines,
            TILE_N=shape.positions,
            SPLIT=tiles.split,
            WINDOW=call.window or 0,
            SOFTCAP=float(call.softcap or 0.0),
            HAS_SINKS=call.sinks is not None,
            # float32 means float32: the tensor cores' short form of it would show in greedy tokens.
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        if tiles.split:
            merge_shares[(num_tiles, num_heads)](
                target,
                share_weight,
                out,
                tiles.rows,
                layout.query_starts,
                num_splits,
                VALUE_SIZE=out.shape[-1],
                VALUE_LANES=value_lanes,
                MAX_SPLITS=_MAX_SPLITS,
            )


def write(call: AttentionCall, cache: KVCache, layout: PagedLayout) -> None:
    """`KVCache.write` as one kernel whose shape doesn't depend on how many blocks are entered."""
    key, value = call.key.transpose(0, 1).contiguous(), call.value.transpose(0, 1).contiguous()
    num_tokens, num_kv_heads, head_size = key.shape
    write_slots[(num_tokens, num_kv_heads)](
        key,
        value,
        cache.keys[call.layer],
        cache.values[call.layer],
        layout.slot_blocks,
        layout.slot_places,
        layout.clears,
        BLOCK_SIZE=layout.block_size,
        HEAD_SIZE=head_size,
        VALUE_SIZE=value.shape[-1],
        KEY_LANES=_lanes(head_size),
        VALUE_LANES=_lanes(value.shape[-1]),
        num_warps=1,
    )


def _lanes(size: int) -> int:
    """A power of two that a matrix product takes."""
    return max(16, int(triton.next_power_of_2(size)))
