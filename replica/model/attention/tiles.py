"""Attention in one fixed shape, for batch-invariant steps (`replica/model/tiles.py`).

All tokens of a tile attend to the first block of their contexts, then all to the second, and so on; each pass has the
same shape whoever is in the tile, and is folded into a running softmax. A token that needs fewer passes than its
neighbours sees only masked keys in the rest, which changes nothing: it multiplies by exactly 1 and adds exactly 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache


class TileBackend:
    """For steps whose rows all have one token. Any head sizes, windows, soft caps, sinks."""

    block_size = 32

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        return _TileStep(layout, cache)


class _TileStep:
    def __init__(self, layout: StepLayout, cache: KVCache) -> None:
        self._layout = layout
        self._cache = cache
        device = layout.slot_blocks.device
        width = max(len(table) for table in layout.block_tables)
        # A row without a block in some pass reads its own first one, masked.
        tables = [table + [table[0]] * (width - len(table)) for table in layout.block_tables]
        self._tables = torch.tensor(tables, device=device)
        self._positions = torch.from_numpy(layout.starts).to(device)
        self._places = torch.arange(layout.block_size, device=device)

    def attend(self, call: AttentionCall) -> Tensor:
        self._cache.write(call.layer, call.key, call.value, self._layout)
        num_heads, num_tokens, head_size = call.query.shape
        num_kv_heads = call.key.shape[0]
        # The same contiguous layout every time: products may sum differently over other strides.
        query = call.query.transpose(0, 1).contiguous().view(num_tokens, num_kv_heads, -1, head_size) * call.scaling
        best, weight, out = self._empty(call, query)
        for step in range(self._first_pass(call.window), self._tables.shape[1]):
            blocks = self._tables[:, step]
            scores = torch.matmul(query, self._cache.keys[call.layer][blocks].transpose(-1, -2)).float()
            if call.softcap is not None:
                scores = torch.tanh(scores / call.softcap) * call.softcap
            scores = scores.masked_fill(self._hidden(step, call.window)[:, None, None, :], float("-inf"))
            newest = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
            base = newest.masked_fill(newest == float("-inf"), 0.0)
            shares, kept = torch.exp(scores - base), torch.exp(best - base)
            values = self._cache.values[call.layer][blocks]
            out = out * kept + torch.matmul(shares.to(values.dtype), values).float()
            weight = weight * kept + shares.sum(dim=-1, keepdim=True)
            best = newest
        return (out / weight).to(call.query.dtype).view(num_tokens, num_heads, -1)

    def _empty(self, call: AttentionCall, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The running softmax before the first pass: largest score, sum of weights, weighted values. A sink is a score
        that is there from the start."""
        heads = query.shape[:-1]
        out = torch.zeros(*heads, call.value.shape[-1], device=query.device)
        if call.sinks is None:
            best = torch.full((*heads, 1), float("-inf"), device=query.device)
            return best, torch.zeros_like(best), out
        best = call.sinks.float().view(1, *heads[1:], 1).expand(*heads, 1)
        return best, torch.ones_like(best), out

    def _hidden(self, step: int, window: int | None) -> Tensor:
        """Which keys of pass `step` each token doesn't see, [T, block_size]."""
        distance = self._positions[:, None] - (step * self._layout.block_size + self._places)[None, :]
        hidden = distance < 0
        return hidden if window is None else hidden | (distance >= window)

    def _first_pass(self, window: int | None) -> int:
        """Passes before it lie outside every token's window."""
        if window is None:
            return 0
        return int(np.maximum(self._layout.starts - window + 1, 0).min()) // self._layout.block_size
