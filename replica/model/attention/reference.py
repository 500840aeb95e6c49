"""Attention by the book: one sequence after the other, over its own blocks. The oracle for other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from replica.model.attention.interface import AttentionCall, AttentionStep, masked_softmax_attention
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache


class ReferenceBackend:
    """Any device, any block size, any head sizes, windows, soft caps and sinks. Slow."""

    block_size = 16

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        return _ReferenceStep(layout, cache)


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
