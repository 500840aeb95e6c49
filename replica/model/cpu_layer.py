"""A decoder layer of the common shape on the CPU as two compiled calls, with attention between them.

Between products a core has next to nothing to do, and returning to Python costs more than that: threads fall asleep
meanwhile, and waking them takes as long as a small product.
"""

from __future__ import annotations

from typing import Any

from numba import get_num_threads

from replica.model.cpu_compiler import compiled, one_team
from replica.model.cpu_kernels import rms_norm, rotate_heads
from replica.model.cpu_product import NOTHING, ZEROS, gated_product, product


def before_attention(*arrays: Any) -> None:
    """hidden [T, H] to `query` [T, heads, D], `key`, `value` [T, kv_heads, D]: norm, product, rotation.

    (hidden, norm weight, eps, panels, bias, cos, sin, normed, qkv, query, key, value); `normed` [T, H] and `qkv`
    [T, (heads + 2 kv_heads) * D] are scratch.
    """
    with one_team:
        _before_attention(ZEROS, NOTHING, get_num_threads(), *arrays)


def after_attention(*arrays: Any) -> None:
    """out = h + down(silu(gate(n)) * up(n)), where h = hidden + o(attended) and n = norm(h).

    (attended [T, heads * D], hidden [T, H], o's panels and bias, norm weight, eps, panels and bias of gate and up by
    turns, down's panels and bias, normed, inner, out); `normed` [T, H] and `inner` [T, I] are scratch.
    """
    with one_team:
        _after_attention(ZEROS, get_num_threads(), *arrays)


@compiled(fastmath=False)
def _before_attention(
    zeros: Any, nothing: Any, threads: int, hidden: Any, norm: Any, eps: Any, panels: Any, bias: Any, cos: Any,
    sin: Any, normed: Any, qkv: Any, query: Any, key: Any, value: Any,
) -> None:  # fmt: skip
    rms_norm(hidden, norm, eps, threads, normed)
    product(normed, panels, bias, nothing, zeros, threads, qkv)
    rotate_heads(threads, qkv, cos, sin, query, key, value)


@compiled(fastmath=False)
def _after_attention(
    zeros: Any, threads: int, attended: Any, hidden: Any, o_panels: Any, o_bias: Any, norm: Any, eps: Any,
    pair_panels: Any, pair_bias: Any, down_panels: Any, down_bias: Any, normed: Any, inner: Any, out: Any,
) -> None:  # fmt: skip
    product(attended, o_panels, o_bias, hidden, zeros, threads, out)
    rms_norm(out, norm, eps, threads, normed)
    gated_product(normed, pair_panels, pair_bias, zeros, threads, inner)
    product(inner, down_panels, down_bias, out, zeros, threads, out)
