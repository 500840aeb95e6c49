"""Attention by the book: one sequence after the other, over its own blocks. The oracle for other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from replica.model.attention.interface import AttentionCall, AttentionStep, masked_softmax_attention
from replica.model.attention.paged import PagedLayout
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache


class ReferenceBackend:
    """Any device, any block size, any head sizes, windows, soft caps and sinks. Slow."""

    block_size = 16

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        return _ReferenceStep(layout, cache)

    def prepare_paged(self, layout: PagedLayout, cache: KVCache) -> AttentionStep:
        return _ReferenceDecodes(layout, cache)


class _ReferenceStep:
    def __init__(self, layout: StepLayout, cache: KVCache) -> None:
        self._layout = layout
        self._cache = cache

    def attend(self, call: AttentionCall) -> Tensor:
        self._cache.write(call.layer, call.key, call.value, self._layout)
        rows = [self._attend_row(call, row) for row in range(len(self._layout.starts))]
        return torch.cat(rows)

    def _attend_row(self, call: AttentionCall, row: int) -> Tensor:
        layout, device = self._layout, call.query.device
        start, context = int(layout.starts[row]), int(layout.context_lens[row])
        first = int(layout.offsets[row])
        query = call.query[:, first : first + context - start]
        blocks = torch.tensor(layout.block_tables[row], device=device)
        key = self._cache.keys[call.layer][blocks].transpose(0, 1).flatten(1, 2)[:, :context]
        value = self._cache.values[call.layer][blocks].transpose(0, 1).flatten(1, 2)[:, :context]
        distance = torch.arange(start, context, device=device)[:, None] - torch.arange(context, device=device)[None, :]
        mask = distance >= 0 if call.window is None else (distance >= 0) & (distance < call.window)
        num_kv_heads = key.shape[0]
        grouped = query.reshape(num_kv_heads, -1, *query.shape[1:])
        return masked_softmax_attention(call, grouped, key, value, mask).flatten(0, 1).transpose(0, 1)


class _ReferenceDecodes:
    """Rows of one token from tensors only: every row gathers all blocks of its table."""

    def __init__(self, layout: PagedLayout, cache: KVCache) -> None:
        self._layout = layout
        self._cache = cache

    def attend(self, call: AttentionCall) -> Tensor:
        self._cache.write(call.layer, call.key, call.value, self._layout)
        contexts = self._layout.context_lens[:, None]
        places = torch.arange(self._layout.block_tables.shape[1] * self._layout.block_size, device=contexts.device)
        mask = places < contexts
        if call.window is not None:
            mask &= places >= contexts - call.window
        key, value = (
            # Blocks behind the context are others'; not even NaN may pass.
            tensor[self._layout.block_tables].transpose(1, 2).flatten(2, 3).masked_fill(~mask[:, None, :, None], 0.0)
            for tensor in (self._cache.keys[call.layer], self._cache.values[call.layer])
        )
        query = call.query.transpose(0, 1)
        grouped = query.reshape(len(query), key.shape[1], -1, 1, query.shape[-1])
        return masked_softmax_attention(call, grouped, key, value, mask[:, None, None, None]).flatten(1, 3)
