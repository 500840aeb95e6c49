"""Attention over gathered blocks with PyTorch's fused kernel: any device, precision and layer.

Rows with one token (decodes) are computed together: they are grouped by how many blocks they need, rounded up so
that padding is at most a quarter; each group's blocks are gathered by one `index_select` and attended in one call, all
query heads of a KV head as its queries. Rows with more tokens (prefill chunks) are computed one by
one; a chunk that starts its sequence needs no gather at all. With a window only the blocks inside it are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from replica.model.attention.interface import AttentionCall, AttentionStep, masked_softmax_attention
from replica.model.inputs import IntArray, StepLayout
from replica.model.kv_cache import KVCache


class GatherBackend:
    """Head sizes, windows, soft caps and sinks as they come; soft caps and sinks leave the fused kernel."""

    block_size = 128

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        return GatherStep(layout, cache)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one token each: their flat places [R], where their blocks lie (see `_gather_index`), their mask
    [R, 1, 1, keys]."""

    places: Tensor
    index: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row with several tokens: flat places [first, last), where the blocks lie that it sees, and its mask [Q, K] or
    None when it is plainly causal from position 0. `num_keys`: keys that lie in those blocks."""

    first: int
    last: int
    index: Tensor
    num_keys: int
    mask: Tensor | None


class GatherStep:
    def __init__(self, layout: StepLayout, cache: KVCache) -> None:
        self._layout = layout
        self._cache = cache
        self._device = layout.slot_blocks.device
        self._views: dict[tuple[int | None, int], tuple[list[_DecodeGroup], list[_Chunk]]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        self._cache.write(call.layer, call.key, call.value, self._layout)
        groups, chunks = self._view(call.window, call.key.shape[0])
        num_tokens = call.query.shape[1]
        out = call.query.new_empty(num_tokens, call.query.shape[0], call.value.shape[-1])
        for group in groups:
            out[group.places] = self._attend_decodes(call, group)
        for chunk in chunks:
            out[chunk.first : chunk.last] = self._attend_chunk(call, chunk)
        return out

    def _attend_decodes(self, call: AttentionCall, group: _DecodeGroup) -> Tensor:
        num_kv_heads = call.key.shape[0]
        query = call.query[:, group.places].transpose(0, 1)
        query = query.reshape(len(group.places), num_kv_heads, -1, query.shape[-1])
        key = _gather(self._cache.keys[call.layer], group.index)
        value = _gather(self._cache.values[call.layer], group.index)
        if call.softcap is None and call.sinks is None:
            bias = group.mask.to(query.dtype)
            out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=call.scaling)
        else:
            visible = (group.mask == 0).unsqueeze(1)
            out = masked_softmax_attention(call, query.unsqueeze(-2), key, value, visible).squeeze(-2)
        return out.flatten(1, 2)

    def _attend_chunk(self, call: AttentionCall, chunk: _Chunk) -> Tensor:
        num_kv_heads = call.key.shape[0]
        query = call.query[:, chunk.first : chunk.last]
        query = query.reshape(num_kv_heads, -1, *query.shape[1:])
        if chunk.mask is None:
            key, value = call.key[:, chunk.first : chunk.last], call.value[:, chunk.first : chunk.last]
        else:
            key = _gather(self._cache.keys[call.layer], chunk.index)[0, :, : chunk.num_keys]
            value = _gather(self._cache.values[call.layer], chunk.index)[0, :, : chunk.num_keys]
        if call.softcap is not None or call.sinks is not None:
            num_queries = chunk.last - chunk.first
            mask = _causal_mask(num_queries, num_queries, 0, None, self._device) if chunk.mask is None else chunk.mask
            out = masked_softmax_attention(call, query, key, value, mask == 0)
        else:
            group = query.shape[1]
            bias = None if chunk.mask is None else chunk.mask.to(query.dtype)
            out = functional.scaled_dot_product_attention(
                query,
                key.unsqueeze(1).expand(-1, group, -1, -1),
                value.unsqueeze(1).expand(-1, group, -1, -1),
                attn_mask=bias,
                is_causal=bias is None,
                scale=call.scaling,
            )
        return out.flatten(0, 1).transpose(0, 1)

    def _view(self, window: int | None, num_kv_heads: int) -> tuple[list[_DecodeGroup], list[_Chunk]]:
        """Groups and chunks as layers of this kind see them: made once a step, shared by those layers."""
        kind = window, num_kv_heads
        if kind not in self._views:
            single = self._layout.num_tokens == 1
            decodes = self._decode_groups(np.flatnonzero(single), window, num_kv_heads)
            chunks = [self._chunk(int(row), window, num_kv_heads) for row in np.flatnonzero(~single)]
            self._views[kind] = decodes, chunks
        return self._views[kind]

    def _decode_groups(self, rows: IntArray, window: int | None, num_kv_heads: int) -> list[_DecodeGroup]:
        layout, size = self._layout, self._layout.block_size
        contexts = layout.context_lens[rows]
        lowest = np.zeros_like(contexts) if window is None else np.maximum(contexts - window, 0)
        skipped = lowest // size
        widths = np.maximum(-(-contexts // size) - skipped, 1)
        padded = _round_up(widths)
        groups = []
        for width in np.unique(padded):
            members = np.flatnonzero(padded == width)
            # Padding repeats the row's own last block: masked, and finite whenever the row itself is.
            tables = np.empty((len(members), width), dtype=np.int64)
            for line, member in enumerate(members):
                seen = layout.block_tables[rows[member]][skipped[member] :]
                tables[line, : len(seen)] = seen
                tables[line, len(seen) :] = seen[-1]
            positions = (skipped[members] * size)[:, None] + np.arange(width * size)[None, :]
            visible = (positions < contexts[members][:, None]) & (positions >= lowest[members][:, None])
            bias = np.where(visible, np.float32(0), np.float32("-inf"))[:, None, None, :]
            groups.append(
                _DecodeGroup(
                    places=torch.from_numpy(layout.offsets[rows[members]]).to(self._device),
                    index=_gather_index(tables, num_kv_heads).to(self._device),
                    mask=torch.from_numpy(bias).to(self._device),
                )
            )
        return groups

    def _chunk(self, row: int, window: int | None, num_kv_heads: int) -> _Chunk:
        layout, size = self._layout, self._layout.block_size
        start, context, first = int(layout.starts[row]), int(layout.context_lens[row]), int(layout.offsets[row])
        lowest = 0 if window is None else max(start - window + 1, 0)
        skipped = lowest // size
        num_queries, num_keys = context - start, context - skipped * size
        plain = start == 0 and (window is None or window >= context)
        return _Chunk(
            first=first,
            last=first + num_queries,
            index=_gather_index(np.array([layout.block_tables[row][skipped:]]), num_kv_heads).to(self._device),
            num_keys=num_keys,
            mask=None if plain else _causal_mask(num_queries, num_keys, num_keys - num_queries, window, self._device),
        )


def _round_up(widths: IntArray) -> IntArray:
    """1, 2, 3, 4, then four steps to every doubling: 5, 6, 7, 8, 10, 12, 14, 16, 20, ..."""
    step = np.maximum(1 << np.ceil(np.log2(widths)).astype(np.int64) >> 3, 1)
    rounded: IntArray = -(-widths // step) * step
    return rounded


def _gather_index(tables: IntArray, num_kv_heads: int) -> Tensor:
    """Where the blocks [R, N] of every head lie in a cache seen as [blocks * kv_heads, ...]: [R, kv_heads, N]."""
    return torch.from_numpy(tables[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[None, :, None])


def _gather(cache: Tensor, index: Tensor) -> Tensor:
    """The blocks at `index` [R, kv_heads, N] as [R, kv_heads, N * block_size, D]. One copy, by whole blocks: indexing
    with brackets copies element by element and takes eight times as long on the CPU."""
    rows, num_kv_heads, num_blocks = index.shape
    _, _, size, width = cache.shape
    picked = cache.view(-1, size * width).index_select(0, index.flatten())
    return picked.view(rows, num_kv_heads, num_blocks * size, width)


def _causal_mask(num_queries: int, num_keys: int, lead: int, window: int | None, device: torch.device) -> Tensor:
    """0 where query i sees key j (0 <= i + lead - j < window), else -inf; float32 [Q, K]."""
    distance = torch.arange(num_queries, device=device)[:, None] + lead - torch.arange(num_keys, device=device)[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return torch.zeros(num_queries, num_keys, device=device).masked_fill(~visible, float("-inf"))
