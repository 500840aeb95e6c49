"""The KV cache: two tensors a layer, cut into blocks that the scheduler hands out by number.

    keys[layer]    [num_blocks, kv_heads, block_size, head_size]
    values[layer]  [num_blocks, kv_heads, block_size, value_size]

Slot s is place s % block_size of block s // block_size. A block's content is meaningful up to the sequence's length.
What follows depends on the attention backend. Most read whole blocks and mask the tail, where 0 * NaN would be NaN:
their writing (`write` here, Triton's own kernel) clears a block when a sequence enters it, so that what follows is zero
and non-finite values of a failed sequence reach nobody else. `attention/pool.py`, the CPU's, clears nothing, another
owner's values may follow, and it reads nothing beyond a context.
"""

from __future__ import annotations

import math
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
        self.num_blocks = num_blocks
        self.block_size = block_size
        sizes = [layer.head_size for layer in layers] + [layer.value_size for layer in layers]
        kv_heads = [layer.num_kv_heads for layer in layers]
        shapes = [(num_blocks, heads, block_size, size) for heads, size in zip(2 * kv_heads, sizes, strict=True)]
        tensors = _in_huge_pages(shapes) if device.type == "cpu" and dtype == torch.float32 else None
        if tensors is None:
            tensors = [torch.empty(*shape, dtype=dtype, device=device) for shape in shapes]
        self.keys, self.values = tensors[: len(layers)], tensors[len(layers) :]

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


def _in_huge_pages(shapes: Sequence[tuple[int, int, int, int]]) -> list[Tensor]:
    """Side by side, for float32. All of it is written once: what the machine doesn't have is missed at the start, not
    by some request."""
    counts = [math.prod(shape) for shape in shapes]
    whole = torch.from_numpy(huge_pages.empty(sum(counts))).zero_()
    return [some.view(shape) for some, shape in zip(torch.split(whole, counts), shapes, strict=True)]
