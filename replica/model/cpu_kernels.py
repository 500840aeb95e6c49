"""Compiled loops for the CPU: what a step does between its matrix products, where a tensor operation apiece would cost
more in calls and passes over memory than in arithmetic.

All take C-contiguous float32 arrays (except where said) and write into `out`. Non-finite numbers pass through as
arithmetic has it: fast-math is limited to reordering sums. Compiled on first use, kept in the package's cache folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit, prange

_TILE = 128
"""Keys whose scores are held at once: few enough for the first-level cache."""
_LOG2E = np.float32(math.log2(math.e))
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))
_LOWEST = np.float32(-126.0)
_HALF = np.float32(0.5)

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def _compiled(**options: Any) -> Callable[[_Loop], _Loop]:
    """Nothing is compiled before the first call."""
    fast = {"reassoc", "contract", "arcp", "nsz"}
    compiled: Callable[[_Loop], _Loop] = njit(fastmath=fast, cache=True, nogil=True, error_model="numpy", **options)
    return compiled


@_compiled(inline="always")
def _exp_differences(scores: Any, powers: Any, ints: Any, count: int, best: Any) -> Any:
    """scores[:count] = exp(scores - best), all <= 1; returns their sum. `ints` is `powers` seen as int32.

    2^x = 2^n 2^f with n the nearest whole number: the first factor is an exponent field, the second a polynomial of
    degree 7, exact to a unit in the last place. A loop over plain arithmetic, so that it runs in vector registers.
    """
    for at in range(count):
        power = (scores[at] - best) * _LOG2E
        power = _LOWEST if power < _LOWEST else power
        whole = np.floor(power + _HALF)
        f = power - whole
        ints[at] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        scores[at] = np.float32(1.0) + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7))))))
    total = np.float32(0.0)
    for at in range(count):
        scores[at] *= powers[at]
        total += scores[at]
    return total


@_compiled(inline="always")
def _score(query: Any, keys: Any, scaling: Any, scores: Any) -> None:
    """scores[g, k] = scaling * query[g] . keys[k]; a key is read once for all its query heads."""
    for at in range(keys.shape[0]):
        for head in range(query.shape[0]):
            score = np.float32(0.0)
            for d in range(query.shape[1]):
                score += query[head, d] * keys[at, d]
            scores[head, at] = score * scaling


@_compiled(inline="always")
def _to_shares(scores: Any, count: int, powers: Any, best: Any, weight: Any, out: Any) -> None:
    """Scores become exp(score - best so far); what was summed under an older best is scaled down to the new one."""
    ints = powers.view(np.int32)
    for head in range(scores.shape[0]):
        highest = best[head]
        for at in range(count):
            highest = scores[head, at] if scores[head, at] > highest else highest
        base = highest if highest > np.float32(-np.inf) else np.float32(0.0)
        kept = np.exp(best[head] - base)
        weight[head] = weight[head] * kept + _exp_differences(scores[head], powers, ints, count, base)
        best[head] = highest
        for d in range(out.shape[1]):
            out[head, d] *= kept


@_compiled(inline="always")
def _add_values(scores: Any, values: Any, out: Any) -> None:
    for at in range(values.shape[0]):
        for head in range(out.shape[0]):
            share = scores[head, at]
            for d in range(out.shape[1]):
                out[head, d] += share * values[at, d]


@_compiled(inline="always")
def _decode_one(
    query: Any, keys: Any, values: Any, blocks: Any, first: int, last: int, scaling: Any, sinks: Any, out: Any
) -> None:
    """The queries [G, D] of one KV head over its keys at positions first <= p < last, with a running softmax by tile.

    `keys` [blocks, block_size, D] and `values` [blocks, block_size, Dv] are those of this head (strided by block).
    """
    num_heads, block_size = query.shape[0], keys.shape[1]
    scores = np.empty((num_heads, _TILE), np.float32)
    powers = np.empty(_TILE, np.float32)
    best = np.full(num_heads, np.float32(-np.inf))
    weight = np.zeros(num_heads, np.float32)
    out[:] = np.float32(0.0)
    if sinks.shape[0]:
        best[:] = sinks
        weight[:] = np.float32(1.0)
    position = first
    while position < last:
        block, place = blocks[position // block_size], position % block_size
        count = min(_TILE, last - position, block_size - place)
        _score(query, keys[block, place : place + count], scaling, scores)
        _to_shares(scores, count, powers, best, weight, out)
        _add_values(scores, values[block, place : place + count], out)
        position += count
    for head in range(num_heads):
        share = np.float32(1.0) / weight[head]
        for d in range(out.shape[1]):
            out[head, d] *= share


@_compiled(parallel=True)
def decode_attention(
    query: Any,
    keys: Any,
    values: Any,
    places: Any,
    blocks: Any,
    table_starts: Any,
    first: Any,
    last: Any,
    work: Any,
    work_starts: Any,
    scaling: Any,
    sinks: Any,
    out: Any,
) -> None:
    """Attention of rows with one token each, over the pool as it lies.

    `query` [T, heads, D], `keys` [num_blocks, kv_heads, block_size, D], `values` [..., Dv], `out` [T, heads, Dv]. Row r
    is token `places[r]`, sees positions first[r] <= p < last[r]; its block table is `blocks[table_starts[r]:]`. `sinks`
    [heads] or [0]. `work` holds row * kv_heads + kv_head, each once; part i, work_starts[i] <= w < work_starts[i + 1],
    is computed by one thread.
    """
    num_kv_heads = keys.shape[1]
    group = query.shape[1] // num_kv_heads
    for part in prange(len(work_starts) - 1):
        for at in range(work_starts[part], work_starts[part + 1]):
            row, kv_head = work[at] // num_kv_heads, work[at] % num_kv_heads
            heads = slice(kv_head * group, (kv_head + 1) * group)
            _decode_one(
                query[places[row], heads],
                keys[:, kv_head],
                values[:, kv_head],
                blocks[table_starts[row] :],
                first[row],
                last[row],
                scaling,
                sinks[heads],
                out[places[row], heads],
            )


@_compiled()
def write_slots(cache: Any, new: Any, slot_blocks: Any, slot_places: Any) -> None:
    """cache[slot_blocks[t], :, slot_places[t]] = new[t]; `new` [T, kv_heads, D]."""
    for token in range(new.shape[0]):
        block, place = slot_blocks[token], slot_places[token]
        for head in range(new.shape[1]):
            for d in range(new.shape[2]):
                cache[block, head, place, d] = new[token, head, d]


def _rms_norm(hidden: Any, weight: Any, eps: Any, out: Any) -> None:
    """out = hidden / sqrt(mean(hidden^2) + eps) * weight, by row; [T, H]."""
    size = hidden.shape[1]
    for row in prange(hidden.shape[0]):
        square = np.float32(0.0)
        for at in range(size):
            square += hidden[row, at] * hidden[row, at]
        scale = np.float32(1.0) / np.sqrt(square / np.float32(size) + eps)
        for at in range(size):
            out[row, at] = weight[at] * (hidden[row, at] * scale)


def _rotate_heads(qkv: Any, cos: Any, sin: Any, query: Any, key: Any, value: Any) -> None:
    """Cut `qkv` [T, (heads + 2 kv_heads) * D] into `query` [T, heads, D], `key`, `value` [T, kv_heads, D]; rotate the
    first R numbers of every query and key head, as halves, by `cos`, `sin` [T, R]."""
    num_heads, num_kv_heads, size = query.shape[1], key.shape[1], query.shape[2]
    rotated = cos.shape[1]
    half = rotated // 2
    for row in prange(qkv.shape[0]):
        for head in range(num_heads + num_kv_heads):
            source = qkv[row, head * size : (head + 1) * size]
            target = query[row, head] if head < num_heads else key[row, head - num_heads]
            for at in range(half):
                target[at] = source[at] * cos[row, at] - source[half + at] * sin[row, at]
            for at in range(half):
                target[half + at] = source[half + at] * cos[row, half + at] + source[at] * sin[row, half + at]
            for at in range(rotated, size):
                target[at] = source[at]
        first = (num_heads + num_kv_heads) * size
        for head in range(num_kv_heads):
            for at in range(size):
                value[row, head, at] = qkv[row, first + head * size + at]


rms_norm = _compiled()(_rms_norm)
rotate_heads = _compiled()(_rotate_heads)
rms_norm_threaded = _compiled(parallel=True)(_rms_norm)
rotate_heads_threaded = _compiled(parallel=True)(_rotate_heads)
