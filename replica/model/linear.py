"""Linear layers on the CPU over packed weights (`cpu_product.py`). The packed copy is beside the plain weights."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from replica.model import cpu_product

_MIN_WEIGHTS = 64 * 64


class PackedWeight:
    """Linears of the same input as one product, their outputs side by side. `hidden` is [..., in].

    Raises `ValueError` when only some have a bias.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        biases: list[Tensor] = [linear.bias.detach() for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)):
            raise ValueError("only some have a bias")
        self._num_outputs = sum(linear.out_features for linear in linears)
        self._panels = cpu_product.pack([linear.weight.detach().numpy() for linear in linears])
        self._bias = cpu_product.pack_bias(torch.cat(biases).numpy() if biases else None, self._panels)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._product(hidden, cpu_product.NOTHING)

    def plus(self, hidden: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`, which has its shape."""
        return self._product(hidden, other.reshape(-1, self._num_outputs).contiguous().numpy())

    def _product(self, hidden: Tensor, other: Any) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        out = torch.empty(len(rows), self._num_outputs)
        if len(rows):
            cpu_product.product(rows.numpy(), self._panels, self._bias, other, out.numpy())
        return out.view(*hidden.shape[:-1], self._num_outputs)


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
        return self._packed(hidden)


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
