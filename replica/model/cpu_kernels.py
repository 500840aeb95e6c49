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

_MANY = 1 << 16
"""Numbers from which on a second thread pays for being woken."""
_PARTS = 32
"""Rows that need scratch memory are computed in so many parts."""
_LOG2E = np.float32(math.log2(math.e))
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))
_LOWEST = np.float32(-126.0)
_GATE_LIMIT = np.float32(87.0)
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)


@compiled(inline="always")
def exp(values: Any, powers: Any, count: int, best: Any) -> None:
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
            exp(line, powers, size, _ZERO)
            for at in range(size):
                # Below the limit nothing is left, unless the gate is no finite number: that shows.
                shown = gate[at] if gate[at] >= -_GATE_LIMIT else gate[at] * _ZERO
                target[at] = shown / (_ONE + line[at]) * up[at]


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
