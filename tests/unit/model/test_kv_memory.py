"""The pool's size and the context that fits; refusals, word by word. That their settings work: tests/property/model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replica.config import ModelConfig
from replica.errors import ResourceError, SettingError
from replica.model.kv_memory import PoolSize, SpareMemory, cpu_spare_memory, fit_pool
from replica.model.support import LayerShape

# 2 heads x (3 + 5) floats of 4 bytes in the first layer, 1 x (4 + 4) in the second: 96 bytes a token, 1536 a block.
_LAYERS = [LayerShape(4, 2, 3, 5), LayerShape(4, 1, 4, 4)]
_BLOCK = 96 * 16
_MEMORY = SpareMemory(unasked=10 * _BLOCK + 95, most=20 * _BLOCK + 1)
_LIMIT = 8192


def _fit(
    memory: SpareMemory = _MEMORY, *, dtype: torch.dtype = torch.float32, limit: int = _LIMIT, **settings: Any
) -> PoolSize:
    return fit_pool(ModelConfig(**settings), _LAYERS, 16, dtype, memory, limit)


def test_unasked_the_pool_takes_what_the_device_can_spare_and_cuts_the_context_to_it() -> None:
    assert _fit() == PoolSize(num_blocks=10, max_model_len=160, kv_bytes_per_token=96)
    assert _fit(dtype=torch.bfloat16) == PoolSize(20, 320, 48)
    assert _fit(limit=100) == PoolSize(10, 100, 96)
    assert _fit(max_model_len=33) == PoolSize(10, 33, 96)


def test_a_setting_may_take_more() -> None:
    assert _fit(kv_cache_memory_bytes=12 * _BLOCK + 7).num_blocks == 12
    assert _fit(num_blocks=20).num_blocks == 20


def test_spare_blocks_come_out_of_the_same_memory() -> None:
    config = ModelConfig()
    assert fit_pool(config, _LAYERS, 16, torch.float32, _MEMORY, _LIMIT, num_spare=1).num_blocks == 9


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"max_model_len": _LIMIT + 1},
            "max_model_len = 8193 is more than the model's own limit; set --max-model-len 8192",
        ),
        (
            {"max_model_len": 161},
            "max_model_len = 161 doesn't fit the KV cache of 10 blocks = 160 tokens; "
            "set --max-model-len 160 or --kv-cache-memory-bytes 16896",
        ),
        (
            {"max_model_len": 200, "num_blocks": 12},
            "max_model_len = 200 doesn't fit the KV cache of 12 blocks = 192 tokens; "
            "set --max-model-len 192 or --num-blocks 13",
        ),
        (
            {"max_model_len": 400},
            "max_model_len = 400 doesn't fit the KV cache of 10 blocks = 160 tokens; set --max-model-len 160",
        ),
        (
            {"num_blocks": 21},
            "the KV cache takes 32.26 kB, 30.72 kB of memory are left for it; set --num-blocks 20",
        ),
        (
            {"kv_cache_memory_bytes": 10**15, "max_model_len": 500},
            "the KV cache takes 1000000.00 GB, 30.72 kB of memory are left for it; "
            "set --kv-cache-memory-bytes 30720 and --max-model-len 320",
        ),
        (
            {"kv_cache_memory_bytes": _BLOCK - 1},
            "no room for the KV cache: one block of 16 tokens takes 1.54 kB, 1.53 kB are given to it; "
            "set --kv-cache-memory-bytes 1536",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers_and_the_setting_that_fits(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ResourceError) as caught:
        _fit(**settings)
    assert caught.value.message == line


def test_where_no_setting_helps_none_is_named() -> None:
    with pytest.raises(ResourceError) as caught:
        _fit(SpareMemory(100, 1000))
    assert caught.value.message == (
        "no room for the KV cache: one block of 16 tokens takes 1.54 kB, 1.00 kB of memory are left; "
        "free memory or serve a smaller model"
    )


def test_two_sizes_for_one_pool_are_refused() -> None:
    with pytest.raises(SettingError, match="num_blocks = 3 is not allowed: only without kv_cache_memory_bytes"):
        _fit(num_blocks=3, kv_cache_memory_bytes=10**6)


def test_the_cpu_gives_a_quarter_up_to_2_gib_and_most_of_it_when_asked() -> None:
    alone, shared = cpu_spare_memory(), cpu_spare_memory(num_sharers=2)
    assert 0 < alone.unasked <= 2 << 30
    assert alone.unasked < alone.most
    assert shared.unasked == pytest.approx(alone.unasked / 2, rel=0.2)
    assert cpu_spare_memory(reserved_bytes=alone.most // 2).most == pytest.approx(alone.most * 0.55, rel=0.2)
    assert cpu_spare_memory(reserved_bytes=1 << 60) == SpareMemory(0, 0)
