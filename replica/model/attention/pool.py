"""Attention over the pool as it lies, for float32 on the CPU: nothing is gathered for rows with one token.

Decodes are computed by compiled loops that follow each row's block table (`replica/model/cpu_attention.py`). A chunk
of prefill attends by PyTorch's fused kernel without a mask: each tile of queries to itself, and by another call to what
lies before it; the two are merged by their log-sums. What the loop lacks (soft caps), and chunks under a window, with
sinks or with values of another size than keys, go through `gather.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replica.model import cpu_attention, cpu_compiler, cpu_kernels
from replica.model.attention.gather import GatherStep
from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.inputs import IntArray, StepLayout
from replica.model.kv_cache import KVCache

_ROWS_A_PART = 4
_NO_SINKS = np.empty(0, dtype=np.float32)


class PoolBackend:
    """float32 on the CPU; head sizes, windows, sinks and soft caps as they come. `query_tile`: queries of a chunk that
    are computed together, because the kernel skips little of what lies above a diagonal."""

    block_size = 32

    def __init__(self, query_tile: int = 256) -> None:
        self._query_tile = query_tile

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        cpu_compiler.use_threads(torch.get_num_threads())
        return _PoolStep(layout, cache, self._query_tile)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows with one token as layers of one kind see them; see `cpu_attention.decode_attention`."""

    first: IntArray
    last: IntArray
    work: IntArray
    work_starts: IntArray
    heads: int


class _PoolStep:
    def __init__(self, layout: StepLayout, cache: KVCache, query_tile: int) -> None:
        self._layout = layout
        self._query_tile = query_tile
        self._cache = cache
        self._gather = GatherStep(layout, cache)
        self._rows = np.flatnonzero(layout.num_tokens == 1)
        self._chunks = np.flatnonzero(layout.num_tokens > 1).tolist()
        self._places = layout.offsets[self._rows]
        tables = [layout.block_tables[row] for row in self._rows.tolist()]
        widths = np.array([len(table) for table in tables], dtype=np.int64)
        self._blocks = np.array([block for table in tables for block in table], dtype=np.int64)
        self._table_starts = np.cumsum(widths) - widths
        self._slots = layout.slot_blocks.numpy(), layout.slot_places.numpy()
        # Compiled loops check no index: a block that isn't there would be somebody's memory.
        for blocks in (self._slots[0], self._blocks):
            if blocks.size and not 0 <= blocks.min() <= blocks.max() < cache.num_blocks:
                raise IndexError(f"a block table names a block outside of the {cache.num_blocks} that there are")
        self._views: dict[tuple[int | None, int], _Decodes] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        if call.softcap is not None:
            return self._gather.attend(call)
        key, value = _by_token(call.key), _by_token(call.value)
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        cpu_kernels.write_slots(keys.numpy(), key.numpy(), *self._slots)
        cpu_kernels.write_slots(values.numpy(), value.numpy(), *self._slots)
        out = torch.empty(key.shape[0], call.query.shape[0], value.shape[-1])
        if len(self._rows):
            self._attend_decodes(call, keys, values, out)
        for row in self._chunks:
            first = int(self._layout.offsets[row])
            last = first + int(self._layout.num_tokens[row])
            out[first:last] = self._attend_chunk(call, row, first, last)
        return out

    def _attend_decodes(self, call: AttentionCall, keys: Tensor, values: Tensor, out: Tensor) -> None:
        decodes = self._decodes(call.window, call.key.shape[0])
        cpu_attention.decode_attention(
            _by_token(call.query).numpy(),
            keys.numpy(),
            values.numpy(),
            self._places,
            self._blocks,
            self._table_starts,
            decodes.first,
            decodes.last,
            decodes.work,
            decodes.work_starts,
            decodes.heads,
            np.float32(call.scaling),
            _NO_SINKS if call.sinks is None else call.sinks.float().contiguous().numpy(),
            out.numpy(),
        )

    def _attend_chunk(self, call: AttentionCall, row: int, first: int, last: int) -> Tensor:
        start = int(self._layout.starts[row])
        narrow = call.window is not None and call.window < start + last - first
        if narrow or call.sinks is not None or call.key.shape[-1] != call.value.shape[-1]:
            return self._gather.attend_row(call, row)
        num_kv_heads = call.key.shape[0]
        query = call.query[:, first:last]
        query = query.reshape(num_kv_heads, -1, *query.shape[1:])
        key, value = call.key[:, first:last], call.value[:, first:last]
        if start:
            key, value = self._gather.context(call, row, start + last - first)
        out = torch.empty(*query.shape[:-1], value.shape[-1])
        for tile in range(0, last - first, self._query_tile):
            tile_end = min(tile + self._query_tile, last - first)
            out[:, :, tile:tile_end] = _causal(call, query[:, :, tile:tile_end], key, value, start + tile)
        return out.flatten(0, 1).transpose(0, 1)

    def _decodes(self, window: int | None, num_kv_heads: int) -> _Decodes:
        kind = window, num_kv_heads
        if kind not in self._views:
            last = self._layout.context_lens[self._rows]
            first = np.zeros_like(last) if window is None else np.maximum(last - window, 0)
            self._views[kind] = _Decodes(first, last, *_shared_out(last - first, num_kv_heads, torch.get_num_threads()))
        return self._views[kind]


def _shared_out(lengths: IntArray, num_kv_heads: int, num_parts: int) -> tuple[IntArray, IntArray, int]:
    """Every row * num_kv_heads + kv_head, in parts of about equal length: dealt out from the longest, to and fro.

    With enough rows for all parts the heads of a row stay together, because they lie together in memory: the third
    number says how many.
    """
    rows = np.argsort(-lengths, kind="stable")
    heads = num_kv_heads if len(rows) >= _ROWS_A_PART * num_parts else 1
    work = (rows[:, None] * num_kv_heads + np.arange(0, num_kv_heads, heads)[None, :]).ravel()
    turn = np.arange(len(work)) % (2 * num_parts)
    part = np.minimum(turn, 2 * num_parts - 1 - turn)
    starts = np.concatenate(([0], np.cumsum(np.bincount(part, minlength=num_parts))))
    return work[np.argsort(part, kind="stable")], starts, heads


def _by_token(heads: Tensor) -> Tensor:
    """[heads, T, D] as contiguous [T, heads, D]: no copy where it comes from a projection."""
    return heads.transpose(0, 1).contiguous()


def _causal(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """Queries [kv_heads, group, Q, D] at positions start, start + 1, ... of the keys: what lies before them without a
    mask, themselves by the kernel that skips what they don't see, merged by their log-sums."""
    end = start + query.shape[2]
    own, own_log = _flash(call, query, key[:, start:end], value[:, start:end], is_causal=True)
    if not start:
        return own
    before, before_log = _flash(call, query, key[:, :start], value[:, :start], is_causal=False)
    # The kernel takes a query all of whose scores are NaN for one that sees nothing: let it show.
    before_log = before_log + 0.0 * key[:, :start].sum()
    return torch.lerp(own, before, torch.sigmoid(before_log - own_log).unsqueeze(-1))


def _flash(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum: `query` [kv_heads, group, Q, D], `key`, `value` [kv_heads, K, D]."""
    group = query.shape[1]
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        key.unsqueeze(1).expand(-1, group, -1, -1),
        value.unsqueeze(1).expand(-1, group, -1, -1),
        0.0,
        is_causal,
        scale=call.scaling,
    )
    return out, log_sum
