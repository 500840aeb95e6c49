"""Prepacked matrix products: the same numbers, shared parameters, and only where they are meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from replica.model.linear import PackedLinear, PackedPair, PackedWeight, pack_linears


@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_equal_plain_ones_at_every_row_count(bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(96, 160, bias=bias).requires_grad_(False)
    packed = PackedLinear(linear)
    for rows in (1, 2, 3, 16, 17, 64, 200):
        hidden = torch.randn(1, rows, 96)
        torch.testing.assert_close(packed(hidden), linear(hidden), atol=1e-5, rtol=1e-5)
    assert packed(torch.empty(1, 0, 96)).shape == (1, 0, 160)


def test_linears_of_which_only_some_have_a_bias_are_refused() -> None:
    with pytest.raises(ValueError, match="only some have a bias"):
        PackedWeight(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    with pytest.raises(ValueError, match="only some have a bias"):
        PackedPair(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))


def test_a_pair_of_different_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        PackedPair(nn.Linear(8, 16), nn.Linear(8, 32))


def test_tied_weights_stay_tied_and_other_layers_stay_as_they_are() -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(128, 64),
            "head": nn.Linear(64, 128, bias=False),
            "small": nn.Linear(8, 8),
            "scaled": Scaled(64, 128),
            "bf16": nn.Linear(64, 128, dtype=torch.bfloat16),
        }
    ).requires_grad_(False)
    model["head"].weight = model["embed"].weight
    assert pack_linears(model) == 1
    assert isinstance(model["head"], PackedLinear)
    assert model["head"].weight is model["embed"].weight
    assert [type(model[name]) for name in ("small", "scaled", "bf16")] == [nn.Linear, Scaled, nn.Linear]
