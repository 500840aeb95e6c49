"""Decoder layers with few calls, for float32 on the CPU: matrix products and what lies between them are our own.

A layer of the common shape (norm, attention, sum, norm, gated MLP, sum) makes about 40 tensor operations as published;
here it makes two calls (`cpu_layer.py`) around attention. Which layers have that shape isn't guessed from names of
families: a layer whose parts have the usual names is rebuilt, and kept only when it gives the same numbers as the
original on a probe.

    norm; q, k, v as one product; rotation, cut into q, k, v
    attention                                                   the backend
    output product + residual; norm; silu(gate) * up; down product + residual
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from replica.model import cpu_layer, huge_pages
from replica.model.attention.interface import AttentionCall, attend, attention_step
from replica.model.huge_pages import Arena
from replica.model.linear import PackedPair, PackedWeight, can_pack
from replica.model.support import LayerShape, Probe

logger = logging.getLogger(__name__)

_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_TOLERANCE = 1e-5


class FusedLayer(nn.Module):
    """Drop-in for a decoder layer of the common shape. Raises `ValueError` when a part isn't what it should be."""

    def __init__(self, layer: nn.Module, shape: LayerShape, memory: Arena, scratch: Scratch) -> None:
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
        norms = [_norm(_part(layer, name, nn.Module)) for name in _NORMS]
        _require_fit(shape, q, k, v, o, gate, up, down)
        qkv, o = PackedWeight(memory, q, k, v), PackedWeight(memory, o)
        pair, down = PackedPair(memory, gate, up), PackedWeight(memory, down)
        self._before = (*norms[0], qkv.panels, qkv.bias)
        self._after = (o.panels, o.bias, *norms[1], pair.panels, pair.bias, down.panels, down.bias)
        self._scratch = scratch
        self._widths = o.num_outputs, qkv.num_outputs, pair.num_outputs

    def forward(
        self, hidden_states: Tensor, *_args: Any, position_embeddings: tuple[Tensor, Tensor], **_kwargs: Any
    ) -> Tensor:
        hidden = hidden_states[0].contiguous()
        attended = attend(self._before_attention(hidden, position_embeddings)).contiguous()
        return self._after_attention(attended, hidden).unsqueeze(0)

    def _before_attention(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> AttentionCall:
        shape, space = self._shape, self._scratch.of(len(hidden), self._widths, self._shape)
        cpu_layer.before_attention(
            hidden.numpy(),
            *self._before,
            *self._scratch.rotation(position_embeddings),
            space.normed,
            space.qkv,
            *space.heads,
        )
        return AttentionCall(self._index, *space.by_head, shape.scaling, shape.window)

    def _after_attention(self, attended: Tensor, hidden: Tensor) -> Tensor:
        space, out = self._scratch.of(len(hidden), self._widths, self._shape), torch.empty(hidden.shape)
        cpu_layer.after_attention(
            attended.flatten(1).numpy(), hidden.numpy(), *self._after, space.normed, space.inner, out.numpy()
        )
        return out


def _require_fit(shape: LayerShape, *linears: nn.Linear) -> None:
    """q, k, v, o, gate, up, down: compiled loops check no size. Raises `ValueError`."""
    sizes = [(linear.in_features, linear.out_features) for linear in linears]
    hidden, inner = sizes[0][0], sizes[-1][0]
    heads, kv_heads = (number * shape.head_size for number in (shape.num_heads, shape.num_kv_heads))
    outward = [(hidden, heads), (hidden, kv_heads), (hidden, kv_heads), (heads, hidden)]
    if sizes != [*outward, (hidden, inner), (hidden, inner), (inner, hidden)]:
        raise ValueError("its products don't fit each other")


def _norm(module: nn.Module) -> tuple[NDArray[np.float32], np.float32]:
    """Weight and epsilon of a root-mean-square norm; that it is one, with this epsilon, is seen by the probe."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor) or getattr(module, "bias", None) is not None:
        raise ValueError("its norm isn't the usual one")
    return weight.detach().float().contiguous().numpy(), np.float32(eps)


@dataclass(frozen=True, slots=True)
class _Space:
    """Arrays between the products of a layer, [T, ...]; `heads` and `by_head` are q, k, v, by token and by head."""

    normed: NDArray[np.float32]
    qkv: NDArray[np.float32]
    inner: NDArray[np.float32]
    heads: tuple[NDArray[np.float32], ...]
    by_head: tuple[Tensor, Tensor, Tensor]


class Scratch:
    """What all layers of a model write into one after the other: its steps are computed one at a time."""

    def __init__(self) -> None:
        self._memory: NDArray[np.float32] = huge_pages.empty(0)
        self._made_for: tuple[Any, ...] = ()
        self._space: _Space | None = None
        self._position_embeddings: tuple[Tensor, Tensor] | None = None
        self._rotation: tuple[NDArray[np.float32], ...] = ()

    def of(self, num_tokens: int, widths: tuple[int, int, int], shape: LayerShape) -> _Space:
        """`widths`: of a hidden state, of q, k and v side by side, of the MLP."""
        wanted = num_tokens, widths, shape.num_heads, shape.num_kv_heads
        if self._space is None or self._made_for != wanted:
            self._made_for, self._space = wanted, self._make(num_tokens, widths, shape)
        return self._space

    def _make(self, num_tokens: int, widths: tuple[int, int, int], shape: LayerShape) -> _Space:
        hidden, qkv, inner = widths
        sizes = [num_tokens * width for width in (hidden, qkv, inner, qkv)]
        if sum(sizes) > len(self._memory):
            self._memory = huge_pages.empty(sum(sizes))
        normed, joint, gated, cut, _ = np.split(self._memory, np.cumsum(sizes))
        kv = num_tokens * shape.num_kv_heads * shape.head_size
        heads = tuple(
            some.reshape(num_tokens, -1, shape.head_size) for some in np.split(cut, [len(cut) - 2 * kv, len(cut) - kv])
        )
        query, key, value = (torch.from_numpy(some).transpose(0, 1) for some in heads)
        return _Space(
            normed=normed.reshape(num_tokens, hidden),
            qkv=joint.reshape(num_tokens, qkv),
            inner=gated.reshape(num_tokens, inner),
            heads=heads,
            by_head=(query, key, value),
        )

    def rotation(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[NDArray[np.float32], ...]:
        """Cosines and sines [T, R]. All layers of a step are given the same ones."""
        if self._position_embeddings is not position_embeddings:
            self._position_embeddings = position_embeddings
            self._rotation = tuple(table[0].contiguous().numpy() for table in position_embeddings)
        return self._rotation


def fuse_layers(model: PreTrainedModel, shapes: list[LayerShape], probes: Sequence[Probe], memory: Arena) -> int:
    """Replace every decoder layer that has the common shape and gives the same numbers on all probes; returns how
    many."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if {part for part, _ in child.named_children()} >= _LAYER_PARTS
    ]
    calls: dict[nn.Module, list[_Call]] = {child: [] for _, _, child in places}
    for probe in probes:
        _watch(model, calls, probe)
    replaced, scratch = 0, Scratch()
    while places:  # given up one by one: what was rebuilt needs its original weights no longer
        parent, name, child = places.pop()
        fused = _fused(child, shapes, (memory, scratch), calls.pop(child, []))
        if fused is not None:
            setattr(parent, name, fused)
            replaced += 1
    return replaced


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer was given on a probe and what it made of it."""

    probe: Probe
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def _watch(model: PreTrainedModel, calls: dict[nn.Module, list[_Call]], probe: Probe) -> None:
    """Run the probe and keep what the layers among `calls` are given."""

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module].append(_Call(probe, args, kwargs, output))

    hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in calls]
    try:
        probe.run(model)
    finally:
        for hook in hooks:
            hook.remove()


def _fused(
    layer: nn.Module, shapes: list[LayerShape], space: tuple[Arena, Scratch], calls: Sequence[_Call]
) -> FusedLayer | None:
    """The layer rebuilt, or None when it isn't the common one."""
    index = getattr(getattr(layer, "self_attn", None), "layer_idx", None)
    if not isinstance(index, int) or not 0 <= index < len(shapes):
        return None
    if not calls or not all(_is_usual(call, shapes[index]) for call in calls):
        return None
    try:
        fused = FusedLayer(layer, shapes[index], *space)
        is_same = all(_gives_the_same(fused, call) for call in calls)
    except ValueError:
        return None
    except (TypeError, AttributeError, IndexError, KeyError):  # another shape in a way that nobody foresaw, or our bug
        logger.exception("layer %d stays as it is", index)
        return None
    return fused if is_same else None


def _is_usual(call: _Call, shape: LayerShape) -> bool:
    """The layer was given hidden states [1, T, H] and by name, for rotation, cosines and sines [1, T, R] of no more
    than a head has."""
    hidden, rotation = call.args[0] if call.args else None, call.kwargs.get("position_embeddings")
    if not isinstance(hidden, Tensor) or not isinstance(rotation, tuple) or len(rotation) != 2:
        return False
    if not all(isinstance(table, Tensor) and table.dtype == torch.float32 for table in (hidden, *rotation)):
        return False
    sizes = [(*hidden.shape[:2], table.shape[-1]) for table in rotation]
    fits = [tuple(table.shape) for table in rotation] == sizes and sizes[0] == sizes[1]
    return hidden.ndim == 3 and len(hidden) == 1 and fits and sizes[0][-1] <= shape.head_size


def _gives_the_same(fused: FusedLayer, call: _Call) -> bool:
    with attention_step(call.probe.step()):
        found = fused(*call.args, **call.kwargs)
    wanted = call.output
    same_kind = isinstance(wanted, Tensor) and wanted.shape == found.shape
    return same_kind and float((found - wanted).norm() / wanted.norm()) < _TOLERANCE


def _part(module: nn.Module, name: str, kind: type[nn.Module]) -> Any:
    part = getattr(module, name, None)
    if not isinstance(part, kind):
        raise ValueError(f"it has no {name}")
    return part
