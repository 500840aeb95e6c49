"""Matrix products of a decode step on the CPU: oneDNN's prepacked weights where they beat the plain product.

float32, microseconds at 576 x 1536 by number of rows, plain / prepacked: 1: 214 / 245, 4: 348 / 243, 8: 455 / 274,
32: 996 / 428, 64: 843 / 628, 512: 3859 / 3939. So up to two rows stay plain; packing for 16 rows serves all others.
The packed copy doubles the memory of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_PLAIN_MAX_ROWS = 2
_PACK_ROWS = 16
_MIN_WEIGHTS = 64 * 64


class PackedLinear(nn.Module):
    """Drop-in for a float32 `nn.Linear` on the CPU, for inference. Shares the layer's parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACK_ROWS)
        self._packed: Tensor = packed

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.numel() <= _PLAIN_MAX_ROWS * self.in_features:
            return functional.linear(hidden, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return out


def can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def pack_linears(model: nn.Module) -> int:
    """Replace every packable `nn.Linear` of `model`; returns how many. Subclasses are left alone: they mean more."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight) and child.weight.numel() >= _MIN_WEIGHTS:
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced
