"""Where `transformers` hands attention to us: one function under our own name, and this thread's current step.

What a layer needs beside q, k and v (block tables, the pool, lengths) doesn't travel as keyword arguments through the
model, because some architectures drop them: it is set for the calling thread while the forward runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# No mask is registered under this name, so that transformers builds none. Names with "flash", "sdpa", "/" or "paged|"
# in them would be taken for something else.
ATTENTION_NAME = "brimful"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention over all tokens of a step.

    `query` [heads, T, D], `key` [kv_heads, T, D], `value` [kv_heads, T, Dv], strides as they come. `scaling` multiplies
    the scores. `window`: position q sees p when 0 <= q - p < window (None: all before it). `softcap`: scores
    become softcap * tanh(scores / softcap). `sinks` [heads]: an extra score per head that takes weight and gives
    no value.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionStep(Protocol):
    """Computes attention for every layer of one forward. Returns [T, heads, Dv]."""

    def attend(self, call: AttentionCall) -> Tensor: ...


class _Current(threading.local):
    step: AttentionStep | None = None


_current = _Current()


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Let forwards of this thread use `step` until the block ends."""
    before = _current.step
    _current.step = step
    try:
        yield
    finally:
        _current.step = before


def attend(call: AttentionCall) -> Tensor:
    """Compute a layer's attention in the current step: [T, heads, Dv]."""
    if _current.step is None:
        raise RuntimeError("a forward with paged attention runs outside of attention_step()")
    return _current.step.attend(call)


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers. Harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' signature. Extra keywords are shared by all attention functions (dropout, position ids and such);
    one that would change the result is caught by the self-test of `support.py`, which compares logits."""
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        query=query[0],
        key=key[0],
        value=value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    # Some models take a view of it.
    return attend(call).contiguous().unsqueeze(0), None


def masked_softmax_attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention by the book, for what fused kernels lack (soft cap, sinks) and as the oracle of tests.

    `query` [..., kv_heads, group, Q, D], `key`/`value` [..., kv_heads, K, D], `mask` bool, True = sees, broadcastable
    to [..., kv_heads, group, Q, K]. Softmax in float32. Returns [..., kv_heads, group, Q, Dv].
    """
    scores = torch.matmul(query, key.unsqueeze(-3).transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().view(*query.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(value.dtype), value.unsqueeze(-3))
