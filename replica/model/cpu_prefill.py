"""Attention of prefill chunks on the CPU by compiled loops: tiles of queries against tiles of keys, a running softmax.

A chunk's context is collected from its blocks once a layer, keys turned so that both products are the tiles of
`cpu_tiles.py`. Of a tile of keys only those are scored that some query of the tile sees.

    for each head and tile of QUERIES queries (shared out to threads):
        for each tile of KEYS keys that one of them sees:
            scores = queries * keys            ROWS queries x WIDTH keys in registers
            scores become shares of a running softmax
            total += shares * values           ROWS queries x WIDTH numbers in registers
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import get_num_threads, prange

from replica.model.cpu_attention import NOTHING, ONE, ZERO, finish, to_shares
from replica.model.cpu_compiler import compiled, one_team
from replica.model.cpu_product import ZEROS
from replica.model.cpu_tiles import KEYS as LANES
from replica.model.cpu_tiles import ROWS, WIDTH, sum_tile

QUERIES = 48
KEYS = 128
"""In a tile; whole tiles of ROWS and WIDTH."""


def prefill_attention(*arrays: Any) -> None:
    """`_prefill_attention` by all threads."""
    with one_team:
        _prefill_attention(ZEROS, get_num_threads(), *arrays)


@compiled()
def _collect(cache: Any, table: Any, kv_head: int, first: int, end: int, turned: bool, target: Any, t: int) -> None:
    """Positions first <= p < end of a head, `first` a multiple of WIDTH: as they are, or turned, [.., D, WIDTH]."""
    block_size, size = cache.shape[2], cache.shape[3]
    for position in range(first, end):
        line = cache[table[position // block_size], kv_head, position % block_size]
        if turned:
            at = t + (position - first) // WIDTH * WIDTH * size + (position - first) % WIDTH
            for d in range(size):
                target[at + d * WIDTH] = line[d]
        else:
            at = t + (position - first) * size
            for d in range(size):
                target[at + d] = line[d]


@compiled()
def _score(
    queries: Any, q: int, ldq: int, num_queries: int, position: int, panels: Any, p: int, size: int, key: int,
    held: int, zeros: Any, scores: Any,
) -> None:  # fmt: skip
    """scores[r * KEYS + j] of the tile's keys, for all that row r or one of the rows computed with it sees."""
    for column in range(0, held, WIDTH):
        panel = p + column * size
        for r in range(0, num_queries, ROWS):
            rows = min(ROWS, num_queries - r)
            if position + r + rows > key + column:
                sum_tile(
                    rows, queries, q + r * ldq, ldq, panels, panel, WIDTH, size, zeros, 0, 0,
                    scores, r * KEYS + column, KEYS, panels, panel, 0,
                )  # fmt: skip


@compiled()
def _seen(position: int, window: int, key: int, held: int) -> tuple[int, int]:
    """Which of a tile's keys, from position `key` on, the query at `position` sees: first and end."""
    end = max(0, min(held, position + 1 - key))
    return min(max(position - window + 1 - key, 0), end), end


@compiled()
def _add_values(
    scores: Any, num_queries: int, position: int, window: int, values: Any, v: int, key: int, held: int, total: Any
) -> None:
    """total[r] += sum over the keys j that row r sees of scores[r, j] * values[j]; `scores` are shares by now.

    Rows together take what all of them see, then each the rest by itself: what is no number in a key that a row doesn't
    see must not reach it, as it would by a share of 0.
    """
    value_size = total.shape[1]
    whole, totals, flat = value_size - value_size % WIDTH, total.ravel(), scores.ravel()
    for r in range(0, num_queries, ROWS):
        rows = min(ROWS, num_queries - r)
        first = _seen(position + r + rows - 1, window, key, held)[0]
        end = max(_seen(position + r, window, key, held)[1], first)
        _add_piece(flat, r, rows, first, end, values, v, value_size, whole, totals)
        for row in range(r, r + rows):
            own_first, own_end = _seen(position + row, window, key, held)
            if end < held or first > 0:
                _add_piece(flat, row, 1, own_first, min(first, own_end), values, v, value_size, whole, totals)
                _add_piece(flat, row, 1, max(end, own_first), own_end, values, v, value_size, whole, totals)
            for at in range(own_first, own_end if whole < value_size else own_first):
                for d in range(whole, value_size):
                    total[row, d] += scores[row, at] * values[v + at * value_size + d]


@compiled()
def _add_piece(
    scores: Any, r: int, rows: int, first: int, end: int, values: Any, v: int, value_size: int, whole: int, totals: Any
) -> None:
    """The keys first <= j < end, to `rows` rows from r on."""
    if first < end:
        s, place = r * KEYS + first, v + first * value_size
        for column in range(0, whole, WIDTH):
            sums = r * value_size + column
            sum_tile(
                rows, scores, s, KEYS, values, place + column, value_size, end - first, totals, sums, value_size,
                totals, sums, value_size, values, place, 0,
            )  # fmt: skip


@compiled()
def _attend_tile(
    queries: Any, q: int, ldq: int, num_queries: int, position: int, panels: Any, p: int, values: Any, v: int,
    origin: int, window: int, size: int, scaling: Any, zeros: Any, scores: Any, best: Any, weight: Any, total: Any,
) -> None:  # fmt: skip
    """Queries at `position` and after it, to the keys that they see; those lie from position `origin` on."""
    value_size, end, flat = total.shape[1], position + num_queries, scores.ravel()
    first = max(origin, (position - window + 1) // KEYS * KEYS)
    for key in range(first, end, KEYS):
        held = min(KEYS, end - key)
        _score(queries, q, ldq, num_queries, position, panels, p + (key - origin) * size, size, key, held, zeros, flat)
        for r in range(num_queries):
            own_first, own_end = _seen(position + r, window, key, held)
            if own_first < own_end:
                # From a whole vector on, so that what is written beyond the end is the row's own.
                whole = own_first // LANES * LANES
                for at in range(r * KEYS + whole, r * KEYS + own_first):
                    flat[at] = NOTHING
                to_shares(flat, r * KEYS + whole, own_end - whole, scaling, r, best, weight, total)
        place = v + (key - origin) * value_size
        _add_values(scores, num_queries, position, window, values, place, key, held, total)


@compiled(parallel=True)
def _collect_all(
    keys: Any, values: Any, table: Any, origin: int, end: int, parts: int, panels: Any, lines: Any
) -> None:
    """All kv heads of a sequence, [kv_heads, ...] side by side."""
    num_kv_heads, size, value_size = keys.shape[1], keys.shape[3], values.shape[3]
    pieces = (end - origin + KEYS - 1) // KEYS
    room = pieces * KEYS
    for part in prange(parts):
        for work in range(num_kv_heads * pieces * part // parts, num_kv_heads * pieces * (part + 1) // parts):
            kv_head, piece = work // pieces, work % pieces
            first = origin + piece * KEYS
            last, at = min(first + KEYS, end), kv_head * room + piece * KEYS
            _collect(keys, table, kv_head, first, last, True, panels, at * size)
            _collect(values, table, kv_head, first, last, False, lines, at * value_size)


@compiled(parallel=True)
def _attend_chunk(
    query: Any, place: int, num_queries: int, start: int, panels: Any, lines: Any, num_kv_heads: int, origin: int,
    window: int, scaling: Any, sinks: Any, parts: int, zeros: Any, out: Any,
) -> None:  # fmt: skip
    """One sequence's queries, from token `place` of the step and position `start` on."""
    num_heads, size, value_size = query.shape[1], query.shape[2], out.shape[2]
    queries = query.ravel()
    num_tiles, room = (num_queries + QUERIES - 1) // QUERIES, (start + num_queries - origin + KEYS - 1) // KEYS * KEYS
    for part in prange(parts):
        scores = np.empty((QUERIES, KEYS), np.float32)
        best, weight = np.empty(QUERIES, np.float32), np.empty(QUERIES, np.float32)
        total = np.empty((QUERIES, value_size), np.float32)
        for work in range(num_heads * num_tiles):
            # Dealt out from the longest, to and fro.
            turn = work % (2 * parts)
            if min(turn, 2 * parts - 1 - turn) != part:
                continue
            tile, head = num_tiles - 1 - work // num_heads, work % num_heads
            first, end = num_queries * tile // num_tiles, num_queries * (tile + 1) // num_tiles
            kv_head = head // (num_heads // num_kv_heads)
            best[:] = sinks[head] if len(sinks) else NOTHING
            weight[:] = ONE if len(sinks) else ZERO
            total[:] = ZERO
            _attend_tile(
                queries, ((place + first) * num_heads + head) * size, num_heads * size, end - first, start + first,
                panels, kv_head * room * size, lines, kv_head * room * value_size, origin, window, size, scaling, zeros,
                scores, best, weight, total,
            )  # fmt: skip
            for r in range(end - first):
                finish(weight, total, r, out[place + first + r, head])


@compiled()
def _prefill_attention(
    zeros: Any, threads: int, query: Any, keys: Any, values: Any, places: Any, starts: Any, counts: Any, blocks: Any,
    table_starts: Any, window: int, scaling: Any, sinks: Any, panels: Any, lines: Any, out: Any,
) -> None:  # fmt: skip
    """Attention of rows with several tokens, whose keys and values are in the pool already.

    `query` [T, heads, D], `keys` [num_blocks, kv_heads, block_size, D], `values` [..., Dv], `out` [T, heads, Dv]. Row r
    is counts[r] tokens from `places[r]` on, at positions starts[r] and after it; its block table is
    `blocks[table_starts[r]:]`. Position q sees p when 0 <= q - p < window. `sinks` [heads] or [0]. Scratch: `panels`
    kv_heads * D and `lines` kv_heads * Dv times the longest context, rounded up to whole KEYS.
    """
    for row in range(len(places)):
        start, end = starts[row], starts[row] + counts[row]
        origin = max(0, start - window + 1) // KEYS * KEYS
        _collect_all(keys, values, blocks[table_starts[row] :], origin, end, threads, panels, lines)
        _attend_chunk(
            query, places[row], counts[row], start, panels, lines, keys.shape[1], origin, window, scaling, sinks,
            threads, zeros, out,
        )  # fmt: skip
