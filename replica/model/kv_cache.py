"""The KV cache: two tensors a layer, cut into blocks that the scheduler hands out by number.

    keys[layer]    [num_blocks, kv_heads, block_size, head_size]
    values[layer]  [num_blocks, kv_heads, block_size, value_size]

Slot s is place s % block_size of block s // block_size. A block's content is meaningful up to the sequence's length;
what follows is zero, never another owner's: `write` clears a block when a sequence enters it, so that kernels may read
whole blocks and mask the tail, and non-finite values of a failed sequence reach nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from replica.model import huge_pages
from replica.model.support import LayerShape


class Slots(Protocol):
    """Where a step's tokens go, [T] each, and which blocks it enters without filling them."""

    @property
    def slot_blocks(self) -> Tensor: ...

    @property
    def slot_places(self) -> Tensor: ...

    @property
    def fresh_blocks(self) -> Tensor: ...


class KVCache:
    """Blocks of all layers on one device; what they hold before they are written is arbitrary, non-finite included."""

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def allocate(layer: LayerShape, size: int) -> Tensor:
            shape = num_blocks, layer.num_kv_heads, block_size, size
            if device.type == "cpu" and dtype == torch.float32:
                # Written once: pages that can't be had are missed now, not by some request.
                return torch.from_numpy(huge_pages.empty(*shape)).zero_()
            return torch.empty(*shape, dtype=dtype, device=device)

        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [allocate(layer, layer.head_size) for layer in layers]
        self.values = [allocate(layer, layer.value_size) for layer in layers]

    def write(self, layer: int, key: Tensor, value: Tensor, layout: Slots) -> None:
        """Put `key` [kv_heads, T, D] and `value` [kv_heads, T, Dv] into the step's slots."""
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            if layout.fresh_blocks.numel():
                cache.index_fill_(0, layout.fresh_blocks, 0.0)
            cache[layout.slot_blocks, :, layout.slot_places] = new.transpose(0, 1).to(cache.dtype)

    def clear(self, block: int) -> None:
        """Make it zero in all layers."""
        for cache in (*self.keys, *self.values):
            cache[block] = 0

    def release(self) -> None:
        """Give the memory back; the cache is unusable afterwards."""
        self.keys.clear()
        self.values.clear()
