"""The pool's size and the context that fits, with numbers and the setting to change; what writing leaves behind."""

from __future__ import annotations

import pytest
import torch

from replica.config import ModelConfig
from replica.errors import ResourceError
from replica.model.inputs import build_inputs
from replica.model.kv_cache import KVCache, PoolSize, model_len_that_fits, pool_size, require_cpu_memory
from replica.model.support import LayerShape
from tests.model.plans import Row, make_plan

_CPU = torch.device("cpu")
# 2 heads x (3 + 5) floats of 4 bytes in the first layer, 1 x (4 + 4) in the second: 96 bytes a token.
_LAYERS = [LayerShape(4, 2, 3, 5), LayerShape(4, 1, 4, 4)]


def test_the_pool_takes_what_the_device_can_spare() -> None:
    assert pool_size(ModelConfig(), _LAYERS, 16, torch.float32, 96 * 16 * 10 + 95) == PoolSize(10, 96)
    assert pool_size(ModelConfig(), _LAYERS, 16, torch.bfloat16, 96 * 16 * 10) == PoolSize(20, 48)


def test_settings_win_over_what_is_spare() -> None:
    config = ModelConfig(kv_cache_memory_bytes=96 * 16 * 3)
    assert pool_size(config, _LAYERS, 16, torch.float32, 10**9).num_blocks == 3
    assert pool_size(ModelConfig(num_blocks=7), _LAYERS, 16, torch.float32, 0).num_blocks == 7


def test_no_room_for_one_block_names_the_setting() -> None:
    with pytest.raises(ResourceError, match=r"one block of 16 tokens takes 0\.0 MB, .*--kv-cache-memory-bytes"):
        pool_size(ModelConfig(), _LAYERS, 16, torch.float32, 96 * 16 - 1)


def test_the_context_is_the_models_limit_cut_to_the_pool() -> None:
    pool = PoolSize(num_blocks=10, kv_bytes_per_token=96)
    assert model_len_that_fits(None, 8192, pool, 16) == 160
    assert model_len_that_fits(None, 100, pool, 16) == 100
    assert model_len_that_fits(160, 8192, pool, 16) == 160


def test_a_context_that_cannot_fit_is_refused_with_the_settings_that_would() -> None:
    pool = PoolSize(num_blocks=10, kv_bytes_per_token=96)
    with pytest.raises(ResourceError, match="--max-model-len 160 or --kv-cache-memory-bytes 16896"):
        model_len_that_fits(161, 8192, pool, 16)
    with pytest.raises(ResourceError, match=r"--max-model-len 100$"):
        model_len_that_fits(101, 100, pool, 16)


def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"the KV cache takes 1000000\.00 GB"):
        require_cpu_memory(10**15)


def test_writing_fills_the_slots_and_clears_the_rest_of_fresh_blocks_only() -> None:
    cache = KVCache(_LAYERS, 4, 4, torch.float32, _CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    layout = build_inputs(make_plan(1, [Row(0, 3, [1, 1, 1], [2, 0])]), 4, _CPU).layout
    cache.write(0, torch.ones(2, 3, 3), torch.full((2, 3, 5), 2.0), layout)
    # Slot 3 of block 2 and slots 0 and 1 of block 0; block 0 was entered and its rest cleared.
    assert cache.keys[0][2, :, 3].eq(1).all() and cache.values[0][2, :, 3].eq(2).all()
    assert cache.keys[0][0, :, :2].eq(1).all() and cache.keys[0][0, :, 2:].eq(0).all()
    assert cache.values[0][0, :, 2:].eq(0).all()
    assert cache.keys[0][2, :, :3].isnan().all() and cache.keys[0][[1, 3]].isnan().all()
    assert cache.keys[1].isnan().all()
