"""Any model, memory and settings: either the pool fits, or the settings that the refusal names make it fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from replica.config import ModelConfig
from replica.errors import ResourceError
from replica.model.kv_memory import PoolSize, SpareMemory, fit_pool
from replica.model.support import LayerShape

_SIZES = st.integers(1, 4)
_LAYERS = st.lists(st.builds(LayerShape, st.just(4), _SIZES, _SIZES, _SIZES), min_size=1, max_size=3)
_MEMORY = st.builds(
    lambda most, share: SpareMemory(int(most * share), most), st.integers(0, 20_000), st.floats(0, 1, width=16)
)
_SETTINGS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, num_blocks=st.integers(1, 60)),
    st.builds(dict, kv_cache_memory_bytes=st.integers(1, 20_000)),
    st.just({}),
)
_WANTED = st.none() | st.integers(1, 400)


@given(_LAYERS, st.sampled_from([1, 4, 16]), _MEMORY, _SETTINGS, _WANTED, st.integers(1, 300))
@example([LayerShape(1, 1, 1, 1)], 4, SpareMemory(31, 1000), {}, 200, 300)
@example([LayerShape(1, 1, 1, 1)], 4, SpareMemory(31, 1000), {"num_blocks": 2}, 100, 300)
def test_who_follows_a_refusal_is_served(
    layers: list[LayerShape],
    block_size: int,
    memory: SpareMemory,
    settings: dict[str, Any],
    wanted: int | None,
    model_limit: int,
) -> None:
    config = ModelConfig(max_model_len=wanted, **settings)

    def fit(config: ModelConfig) -> PoolSize:
        return fit_pool(config, layers, block_size, torch.float32, memory, model_limit)

    try:
        pool = fit(config)
    except ResourceError as error:
        ways = list(_ways(error.message))
        if not ways:
            one_block = block_size * 4 * sum(s.num_kv_heads * (s.head_size + s.value_size) for s in layers)
            assert one_block > memory.most, error.message
            return
        for way in ways:
            _follow(fit, config, way)
        return
    assert 1 <= pool.max_model_len <= model_limit
    assert pool.max_model_len == wanted or wanted is None
    assert pool.max_model_len <= pool.num_blocks * block_size
    taken = pool.num_blocks * block_size * pool.kv_bytes_per_token
    assert taken <= (memory.most if settings else memory.unasked)
    if "num_blocks" in settings:
        assert pool.num_blocks == settings["num_blocks"]


def _ways(message: str) -> Iterator[dict[str, Any]]:
    """What "set --a 1 and --b 2 or --c 3" offers: [{a: 1, b: 2}, {c: 3}]."""
    _, found, settings = message.partition("; set ")
    for way in settings.split(" or ") if found else ():
        yield {name.replace("-", "_"): int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", way)}


def _follow(fit: Callable[[ModelConfig], PoolSize], config: ModelConfig, way: dict[str, Any]) -> None:
    """A first refusal may be about the model's own limit and a second about memory: there must be no third."""
    assert way
    followed = replace(config, **way)
    try:
        fit(followed)
    except ResourceError as error:
        assert "more than the model's own limit" not in error.message
        ways = list(_ways(error.message))
        assert set(way) == {"max_model_len"} or not ways, error.message
        for again in ways:
            fit(replace(followed, **again))
