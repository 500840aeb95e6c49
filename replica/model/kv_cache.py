"""The KV cache: two tensors a layer, cut into blocks that the scheduler hands out by number.

    keys[layer]    [num_blocks, kv_heads, block_size, head_size]
    values[layer]  [num_blocks, kv_heads, block_size, value_size]

Slot s is place s % block_size of block s // block_size. A block's content is meaningful up to the sequence's length;
what follows is zero, never another owner's: `write` clears a block when a sequence enters it, so that kernels may read
whole blocks and mask the tail, and non-finite values of a failed sequence reach nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch
from torch import Tensor

from replica.config import ModelConfig
from replica.errors import ResourceError
from replica.model.support import LayerShape

_CPU_MAX_BYTES = 2 << 30
_CPU_MEMORY_SHARE = 0.25


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
            return torch.empty(num_blocks, layer.num_kv_heads, block_size, size, dtype=dtype, device=device)

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


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks fit and what one token costs in all layers together."""

    num_blocks: int
    kv_bytes_per_token: int


def pool_size(
    config: ModelConfig, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype, free_bytes: int
) -> PoolSize:
    """Size the pool: `num_blocks` if set, else `kv_cache_memory_bytes`, else `free_bytes` (what the device can spare).

    Raises `ResourceError` when not even one block fits, or when a set size exceeds the memory.
    """
    elements = sum(layer.num_kv_heads * (layer.head_size + layer.value_size) for layer in layers)
    per_token = elements * dtype.itemsize
    per_block = per_token * block_size
    budget = free_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    num_blocks = budget // per_block if config.num_blocks is None else config.num_blocks
    if num_blocks < 1:
        raise ResourceError(
            f"no room for the KV cache: one block of {block_size} tokens takes {per_block / 1e6:.1f} MB, "
            f"{max(budget, 0) / 1e6:.1f} MB are left; raise --kv-cache-memory-bytes or free memory"
        )
    return PoolSize(int(num_blocks), per_token)


def cpu_kv_bytes() -> int:
    """What a CPU replica takes unasked: at most 2 GiB and a quarter of the memory that is available now."""
    return min(_CPU_MAX_BYTES, int(psutil.virtual_memory().available * _CPU_MEMORY_SHARE))


def require_cpu_memory(num_bytes: int) -> None:
    """Raise `ResourceError` when the machine hasn't `num_bytes` available: better one line now than a kill later."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ResourceError(
            f"the KV cache takes {num_bytes / 1e9:.2f} GB, {available / 1e9:.2f} GB of memory are available; "
            "lower --num-blocks or --kv-cache-memory-bytes"
        )


def model_len_that_fits(wanted: int | None, limit: int, pool: PoolSize, block_size: int) -> int:
    """The longest context served: `wanted`, or the model's `limit` cut to the pool.

    Raises `ResourceError` with both numbers when `wanted` exceeds the model's limit or the pool.
    """
    capacity = pool.num_blocks * block_size
    if wanted is None:
        return min(limit, capacity)
    if wanted > limit:
        raise ResourceError(f"max_model_len = {wanted} is more than the model's own limit; set --max-model-len {limit}")
    if wanted > capacity:
        need = -(-wanted // block_size) * block_size * pool.kv_bytes_per_token
        raise ResourceError(
            f"max_model_len = {wanted} doesn't fit the KV cache of {pool.num_blocks} blocks = {capacity} tokens; "
            f"set --max-model-len {capacity} or --kv-cache-memory-bytes {need}"
        )
    return wanted
