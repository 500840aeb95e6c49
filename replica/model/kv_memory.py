"""How many KV blocks and how long a context fit into memory. What can't fit is refused with the numbers and with
settings that fit.

The size of the pool comes from `num_blocks`, else from `kv_cache_memory_bytes`, else from what the device can spare.
The context is `max_model_len`, else the model's own limit cut to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replica.config import ModelConfig
from replica.errors import ResourceError, SettingError
from replica.model.host_memory import available_bytes
from replica.model.support import LayerShape

_CPU_MAX_BYTES = 2 << 30
_CPU_SHARE = 0.25
# Of what is left beside the weights: the rest is for the steps' own tensors and for others on the machine.
_CPU_MOST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class SpareMemory:
    """Bytes of a device beside the weights: what the KV cache takes `unasked`, and the `most` that it may be given."""

    unasked: int
    most: int


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool that fits, and the longest context that fits into it; `kv_bytes_per_token` in all layers together."""

    num_blocks: int
    max_model_len: int
    kv_bytes_per_token: int


def cpu_spare_memory(num_sharers: int = 1, reserved_bytes: int = 0) -> SpareMemory:
    """Unasked at most 2 GiB and a quarter of what is available now, when the weights have been read, less what is
    `reserved` for something that is to come (packed weights). `num_sharers` processes ask at the same time.
    """
    available = max(available_bytes() - reserved_bytes, 0)
    unasked, most = min(_CPU_MAX_BYTES, int(available * _CPU_SHARE)), int(available * _CPU_MOST_SHARE)
    return SpareMemory(unasked // num_sharers, most // num_sharers)


def cuda_spare_memory(free_bytes: int, gpu_memory_utilization: float, device: torch.device) -> SpareMemory:
    """`free_bytes` are left within the utilisation's share, beside weights and the largest step; more if asked for."""
    total = torch.cuda.get_device_properties(device).total_memory
    return SpareMemory(free_bytes, free_bytes + int(total * (1 - gpu_memory_utilization)))


def fit_pool(
    config: ModelConfig,
    layers: Sequence[LayerShape],
    block_size: int,
    dtype: torch.dtype,
    memory: SpareMemory,
    model_limit: int,
    *,
    num_spare: int = 0,
) -> PoolSize:
    """`model_limit`: tokens of the longest context the model was made for. `num_spare`: blocks that the runner keeps
    beside those that the scheduler hands out.

    Raises `ResourceError` (whoever follows one of the settings that it names is served) or `SettingError`.
    """
    if config.num_blocks is not None and config.kv_cache_memory_bytes is not None:
        raise SettingError(
            "num_blocks", config.num_blocks, "only without kv_cache_memory_bytes: each sets the KV cache"
        )
    wanted = config.max_model_len
    if wanted is not None and wanted > model_limit:
        raise ResourceError(
            f"max_model_len = {wanted} is more than the model's own limit; set --max-model-len {model_limit}"
        )
    per_token = sum(layer.num_kv_heads * (layer.head_size + layer.value_size) for layer in layers) * dtype.itemsize
    per_block = per_token * block_size
    memory = SpareMemory(memory.unasked - num_spare * per_block, memory.most - num_spare * per_block)
    num_blocks = _num_blocks(config, per_block, block_size, memory)
    capacity = num_blocks * block_size
    if wanted is not None and wanted > capacity:
        raise ResourceError(
            f"max_model_len = {wanted} doesn't fit the KV cache of {num_blocks} blocks = {capacity} tokens; set "
            f"--max-model-len {capacity}{_or_larger_pool(config, per_block, block_size, memory)}"
        )
    return PoolSize(num_blocks, min(wanted or model_limit, capacity), per_token)


def _num_blocks(config: ModelConfig, per_block: int, block_size: int, memory: SpareMemory) -> int:
    asked = config.kv_cache_memory_bytes if config.num_blocks is None else config.num_blocks * per_block
    if asked is not None and asked > memory.most >= per_block:
        fits = memory.most // per_block
        setting = f"--kv-cache-memory-bytes {fits * per_block}" if config.num_blocks is None else f"--num-blocks {fits}"
        raise ResourceError(
            f"the KV cache takes {_size(asked)}, {_size(memory.most)} of memory are left for it; "
            f"set {setting}{_and_shorter_context(config, fits * block_size)}"
        )
    num_blocks = (memory.unasked if asked is None else min(asked, memory.most)) // per_block
    if num_blocks >= 1:
        return num_blocks
    line = f"no room for the KV cache: one block of {block_size} tokens takes {_size(per_block)}"
    if per_block > memory.most:
        raise ResourceError(f"{line}, {_size(memory.most)} of memory are left; free memory or serve a smaller model")
    given = memory.unasked if asked is None else asked
    need = _blocks_of(config.max_model_len, block_size)
    fits = min(need, memory.most // per_block)
    raise ResourceError(
        f"{line}, {_size(given)} are given to it; "
        f"set --kv-cache-memory-bytes {fits * per_block}{_and_shorter_context(config, fits * block_size)}"
    )


def _blocks_of(num_tokens: int | None, block_size: int) -> int:
    return max(-(-(num_tokens or 1) // block_size), 1)


def _and_shorter_context(config: ModelConfig, capacity: int) -> str:
    too_long = config.max_model_len is not None and config.max_model_len > capacity
    return f" and --max-model-len {capacity}" if too_long else ""


def _or_larger_pool(config: ModelConfig, per_block: int, block_size: int, memory: SpareMemory) -> str:
    need = _blocks_of(config.max_model_len, block_size)
    if need * per_block > memory.most:
        return ""
    return f" or --num-blocks {need}" if config.num_blocks else f" or --kv-cache-memory-bytes {need * per_block}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{max(num_bytes, 0)} bytes"
