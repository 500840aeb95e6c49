"""Attention of decodes on the CPU, over the pool as it lies, by compiled loops.

A running softmax over tiles of keys that are collected from a sequence's blocks. A group of query heads shares each key
and value that is read. float32, C-contiguous; numbers that aren't finite pass through as arithmetic has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from replica.model.cpu_compiler import compiled, one_team
from replica.model.cpu_kernels import exp
from replica.model.cpu_tiles import KEYS, LINE, ROWS, WIDTH, score_keys, sum_tile

_TILE = 128
"""Keys whose scores are held at once: few enough for the first-level cache."""
_ZERO, _ONE, _NOTHING = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


def decode_attention(*arrays: Any) -> None:
    """`_decode_attention` by all threads."""
    with one_team:
        _decode_attention(*arrays)


@compiled()
def _score(
    queries: Any, line: int, keys: Any, k: int, size: int, count: int, scaling: Any, scores: Any, held: int,
    values: Any, v: int, value_size: int,
) -> None:  # fmt: skip
    """scores[g, held + j] = scaling * queries[line + g * size:] . keys[k + j * size:], for j < count; flat arrays.

    Meanwhile the values at v are brought into the cache: each head of the group fetches its share of them.
    """
    group, whole, vectors = len(scores), count - count % KEYS, size - size % KEYS
    flat = scores.ravel()
    share = count * value_size // group
    pace = KEYS * value_size // group * KEYS // (2 * size)
    for g in range(group):
        q, row = line + g * size, scores[g]
        o, a = g * _TILE + held, v + g * share
        score_keys(queries, q, keys, k, size, vectors, flat, o, values, a, pace, whole)
        for at in range(count):
            score, first = (row[held + at], vectors) if at < whole else (_ZERO, 0)
            for d in range(first, size):
                score += queries[q + d] * keys[k + at * size + d]
            row[held + at] = score * scaling


@compiled()
def _to_shares(scores: Any, count: int, powers: Any, best: Any, weight: Any, total: Any) -> None:
    """Scores become exp(score - best so far); what was summed under an older best is scaled down to the new one."""
    for head in range(scores.shape[0]):
        line = scores[head]
        highest = best[head]
        for at in range(count):
            highest = line[at] if line[at] > highest else highest
        base = highest if highest > _NOTHING else _ZERO
        kept = np.exp(best[head] - base)
        exp(line, powers, count, base)
        added = _ZERO
        for at in range(count):
            added += line[at]
        weight[head] = weight[head] * kept + added
        best[head] = highest
        for d in range(total.shape[1]):
            total[head, d] *= kept


@compiled()
def _add_values(scores: Any, held: int, values: Any, v: int, count: int, total: Any, keys: Any, k: int) -> None:
    """total[g] += sum over j < count of scores[g, held + j] * values[v + j * size:]; `scores` are shares by now.

    Meanwhile the keys at k are brought into the cache.
    """
    group, size = total.shape
    whole = size - size % WIDTH
    flat, totals = scores.ravel(), total.ravel()
    for g in range(0, group, ROWS):
        rows, s, t = min(ROWS, group - g), g * _TILE + held, g * size
        for column in range(0, whole, WIDTH):
            place, sums = v + column, t + column
            a = k + column // WIDTH * count * LINE
            sum_tile(
                rows, flat, s, _TILE, values, place, size, count, totals, sums, size, totals, sums, size, keys, a, LINE
            )
    for g in range(group):
        for at in range(count):
            share = scores[g, held + at]
            for d in range(whole, size):
                total[g, d] += share * values[v + at * size + d]


@compiled()
def _attend_tile(
    queries: Any, line: int, size: int, keys: Any, values: Any, slots: Any, counts: Any, to_next_head: int,
    scaling: Any, scores: Any, powers: Any, best: Any, weight: Any, total: Any,
) -> None:  # fmt: skip
    """One group of heads and the keys of a tile, which lie in pieces: counts[i] of them from slot slots[i] on."""
    value_size, held = total.shape[1], 0
    for piece in range(len(slots)):
        k, v, count = slots[piece] * size, slots[piece] * value_size, counts[piece]
        _score(queries, line, keys, k, size, count, scaling, scores, held, values, v, value_size)
        held += count
    _to_shares(scores, held, powers, best, weight, total)
    held = 0
    for piece in range(len(slots)):
        v, next_keys = slots[piece] * value_size, (slots[piece] + to_next_head) * size
        _add_values(scores, held, values, v, counts[piece], total, keys, next_keys)
        held += counts[piece]


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
    heads: int,
    scaling: Any,
    sinks: Any,
    out: Any,
) -> None:
    """Attention of rows with one token each, over the pool as it lies, with a running softmax by tile.

    `query` [T, heads, D], `keys` [num_blocks, kv_heads, block_size, D], `values` [..., Dv], `out` [T, heads, Dv]. Row r
    is token `places[r]`, sees positions first[r] <= p < last[r]; its block table is `blocks[table_starts[r]:]`. `sinks`
    [heads] or [0]. `work` holds row * kv_heads + kv_head for `heads` kv heads from there on, side by side in a block;
    part i, work_starts[i] <= w < work_starts[i + 1], is computed by one thread.
    """
    num_heads, size = query.shape[1], query.shape[2]
    num_kv_heads, block_size, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    group = num_heads // num_kv_heads
    queries, all_keys, all_values = query.ravel(), keys.ravel(), values.ravel()
    for part in prange(len(work_starts) - 1):
        scores, powers = np.empty((group, _TILE), np.float32), np.empty(_TILE, np.float32)
        best, weight = np.empty(heads * group, np.float32), np.empty(heads * group, np.float32)
        total = np.empty((heads * group, value_size), np.float32)
        slots, counts = np.empty(_TILE, np.int64), np.empty(_TILE, np.int64)
        for at in range(work_starts[part], work_starts[part + 1]):
            row, kv_head = work[at] // num_kv_heads, work[at] % num_kv_heads
            head = kv_head * group
            total[:] = _ZERO
            for g in range(heads * group):
                best[g] = sinks[head + g] if len(sinks) else _NOTHING
                weight[g] = _ONE if len(sinks) else _ZERO
            position = first[row]
            while position < last[row]:
                pieces = held = 0
                while position < last[row] and held < _TILE:
                    block, place = blocks[table_starts[row] + position // block_size], position % block_size
                    slots[pieces] = (block * num_kv_heads + kv_head) * block_size + place
                    counts[pieces] = min(_TILE - held, last[row] - position, block_size - place)
                    position, held, pieces = position + counts[pieces], held + counts[pieces], pieces + 1
                for h in range(heads):
                    line = (places[row] * num_heads + head + h * group) * size
                    ours = slice(h * group, (h + 1) * group)
                    _attend_tile(
                        queries, line, size, all_keys, all_values, slots[:pieces] + h * block_size, counts, block_size,
                        scaling, scores, powers, best[ours], weight[ours], total[ours],
                    )  # fmt: skip
            for g in range(heads * group):
                share = _ONE / weight[g]
                for d in range(value_size):
                    out[places[row], head + g, d] = total[g, d] * share
