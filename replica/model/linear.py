"""Matrix products on the CPU: a compiled loop for few rows, oneDNN's prepacked weights for more, MKL for very many.

With up to `THIN_ROWS` rows a product is as fast as memory gives its weights: here a loop over the plain weights reaches
29 GB/s, prepacked ones 13 to 25, `nn.Linear` 14. From there on prepacking wins, two to four times over `nn.Linear`
between 4 and 32 rows. Packing for 16 rows serves all. The packed copy doubles the memory of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from replica.model import cpu_kernels

_PACK_ROWS = 16
_MIN_WEIGHTS = 64 * 64
THIN_ROWS = 4
"""Measured: steps of 1, 2, 4, 6, 8 decodes take 29, 32, 38, 47, 57 ms by the loop, 34, 36, 42, 44, 49 packed."""
THICK_ROWS = 256
"""From here on `nn.Linear` is as fast or, at 512 rows, 5 % faster."""
_NOTHING = torch.empty(0, 1)


class PackedWeight:
    """Linears of the same input as one product, their outputs side by side. `hidden` is [..., in].

    The linears' own weights become views of one tensor. Raises `ValueError` when only some have a bias.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        biases: list[Tensor] = [linear.bias.detach() for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)):
            raise ValueError("only some have a bias")
        self._bias = torch.cat(biases) if biases else None
        self._weight = _side_by_side(linears)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACK_ROWS)

    def __call__(self, hidden: Tensor) -> Tensor:
        num_rows = hidden.numel() // hidden.shape[-1]
        if num_rows <= THIN_ROWS:
            return self._thin(hidden, _NOTHING)
        if num_rows >= THICK_ROWS:
            return functional.linear(hidden, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self._bias, "none", [], "")
        return out

    def plus(self, hidden: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`, which has its shape. (Activations that oneDNN could add here are slower than ours:
        "swish" takes half as long as the product itself.)"""
        num_rows = hidden.numel() // hidden.shape[-1]
        if num_rows <= THIN_ROWS:
            return self._thin(hidden, other)
        if num_rows >= THICK_ROWS:
            return functional.linear(hidden, self._weight, self._bias).add_(other)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(hidden, other, self._packed, self._bias, "add")
        return out

    def _thin(self, hidden: Tensor, other: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        out = torch.empty(len(rows), len(self._weight))
        others = other.reshape(-1, other.shape[-1]).contiguous() if len(other) else other
        bias = _NOTHING[:, 0] if self._bias is None else self._bias
        cpu_kernels.thin_product(*(array.numpy() for array in (rows, self._weight, bias, others, out)))
        return out.view(*hidden.shape[:-1], len(self._weight))


def _side_by_side(linears: Sequence[nn.Linear]) -> Tensor:
    """Their weights as one [out, in], which they share from now on; a lone one stays where it is (maybe a mapped
    file)."""
    if len(linears) == 1:
        return linears[0].weight.detach().contiguous()
    together = torch.cat([linear.weight for linear in linears])
    first = 0
    for linear in linears:
        linear.weight = nn.Parameter(together[first : first + linear.out_features], requires_grad=False)
        first += linear.out_features
    return together


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
        return self._packed(hidden) if hidden.numel() else hidden.new_empty(*hidden.shape[:-1], self.out_features)


def can_pack(weight: Tensor) -> bool:
    """Not what only looks like a float32 matrix, as quantised weights do."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def packed_bytes(model: nn.Module) -> int:
    """What packing takes beside the plain weights, which few rows are computed from."""
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
