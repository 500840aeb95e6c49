"""Attention backends on the device: each equals the reference for every kind of layer, or says why it can't serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replica.model.attention.choice import choose_attention, device_candidates
from replica.model.attention.probe import probe
from replica.model.support import LayerShape
from tests.model.ragged import World, assert_close

_LAYER = LayerShape(num_heads=32, num_kv_heads=8, head_size=128, value_size=128)
_LAYERS = {
    "llama-8b": _LAYER,
    "many heads, small": LayerShape(9, 3, 64, 64),
    "no groups": LayerShape(12, 12, 64, 64),
    "one KV head": LayerShape(8, 1, 256, 256),
    "window": replace(_LAYER, window=100),
    "sinks": LayerShape(64, 8, 64, 64, window=128, has_sinks=True),
    "soft cap": replace(_LAYER, softcap=30.0),
    "values of another size": LayerShape(16, 16, 192, 128),
    "odd size": LayerShape(4, 2, 80, 80),
    "wide": LayerShape(8, 4, 512, 512),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", _LAYERS)
def test_ours_equals_the_reference_for_every_kind_of_layer(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    candidates = device_candidates([_LAYERS[kind]], dtype, device)
    backend = next(candidate for candidate in candidates if candidate.name == "triton").make()
    for block_size in (16, backend.block_size):
        assert probe(backend, [_LAYERS[kind]], block_size, dtype, device) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", _LAYERS)
def test_torchs_pages_are_read_rightly_or_the_line_says_why_not(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Whichever is chosen, it has passed: this shows which one it is on this machine (pytest -rs)."""
    lines: list[str] = []
    choose_attention([_LAYERS[kind]], dtype, device, lines.append)
    assert len(lines) == 1
    if not lines[0].startswith("attention: varlen"):
        pytest.skip(lines[0])


@pytest.mark.parametrize("name", ["triton", "gather"])
def test_random_ragged_steps(name: str, device: torch.device) -> None:
    layer = LayerShape(8, 2, 64, 64, window=40, has_sinks=True)
    for seed, dtype, tolerance in ((0, torch.float32, 1e-4), (1, torch.bfloat16, 4e-2)):
        candidates = device_candidates([layer], dtype, device)
        backend = next(candidate for candidate in candidates if candidate.name == name).make()
        world = World(layer, 16, seed, dtype, device)
        for _ in range(6):
            if counts := world.random_counts():
                assert_close(*world.step(backend, counts), tolerance)
