"""Compiled loops for the CPU: what a step does between its matrix products, where a tensor operation apiece would cost
more in calls and passes over memory than in arithmetic.

All take C-contiguous float32 arrays (except where said) and write into `out`, by all threads where there is enough to
do. Numbers that aren't finite pass through as arithmetic has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import get_num_threads, prange

from replica.model.cpu_compiler import compiled, one_team
from replica.model.cpu_tiles import exp_all

_MANY = 1 << 16
"""Numbers from which on a second thread pays for being woken."""
_MANY_SLOTS = 16
"""The same of slots, which lie anywhere: each is waited for."""
_GATE_LIMIT = np.float32(87.0)
_ZERO, _ONE, _MINUS_ONE = np.float32(0.0), np.float32(1.0), np.float32(-1.0)


@compiled()
def silu_times(count: int, gate: Any, up: Any, line: Any) -> None:
    """gate[:count] = silu(gate) * up. `line` is scratch of that length; `count` is a multiple of KEYS."""
    for at in range(count):
        line[at] = gate[at]
    exp_all(line, 0, count, _MINUS_ONE, _ZERO)
    for at in range(count):
        # Below the limit nothing is left, unless the gate is no finite number: that shows.
        shown = gate[at] if gate[at] >= -_GATE_LIMIT else gate[at] * _ZERO
        gate[at] = shown / (_ONE + line[at]) * up[at]


@compiled()
def _write_some(keys: Any, values: Any, key: Any, value: Any, blocks: Any, places: Any, first: int, end: int) -> None:
    for token in range(first, end):
        block, place = blocks[token], places[token]
        for head in range(key.shape[1]):
            for d in range(key.shape[2]):
                keys[block, head, place, d] = key[token, head, d]
            for d in range(value.shape[2]):
                values[block, head, place, d] = value[token, head, d]


@compiled(parallel=True)
def _write_by_all(keys: Any, values: Any, key: Any, value: Any, blocks: Any, places: Any, parts: int) -> None:
    for part in prange(parts):
        first, end = len(key) * part // parts, len(key) * (part + 1) // parts
        _write_some(keys, values, key, value, blocks, places, first, end)


@compiled()
def _write_slots(threads: int, keys: Any, values: Any, key: Any, value: Any, blocks: Any, places: Any) -> None:
    if len(key) < _MANY_SLOTS:
        _write_some(keys, values, key, value, blocks, places, 0, len(key))
    else:
        _write_by_all(keys, values, key, value, blocks, places, threads)


def write_slots(*arrays: Any) -> None:
    """keys[blocks[t], :, places[t]] = key[t] and values alike; `key` [T, kv_heads, D], `value` [T, kv_heads, Dv]."""
    with one_team:
        _write_slots(get_num_threads(), *arrays)


@compiled()
def _norm_some(hidden: Any, weight: Any, eps: Any, out: Any, first: int, end: int) -> None:
    size = hidden.shape[1]
    for row in range(first, end):
        square = _ZERO
        for at in range(size):
            square += hidden[row, at] * hidden[row, at]
        scale = _ONE / np.sqrt(square / np.float32(size) + eps)
        for at in range(size):
            out[row, at] = weight[at] * (hidden[row, at] * scale)


@compiled(parallel=True)
def _norm_by_all(hidden: Any, weight: Any, eps: Any, out: Any, parts: int) -> None:
    for part in prange(parts):
        _norm_some(hidden, weight, eps, out, len(hidden) * part // parts, len(hidden) * (part + 1) // parts)


@compiled()
def rms_norm(hidden: Any, weight: Any, eps: Any, threads: int, out: Any) -> None:
    """out = hidden / sqrt(mean(hidden^2) + eps) * weight, by row; [T, H]."""
    if hidden.size < _MANY:
        _norm_some(hidden, weight, eps, out, 0, len(hidden))
    else:
        _norm_by_all(hidden, weight, eps, out, threads)


@compiled()
def _rotate_some(qkv: Any, cos: Any, sin: Any, query: Any, key: Any, value: Any, first: int, end: int) -> None:
    num_heads, num_kv_heads, size = query.shape[1], key.shape[1], query.shape[2]
    rotated = cos.shape[1]
    half = rotated // 2
    for row in range(first, end):
        for head in range(num_heads + num_kv_heads):
            source = qkv[row, head * size : (head + 1) * size]
            target = query[row, head] if head < num_heads else key[row, head - num_heads]
            for at in range(half):
                target[at] = source[at] * cos[row, at] - source[half + at] * sin[row, at]
            for at in range(half):
                target[half + at] = source[half + at] * cos[row, half + at] + source[at] * sin[row, half + at]
            for at in range(rotated, size):
                target[at] = source[at]
        values = (num_heads + num_kv_heads) * size
        for head in range(num_kv_heads):
            for at in range(size):
                value[row, head, at] = qkv[row, values + head * size + at]


@compiled(parallel=True)
def _rotate_by_all(qkv: Any, cos: Any, sin: Any, query: Any, key: Any, value: Any, parts: int) -> None:
    for part in prange(parts):
        first, end = len(qkv) * part // parts, len(qkv) * (part + 1) // parts
        _rotate_some(qkv, cos, sin, query, key, value, first, end)


@compiled()
def rotate_heads(threads: int, qkv: Any, cos: Any, sin: Any, query: Any, key: Any, value: Any) -> None:
    """Cut `qkv` [T, (heads + 2 kv_heads) * D] into `query` [T, heads, D], `key`, `value` [T, kv_heads, D]; rotate the
    first R numbers of every query and key head, as halves, by `cos`, `sin` [T, R]."""
    if qkv.size < _MANY:
        _rotate_some(qkv, cos, sin, query, key, value, 0, len(qkv))
    else:
        _rotate_by_all(qkv, cos, sin, query, key, value, threads)
