"""Attention over the pool by torch's own variable-length attention (flash attention) on CUDA.

`torch.nn.attention.varlen.varlen_attn` reads pages through a block table where the flash version behind it does: that
depends on torch, the GPU and on what is installed, so `probe.py` decides at start whether this backend serves.
Its pages are `[pages, page_size, kv_heads, D]`: our blocks seen with two axes exchanged, nothing is copied.
Windows are its own `(W - 1, 0)`; a sink is applied to the result, by how much of the weight it would have taken. It
knows no soft cap, and K and V of one size only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.attention.paged import PagedLayout, paged_layout
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache
from replica.model.support import LayerShape

VarlenAttention = Callable[..., Any]
"""What `varlen_attn` takes and gives."""

Writer = Callable[[AttentionCall, KVCache, PagedLayout], None]

_MAX_HEAD_SIZE = 256


class VarlenBackend:
    """`block_size` is its pages' size. `with_key_starts`: older flash versions want the rows' places among the keys
    even where pages say it, newer ones refuse them."""

    def __init__(
        self, block_size: int, *, with_key_starts: bool, attention: VarlenAttention, write: Writer | None = None
    ) -> None:
        self.block_size = block_size
        self._with_key_starts = with_key_starts
        self._attention = attention
        self._write = write or _write

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        return self.prepare_paged(paged_layout(layout), cache)

    def prepare_paged(self, layout: PagedLayout, cache: KVCache) -> AttentionStep:
        return _VarlenStep(layout, cache, self._attention, self._write, with_key_starts=self._with_key_starts)


class _VarlenStep:
    def __init__(
        self,
        layout: PagedLayout,
        cache: KVCache,
        attention: VarlenAttention,
        write: Writer,
        *,
        with_key_starts: bool,
    ) -> None:
        self._layout = layout
        self._cache = cache
        self._attention = attention
        self._write = write
        lens = layout.context_lens
        self._key_starts = torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=lens.dtype)]) if with_key_starts else None

    def attend(self, call: AttentionCall) -> Tensor:
        self._write(call, self._cache, self._layout)
        layout = self._layout
        found = self._attention(
            # Some models turn queries to float32.
            call.query.transpose(0, 1).to(self._cache.keys[call.layer].dtype),
            self._cache.keys[call.layer].transpose(1, 2),
            self._cache.values[call.layer].transpose(1, 2),
            layout.query_starts,
            self._key_starts,
            layout.max_queries,
            layout.max_context,
            return_aux=None if call.sinks is None else _with_weights(),
            scale=call.scaling,
            window_size=(-1 if call.window is None else call.window - 1, 0),
            enable_gqa=call.query.shape[0] != call.key.shape[0],
            seqused_k=layout.context_lens,
            block_table=layout.block_tables,
        )
        if call.sinks is None:
            out: Tensor = found.to(call.query.dtype)
            return out
        out, weights = found
        # `weights` [heads, T], logarithms: the sink's share of the whole is what the result loses.
        share = torch.sigmoid(weights - call.sinks.float()[:, None]).transpose(0, 1)
        return (out * share[:, :, None]).to(call.query.dtype)


def lacks(layers: Sequence[LayerShape], dtype: torch.dtype) -> str | None:
    """What of these layers the flash kernels are known not to have; None: nothing."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits only, not in {str(dtype).removeprefix('torch.')}"
    for layer in layers:
        if layer.softcap is not None:
            return "it has no soft cap"
        if layer.head_size != layer.value_size:
            return f"K and V differ in size ({layer.head_size} and {layer.value_size})"
        if layer.head_size > _MAX_HEAD_SIZE or layer.head_size % 8:
            return f"head size {layer.head_size} is no multiple of 8 up to {_MAX_HEAD_SIZE}"
    return None


def torch_attention() -> VarlenAttention:
    """torch's own. Raises ImportError where this torch has none."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _with_weights() -> Any:
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest(lse=True)


def _write(call: AttentionCall, cache: KVCache, layout: PagedLayout) -> None:
    cache.write(call.layer, call.key, call.value, layout)
