"""Matrix products on the CPU with oneDNN's prepacked weights, and what oneDNN can do to their results in passing.

float32, microseconds at 576 x 1536 by number of rows, plain / prepacked: 1: 214 / 245, 4: 348 / 243, 8: 455 / 274,
32: 996 / 428, 64: 843 / 628, 512: 3859 / 3939. Packing for 16 rows serves all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PACK_ROWS = 16
_MIN_WEIGHTS = 64 * 64


class PackedWeight:
    """One weight [out, in] with its bias, packed. `hidden` is [..., in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS)
        self._bias = bias

    def __call__(self, hidden: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self._bias, "none", [], "")
        return out

    def plus(self, hidden: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`, which has its shape. (Activations that oneDNN could add here are slower than ours:
        "swish" takes half as long as the product itself.)"""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(hidden, other, self._packed, self._bias, "add")
        return out


def side_by_side(*linears: nn.Linear) -> PackedWeight:
    """Linears of the same input as one product, their outputs one after the other. Raises `ValueError` when only some
    have a bias."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise ValueError("only some have a bias")
    return PackedWeight(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None)


class PackedLinear(nn.Module):
    """Drop-in for a float32 `nn.Linear` on the CPU, for inference. Shares the layer's parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self._packed = PackedWeight(linear.weight, linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._packed(hidden) if hidden.numel() else hidden.new_empty(*hidden.shape[:-1], self.out_features)


def can_pack(weight: Tensor) -> bool:
    """Not what only looks like a float32 matrix, as quantised weights do."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def pack_linears(model: nn.Module) -> int:
    """Replace every packable `nn.Linear` of `model`; returns how many. Subclasses are left alone: they mean more."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight) and child.weight.numel() >= _MIN_WEIGHTS:
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced
