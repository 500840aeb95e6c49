"""Decoder layers with few calls, for float32 on the CPU: matrix products and what lies between them are our own.

A layer of the common shape (norm, attention, sum, norm, gated MLP, sum) makes about 40 tensor operations as published;
here it makes 10. Which layers have that shape isn't guessed from names of families: a layer whose parts have the usual
names is rebuilt, and kept only when it gives the same numbers as the original on a probe.

    norm                                    compiled
    q, k, v as one product                  packed weights side by side
    rotation, cut into q, k, v              compiled
    attention                               the backend
    output product + residual               packed weights; sums begin with the residual
    norm                                    compiled
    gate and up as one product              packed weights side by side
    silu(gate) * up                         compiled
    down product + residual                 as above
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replica.model import cpu_kernels
from replica.model.attention.interface import AttentionCall, attend, attention_step
from replica.model.linear import PackedWeight, can_pack
from replica.model.support import LayerShape, Probe

_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_TOLERANCE = 1e-5


class FusedLayer(nn.Module):
    """Drop-in for a decoder layer of the common shape. Raises `ValueError` when a part isn't what it should be."""

    def __init__(self, layer: nn.Module, shape: LayerShape) -> None:
        super().__init__()
        attention, mlp = _part(layer, "self_attn", nn.Module), _part(layer, "mlp", nn.Module)
        for module, names in ((layer, _LAYER_PARTS), (attention, _ATTENTION_PARTS), (mlp, _MLP_PARTS)):
            if {name for name, _ in module.named_children()} - {"rotary_emb"} != names:
                raise ValueError("its parts aren't the usual ones")
        q, k, v, o = (_part(attention, name, nn.Linear) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        gate, up, down = (_part(mlp, name, nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
        if not all(can_pack(linear.weight) for linear in (q, k, v, o, gate, up, down)):
            raise ValueError("its weights can't be packed")
        if shape.softcap is not None or shape.has_sinks or shape.head_size != shape.value_size:
            raise ValueError("its attention isn't the usual one")
        self._index = int(attention.layer_idx)
        self._shape = shape
        self._norms = tuple(_Norm(_part(layer, name, nn.Module)) for name in _NORMS)
        self._qkv, self._gate_up = PackedWeight(q, k, v), PackedWeight(gate, up)
        self._o, self._down = PackedWeight(o), PackedWeight(down)

    def forward(
        self, hidden_states: Tensor, *_args: Any, position_embeddings: tuple[Tensor, Tensor], **_kwargs: Any
    ) -> Tensor:
        hidden = hidden_states[0]
        call = self._rotated(self._qkv(self._norms[0](hidden)), *position_embeddings)
        hidden = self._o.plus(attend(call).flatten(1), hidden)
        normed = self._norms[1](hidden)
        gate_up = self._gate_up(normed)
        inner = torch.empty(len(hidden), gate_up.shape[1] // 2)
        cpu_kernels.gated(gate_up.numpy(), inner.numpy())
        return self._down.plus(inner, hidden).unsqueeze(0)

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> AttentionCall:
        shape, num_tokens = self._shape, qkv.shape[0]
        query = torch.empty(num_tokens, shape.num_heads, shape.head_size)
        key = torch.empty(num_tokens, shape.num_kv_heads, shape.head_size)
        value = torch.empty_like(key)
        arrays = (qkv, cos[0].contiguous(), sin[0].contiguous(), query, key, value)
        cpu_kernels.rotate_heads(*(array.numpy() for array in arrays))
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return AttentionCall(self._index, query, key, value, shape.scaling, shape.window)


class _Norm:
    """A root-mean-square norm; that it is one, with this epsilon, is seen by the probe."""

    def __init__(self, module: nn.Module) -> None:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not isinstance(eps, float) or not isinstance(weight, Tensor) or getattr(module, "bias", None) is not None:
            raise ValueError("its norm isn't the usual one")
        self._eps = np.float32(eps)
        self._weight = weight.detach().float().contiguous().numpy()

    def __call__(self, hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        cpu_kernels.rms_norm(hidden.numpy(), self._weight, self._eps, out.numpy())
        return out


def fuse_layers(model: PreTrainedModel, shapes: list[LayerShape], probe: Probe) -> int:
    """Replace every decoder layer that has the common shape and gives the same numbers; returns how many."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if {part for part, _ in child.named_children()} >= _LAYER_PARTS
    ]
    calls: dict[nn.Module, _Call] = {}
    hooks = [
        child.register_forward_hook(
            lambda module, args, kwargs, output: calls.__setitem__(module, _Call(args, kwargs, output)),
            with_kwargs=True,
        )
        for _, _, child in places
    ]
    try:
        probe.run(model)
    finally:
        for hook in hooks:
            hook.remove()
    replaced = 0
    for parent, name, child in places:
        fused = _fused(child, shapes, calls[child], probe)
        if fused is not None:
            setattr(parent, name, fused)
            replaced += 1
    return replaced


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer was given on the probe and what it made of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def _fused(layer: nn.Module, shapes: list[LayerShape], call: _Call, probe: Probe) -> FusedLayer | None:
    """The layer rebuilt, or None when it isn't the common one."""
    try:
        fused = FusedLayer(layer, shapes[int(_part(layer, "self_attn", nn.Module).layer_idx)])
        with attention_step(probe.step()):
            found = fused(*call.args, **call.kwargs)
    except (ValueError, TypeError, AttributeError, IndexError):
        return None
    wanted = call.output
    same_kind = isinstance(wanted, Tensor) and wanted.shape == found.shape
    return fused if same_kind and float((found - wanted).norm() / wanted.norm()) < _TOLERANCE else None


def _part(module: nn.Module, name: str, kind: type[nn.Module]) -> Any:
    part = getattr(module, name, None)
    if not isinstance(part, kind):
        raise ValueError(f"it has no {name}")
    return part
