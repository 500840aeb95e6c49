"""Attention of decodes on the CPU, over the pool as it lies, by compiled loops.

A running softmax over tiles of keys that are collected from a sequence's blocks. A group of query heads shares each key
and value that is read. float32, C-contiguous; numbers that aren't finite pass through as arithmetic has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from replica.model.cpu_compiler import compiled, one_team
from replica.model.cpu_tiles import KEYS, LINE, ROWS, WIDTH, exp_all, largest, score_keys, sum_tile

_TILE = 128
"""Keys whose scores are held at once: few enough for the first-level cache."""
ZERO, ONE, NOTHING = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


def decode_attention(*arrays: Any) -> None:
    """`_decode_attention` by all threads."""
    with one_team:
        _decode_attention(*arrays)


@compiled()
def _score(
    queries: Any, line: int, keys: Any, k: int, size: int, count: int, scores: Any, held: int, lead: int,
) -> None:  # fmt: skip
    """scores[g, held + j] = queries[line + g * size:] . keys[k + j * size:], for j < count; flat arrays.

    Meanwhile as many keys at `lead` are brought into the cache: each head of the group fetches its share of them.
    """
    group, whole, vectors = len(scores), count - count % KEYS, size - size % KEYS
    flat = scores.ravel()
    share, pace = count * size // group, KEYS * KEYS // (2 * group)
    for g in range(group):
        q, row = line + g * size, scores[g]
        o, a = g * _TILE + held, lead + g * share
        score_keys(queries, q, keys, k, size, vectors, flat, o, keys, a, pace, whole)
        if vectors < size or whole < count:
            for at in range(count):
                score, first = (row[held + at], vectors) if at < whole else (ZERO, 0)
                for d in range(first, size):
                    score += queries[q + d] * keys[k + at * size + d]
                row[held + at] = score


@compiled()
def to_shares(scores: Any, s: int, count: int, scaling: Any, row: int, best: Any, weight: Any, total: Any) -> None:
    """scores[s:], `count` of them, become exp(scaling * score - best so far); what the row summed under an older best
    is scaled down to the new one. Up to KEYS - 1 more places are written to."""
    whole = (count + KEYS - 1) // KEYS * KEYS
    for at in range(s + count, s + whole):
        scores[at] = NOTHING
    highest = scaling * largest(scores, s, whole)
    if highest > best[row]:
        kept = np.exp(best[row] - highest)
        best[row] = highest
        weight[row] *= kept
        for d in range(total.shape[1]):
            total[row, d] *= kept
    weight[row] += exp_all(scores, s, whole, scaling, best[row] if best[row] > NOTHING else ZERO)


@compiled()
def _add_values(scores: Any, held: int, values: Any, v: int, count: int, total: Any, first: int, lead: int) -> None:
    """total[first + g] += sum over j < count of scores[g, held + j] * values[v + j * size:].

    `scores` are shares by now. Meanwhile as many values at `lead` are brought into the cache.
    """
    group, size = len(scores), total.shape[1]
    whole = size - size % WIDTH
    flat, totals = scores.ravel(), total.ravel()
    for g in range(0, group, ROWS):
        rows, s, t = min(ROWS, group - g), g * _TILE + held, (first + g) * size
        for column in range(0, whole, WIDTH):
            place, sums, a = v + column, t + column, lead + column // WIDTH * count * LINE
            sum_tile(
                rows, flat, s, _TILE, values, place, size, count, totals, sums, size, totals, sums, size,
                values, a, LINE,
            )  # fmt: skip
    if whole < size:
        for g in range(group):
            for at in range(count):
                share = scores[g, held + at]
                for d in range(whole, size):
                    total[first + g, d] += share * values[v + at * size + d]


@compiled()
def _attend_tile(
    queries: Any, line: int, size: int, keys: Any, values: Any, slots: Any, counts: Any, pieces: int, shift: int,
    lead: Any, lead_pieces: int, lead_shift: int, scaling: Any, scores: Any, first: int, best: Any,
    weight: Any, total: Any,
) -> None:  # fmt: skip
    """One group of heads, the rows from `first` on of `total`, and the keys of a tile, which lie in pieces: counts[i]
    of them from slot slots[i] + shift on. `lead`: those of the tile that comes next."""
    value_size, held = total.shape[1], 0
    for piece in range(pieces):
        slot, count = slots[piece] + shift, counts[piece]
        ahead = lead[piece] + lead_shift if piece < lead_pieces else slot
        _score(queries, line, keys, slot * size, size, count, scores, held, ahead * size)
        held += count
    for head in range(len(scores)):
        to_shares(scores.ravel(), head * _TILE, held, scaling, first + head, best, weight, total)
    held = 0
    for piece in range(pieces):
        slot, count = slots[piece] + shift, counts[piece]
        ahead = lead[piece] + lead_shift if piece < lead_pieces else slot
        _add_values(scores, held, values, slot * value_size, count, total, first, ahead * value_size)
        held += count


@compiled()
def _find_pieces(
    blocks: Any, table_starts: Any, last: Any, item: int, position: int, num_kv_heads: int, block_size: int, slots: Any,
    counts: Any,
) -> tuple[int, int]:  # fmt: skip
    """Of the tile of a work item from `position` on: how many pieces it has, and the position after it."""
    row, kv_head = item // num_kv_heads, item % num_kv_heads
    pieces = held = 0
    while position < last[row] and held < _TILE:
        block, place = blocks[table_starts[row] + position // block_size], position % block_size
        slots[pieces] = (block * num_kv_heads + kv_head) * block_size + place
        counts[pieces] = min(_TILE - held, last[row] - position, block_size - place)
        position, held, pieces = position + counts[pieces], held + counts[pieces], pieces + 1
    return pieces, position


@compiled()
def _begin(sinks: Any, head: int, best: Any, weight: Any, total: Any) -> None:
    """Nothing is summed yet of the heads from `head` on."""
    total[:] = ZERO
    for g in range(len(best)):
        best[g] = sinks[head + g] if len(sinks) else NOTHING
        weight[g] = ONE if len(sinks) else ZERO


@compiled()
def finish(weight: Any, total: Any, row: int, line: Any) -> None:
    """What a row summed, over the weights of all."""
    share = ONE / weight[row]
    for d in range(total.shape[1]):
        line[d] = total[row, d] * share


@compiled(parallel=True)
def _decode_attention(
    query: Any, keys: Any, values: Any, places: Any, blocks: Any, table_starts: Any, first: Any, last: Any, work: Any,
    work_starts: Any, heads: int, scaling: Any, sinks: Any, out: Any,
) -> None:  # fmt: skip
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
        scores = np.empty((group, _TILE), np.float32)
        best, weight = np.empty(heads * group, np.float32), np.empty(heads * group, np.float32)
        total = np.empty((heads * group, value_size), np.float32)
        slots, counts = np.empty((2, _TILE), np.int64), np.empty((2, _TILE), np.int64)
        at, end, turn = work_starts[part], work_starts[part + 1], 0
        pieces = position = 0
        if at < end:
            position = first[work[at] // num_kv_heads]
            pieces, position = _find_pieces(
                blocks, table_starts, last, work[at], position, num_kv_heads, block_size, slots[0], counts[0]
            )
            _begin(sinks, work[at] % num_kv_heads * group, best, weight, total)
        while at < end:
            row, head = work[at] // num_kv_heads, work[at] % num_kv_heads * group
            is_last = position >= last[row]
            after = at + 1 if is_last else at
            next_pieces = next_position = 0
            if after < end:
                next_position = first[work[after] // num_kv_heads] if is_last else position
                next_pieces, next_position = _find_pieces(
                    blocks, table_starts, last, work[after], next_position, num_kv_heads, block_size,
                    slots[1 - turn], counts[1 - turn],
                )  # fmt: skip
            for h in range(heads):
                line, here = (places[row] * num_heads + head + h * group) * size, h + 1 < heads
                lead, lead_pieces = (slots[turn], pieces) if here else (slots[1 - turn], next_pieces)
                _attend_tile(
                    queries, line, size, all_keys, all_values, slots[turn], counts[turn], pieces, h * block_size,
                    lead, lead_pieces, (h + 1) * block_size if here else 0, scaling, scores, h * group, best,
                    weight, total,
                )  # fmt: skip
            if is_last:
                for g in range(heads * group):
                    finish(weight, total, g, out[places[row], head + g])
                if after < end:
                    _begin(sinks, work[after] % num_kv_heads * group, best, weight, total)
            at, turn, pieces, position = after, 1 - turn, next_pieces, next_position
