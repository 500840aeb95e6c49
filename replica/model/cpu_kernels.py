"""Compiled loops for the CPU: what a step does between its matrix products, where a tensor operation apiece would cost
more in calls and passes over memory than in arithmetic.

All take C-contiguous float32 arrays (except where said) and write into `out`. Numbers that aren't finite pass through
as arithmetic has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from replica.model.cpu_compiler import compiled, one_team

_TILE = 128
"""Keys whose scores are held at once: few enough for the first-level cache."""
_MANY = 1 << 16
"""Numbers from which on a second thread pays for being woken."""
_PARTS = 32
"""Rows that need scratch memory are computed in so many parts."""
_LOG2E = np.float32(math.log2(math.e))
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))
_LOWEST = np.float32(-126.0)
_GATE_LIMIT = np.float32(87.0)
_ZERO, _HALF, _ONE, _NOTHING = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(-np.inf)


@compiled(inline="always")
def _exp(values: Any, powers: Any, count: int, best: Any) -> None:
    """values[:count] = exp(values - best), for differences of at most 87.

    2^x = 2^n 2^f with n the nearest whole number: the first factor is an exponent field, the second a polynomial of
    degree 7, exact to a unit in the last place. Loops over plain arithmetic, so that they run in vector registers.
    """
    ints = powers.view(np.int32)
    for at in range(count):
        power = (values[at] - best) * _LOG2E
        power = _LOWEST if power < _LOWEST else power
        whole = np.floor(power + _HALF)
        f = power - whole
        ints[at] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        values[at] = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7))))))
    for at in range(count):
        values[at] *= powers[at]


@compiled(inline="always")
def _score(query: Any, keys: Any, count: int, scaling: Any, scores: Any) -> None:
    """scores[g, k] = scaling * query[g] . key k; a key is read from memory once for its group. Both are flat."""
    group = scores.shape[0]
    size = len(query) // group
    for at in range(count):
        key = keys[at * size : (at + 1) * size]
        for head in range(group):
            line = query[head * size : (head + 1) * size]
            score = _ZERO
            for d in range(size):
                score += line[d] * key[d]
            scores[head, at] = score * scaling


@compiled(inline="always")
def _to_shares(scores: Any, count: int, powers: Any, best: Any, weight: Any, total: Any) -> None:
    """Scores become exp(score - best so far); what was summed under an older best is scaled down to the new one."""
    for head in range(scores.shape[0]):
        line = scores[head]
        highest = best[head]
        for at in range(count):
            highest = line[at] if line[at] > highest else highest
        base = highest if highest > _NOTHING else _ZERO
        kept = np.exp(best[head] - base)
        _exp(line, powers, count, base)
        added = _ZERO
        for at in range(count):
            added += line[at]
        weight[head] = weight[head] * kept + added
        best[head] = highest
        for d in range(total.shape[1]):
            total[head, d] *= kept


@compiled(inline="always")
def _add_values(scores: Any, count: int, values: Any, total: Any) -> None:
    group, size = total.shape
    for at in range(count):
        value = values[at * size : (at + 1) * size]
        for head in range(group):
            share, line = scores[head, at], total[head]
            for d in range(size):
                line[d] += share * value[d]


@compiled(parallel=True)
def _decode_attention(
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
    """Attention of rows with one token each, over the pool as it lies, with a running softmax by tile.

    `query` [T, heads, D], `keys` [num_blocks, kv_heads, block_size, D], `values` [..., Dv], `out` [T, heads, Dv]. Row r
    is token `places[r]`, sees positions first[r] <= p < last[r]; its block table is `blocks[table_starts[r]:]`. `sinks`
    [heads] or [0]. `work` holds row * kv_heads + kv_head, each once; part i, work_starts[i] <= w < work_starts[i + 1],
    is computed by one thread.
    """
    num_heads, size = query.shape[1], query.shape[2]
    num_kv_heads, block_size, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    group = num_heads // num_kv_heads
    # Flat, so that the compiler knows neighbours in memory for neighbours.
    queries, all_keys, all_values = query.ravel(), keys.ravel(), values.ravel()
    for part in prange(len(work_starts) - 1):
        scores = np.empty((group, _TILE), np.float32)
        powers = np.empty(_TILE, np.float32)
        best = np.empty(group, np.float32)
        weight = np.empty(group, np.float32)
        total = np.empty((group, value_size), np.float32)
        for at in range(work_starts[part], work_starts[part + 1]):
            row, kv_head = work[at] // num_kv_heads, work[at] % num_kv_heads
            head = kv_head * group
            line = (places[row] * num_heads + head) * size
            lines = queries[line : line + group * size]
            total[:] = _ZERO
            for g in range(group):
                best[g] = sinks[head + g] if len(sinks) else _NOTHING
                weight[g] = _ONE if len(sinks) else _ZERO
            position = first[row]
            while position < last[row]:
                block, place = blocks[table_starts[row] + position // block_size], position % block_size
                slot = (block * num_kv_heads + kv_head) * block_size + place
                count = min(_TILE, last[row] - position, block_size - place)
                _score(lines, all_keys[slot * size : (slot + count) * size], count, scaling, scores)
                _to_shares(scores, count, powers, best, weight, total)
                _add_values(scores, count, all_values[slot * value_size : (slot + count) * value_size], total)
                position += count
            for g in range(group):
                share = _ONE / weight[g]
                for d in range(value_size):
                    out[places[row], head + g, d] = total[g, d] * share


@compiled()
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
        square = _ZERO
        for at in range(size):
            square += hidden[row, at] * hidden[row, at]
        scale = _ONE / np.sqrt(square / np.float32(size) + eps)
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


def _gated(gate_up: Any, out: Any) -> None:
    """out = silu(gate) * up, where `gate_up` [T, 2 I] holds both side by side."""
    num_rows, size = out.shape
    parts = min(num_rows, _PARTS)
    for part in prange(parts):
        line, powers = np.empty(size, np.float32), np.empty(size, np.float32)
        for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
            gate, up, target = gate_up[row, :size], gate_up[row, size:], out[row]
            for at in range(size):
                line[at] = _GATE_LIMIT if -gate[at] > _GATE_LIMIT else -gate[at]
            _exp(line, powers, size, _ZERO)
            for at in range(size):
                # Below the limit nothing is left, unless the gate is no finite number: that shows.
                shown = gate[at] if gate[at] >= -_GATE_LIMIT else gate[at] * _ZERO
                target[at] = shown / (_ONE + line[at]) * up[at]


def decode_attention(*arrays: Any) -> None:
    """`_decode_attention` by all threads."""
    with one_team:
        _decode_attention(*arrays)


class _ByRow:
    """A loop over rows, by all threads when there is enough to do. The last array is written."""

    def __init__(self, loop: Callable[..., None]) -> None:
        self._alone, self._together = compiled()(loop), compiled(parallel=True)(loop)

    def __call__(self, rows: Any, *others: Any) -> None:
        if rows.size < _MANY:
            self._alone(rows, *others)
        else:
            with one_team:
                self._together(rows, *others)


rms_norm, rotate_heads, gated = _ByRow(_rms_norm), _ByRow(_rotate_heads), _ByRow(_gated)
