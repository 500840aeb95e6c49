"""Linear layers on the CPU over packed weights (`cpu_product.py`). The packed copy is beside the plain weights."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from replica.model import cpu_product

_MIN_WEIGHTS = 64 * 64


class PackedWeight:
    """Linears of the same input as one product, their outputs side by side.

    Raises `ValueError` when only some have a bias.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        self.num_outputs = sum(linear.out_features for linear in linears)
        self.panels = cpu_product.pack([linear.weight.detach().numpy() for linear in linears])
        biases = _biases(*linears)
        self.bias = cpu_product.pack_bias(np.concatenate(biases) if biases else None, len(self.panels))


class PackedPair:
    """A gate and what it lets through, by turns. Raises `ValueError` when only one has a bias."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        if gate.weight.shape != up.weight.shape:
            raise ValueError("they aren't of one shape")
        self.num_outputs = gate.out_features
        self.panels = cpu_product.pack_pairs(gate.weight.detach().numpy(), up.weight.detach().numpy())
        self.bias = cpu_product.pack_pair_biases(len(self.panels), *_biases(gate, up))


def _biases(*linears: nn.Linear) -> list[NDArray[np.float32]]:
    """Of all, or none."""
    biases: list[NDArray[np.float32]] = [linear.bias.detach().numpy() for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise ValueError("only some have a bias")
    return biases


class PackedLinear(nn.Module):
    """Drop-in for a float32 `nn.Linear` on the CPU, for inference. Shares the layer's parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self._packed = PackedWeight(linear)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.in_features).contiguous()
        out = torch.empty(len(rows), self.out_features)
        if len(rows):
            cpu_product.run_product(rows.numpy(), self._packed.panels, self._packed.bias, out.numpy())
        return out.view(*hidden.shape[:-1], self.out_features)


def can_pack(weight: Tensor) -> bool:
    """Not what only looks like a float32 matrix, as quantised weights do."""
    return type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.dtype == torch.float32


def packed_bytes(model: nn.Module) -> int:
    """What packing takes beside the plain weights."""
    return sum(child.weight.nbytes for child in model.modules() if _is_packable(child))


def pack_linears(model: nn.Module) -> int:
    """Replace every packable `nn.Linear` of `model`; returns how many. Subclasses are left alone: they mean more."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_packable(child):
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and can_pack(module.weight) and module.weight.numel() >= _MIN_WEIGHTS
