"""What writing to the pool leaves behind."""

from __future__ import annotations

import psutil
import torch

from replica.model.inputs import build_inputs
from replica.model.kv_cache import KVCache
from replica.model.support import LayerShape
from tests.model.plans import Row, make_plan

_CPU = torch.device("cpu")
# 2 heads x (3 + 5) floats of 4 bytes in the first layer, 1 x (4 + 4) in the second: 96 bytes a token.
_LAYERS = [LayerShape(4, 2, 3, 5), LayerShape(4, 1, 4, 4)]


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


def test_on_the_cpu_it_is_real_memory_from_the_start_and_none_of_it_stays_after_release() -> None:
    """128 MB."""
    before = _resident_bytes()
    cache = KVCache([LayerShape(4, 2, 64, 64)] * 4, 1024, 32, torch.float32, _CPU)
    taken = _resident_bytes() - before
    assert taken > 120e6
    cache.release()
    assert _resident_bytes() - before < taken / 10


def _resident_bytes() -> int:
    size: int = psutil.Process().memory_info().rss
    return size
