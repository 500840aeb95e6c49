# ruff: noqa: N803 - Triton's convention: what is fixed when a kernel is compiled stands in capitals
"""Triton kernels over the pool of KV blocks: write a step's K and V, attend to it, merge what was split.

`attend_tiles` computes one tile: some queries of one row, all query heads of one KV head, one share of the context.
Its lines are those queries times those heads, so that grouped heads read K and V once:

    line  = query * GROUP + head of the group          TILE_Q queries a tile, TILE_M lines (a power of two, >= 16)

    for the context in steps of TILE_N positions:
        K, V        through the block table; what lies beyond the last position that any line sees is never read
        scores      scaled, capped, -inf where a line doesn't see
        best, weight, total   the running softmax (powers of two; float32)

Decodes have few lines and long contexts, so their contexts are cut into shares computed side by side (SPLIT); each
leaves its weighted mean and the logarithm of its weight, and `merge_shares` makes one of them. How long a context is,
the kernel reads from memory: a captured graph serves all.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_queries(query, tokens, heads, is_line, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    cells = tokens * NUM_HEADS + heads
    mask = is_line[:, None] & (lanes < SIZE)[None, :]
    return tl.load(query + cells[:, None] * SIZE + lanes[None, :], mask=mask, other=0.0)


@triton.jit
def _seen_positions(first_line, end, TILE_N: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """The positions [begin, end) that this program attends to: of those that some line sees, its share."""
    begin = first_line * 0
    if WINDOW > 0:
        begin = tl.maximum(first_line - WINDOW + 1, 0) // TILE_N * TILE_N
    if SPLIT:
        num_splits = tl.num_programs(2)
        num_steps = (end - begin + TILE_N - 1) // TILE_N
        share = (num_steps + num_splits - 1) // num_splits * TILE_N
        begin += tl.program_id(2) * share
        end = tl.minimum(end, begin + share)
    return begin, end


@triton.jit
def _initial(sinks, heads, is_line, TILE_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The softmax before the first position. A sink is a score that is there from the start and has no value; of the
    shares of a context the first one counts it."""
    best = tl.full([TILE_M], float("-inf"), tl.float32)
    weight = tl.full([TILE_M], 0.0, tl.float32)
    if HAS_SINKS:
        is_first = tl.program_id(2) == 0
        scores = tl.load(sinks + heads, mask=is_line, other=0.0).to(tl.float32) * LOG2_E
        best = tl.where(is_first, scores, best)
        weight = tl.where(is_first, 1.0, weight)
    return best, weight


@triton.jit
def _scores(q, k, positions, cells, end, scaling, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """In powers of two; -inf where a line doesn't see."""
    scores = tl.dot(q, k, input_precision=PRECISION) * scaling
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP)) + 1.0))
    distance = positions[:, None] - cells[None, :]
    seen = (distance >= 0) & (cells < end)[None, :]
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
    return tl.where(seen, scores * LOG2_E, float("-inf"))


@triton.jit
def _running_softmax(
    q,
    keys,
    values,
    table,
    kv_head,
    positions,
    begin,
    end,
    scaling,
    best,
    weight,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Over the positions [begin, end): the largest score, the weight, the weighted sum of values."""
    key_lanes = tl.arange(0, KEY_LANES)
    value_lanes = tl.arange(0, VALUE_LANES)
    total = tl.full([TILE_M, VALUE_LANES], 0.0, tl.float32)
    for start in range(begin, end, TILE_N):
        cells = start + tl.arange(0, TILE_N)
        is_cell = cells < end
        blocks = tl.load(table + cells // BLOCK_SIZE, mask=is_cell, other=0).to(tl.int64)
        slots = (blocks * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + cells % BLOCK_SIZE
        is_key = (key_lanes < HEAD_SIZE)[:, None] & is_cell[None, :]
        k = tl.load(keys + slots[None, :] * HEAD_SIZE + key_lanes[:, None], mask=is_key, other=0.0)
        scores = _scores(q, k, positions, cells, end, scaling, WINDOW, SOFTCAP, PRECISION)
        newest = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(newest == float("-inf"), 0.0, newest)
        shares = tl.exp2(scores - base[:, None])
        kept = tl.exp2(best - base)
        is_value = is_cell[:, None] & (value_lanes < VALUE_SIZE)[None, :]
        v = tl.load(values + slots[:, None] * VALUE_SIZE + value_lanes[None, :], mask=is_value, other=0.0)
        total = total * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        weight = weight * kept + tl.sum(shares, 1)
        best = newest
    return best, weight, total


@triton.jit(do_not_specialize=["table_width"])
def attend_tiles(
    query,
    keys,
    values,
    sinks,
    out,
    share_weight,
    tile_rows,
    tile_firsts,
    block_tables,
    context_lens,
    query_starts,
    scaling,
    table_width,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles, kv_heads, splits). `query` [T, heads, HEAD_SIZE]; `keys` [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE],
    `values` alike; `out` [T, heads, VALUE_SIZE], or with SPLIT float32 [splits, tiles, heads, VALUE_SIZE] and
    `share_weight` [splits, tiles, heads]. WINDOW and SOFTCAP: 0 for none. *_LANES: sizes as powers of two."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    row_start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - row_start
    lead = tl.load(context_lens + row) - num_queries
    lines = tl.arange(0, TILE_M)
    places, heads = first + lines // GROUP, kv_head * GROUP + lines % GROUP
    is_line = (lines < TILE_Q * GROUP) & (places < num_queries)
    tokens = (row_start + places).to(tl.int64)

    end = lead + tl.minimum(first + TILE_Q, num_queries)
    begin, end = _seen_positions(lead + first, end, TILE_N, SPLIT, WINDOW)
    q = _load_queries(query, tokens, heads, is_line, NUM_KV_HEADS * GROUP, HEAD_SIZE, KEY_LANES)
    best, weight = _initial(sinks, heads, is_line, TILE_M, HAS_SINKS)
    table = block_tables + row * table_width
    best, weight, total = _running_softmax(
        q, keys, values, table, kv_head, lead + places, begin, end, scaling, best, weight,
        NUM_KV_HEADS, HEAD_SIZE, VALUE_SIZE, KEY_LANES, VALUE_LANES, BLOCK_SIZE, TILE_M, TILE_N,
        WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip
    if SPLIT:
        cells = (tl.program_id(2) * tl.num_programs(0) + tile) * (NUM_KV_HEADS * GROUP) + heads
        _store_weight(share_weight + cells, best, weight, is_line)
    else:
        cells = tokens * (NUM_KV_HEADS * GROUP) + heads
    _store_mean(out, cells, total, weight, is_line, VALUE_SIZE, VALUE_LANES)


@triton.jit
def _store_mean(out, cells, total, weight, is_line, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Lines that saw nothing (an empty share, padding) have weight 0 and mean 0."""
    lanes = tl.arange(0, LANES)
    mean = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    mask = is_line[:, None] & (lanes < SIZE)[None, :]
    tl.store(out + cells[:, None] * SIZE + lanes[None, :], mean.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_weight(targets, best, weight, is_line):
    """The logarithm of a share's weight; -inf when it saw nothing. NaN leaves its mark on the mean, not here."""
    has_weight = weight > 0.0
    logs = best + tl.log2(tl.where(has_weight, weight, 1.0))
    tl.store(targets, tl.where(has_weight | (weight != weight), logs, float("-inf")), mask=is_line)


@triton.jit(do_not_specialize=["num_splits"])
def merge_shares(
    share_out,
    share_weight,
    out,
    tile_rows,
    query_starts,
    num_splits,
    VALUE_SIZE: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Grid (tiles, heads): the shares of one token and head, each with its weight, as one mean."""
    tile, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    splits = tl.arange(0, MAX_SPLITS)
    lanes = tl.arange(0, VALUE_LANES)
    is_split = splits < num_splits
    cells = (splits * tl.num_programs(0) + tile) * num_heads + head
    logs = tl.load(share_weight + cells, mask=is_split, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    is_value = is_split[:, None] & (lanes < VALUE_SIZE)[None, :]
    shares = tl.load(share_out + cells[:, None] * VALUE_SIZE + lanes[None, :], mask=is_value, other=0.0)
    mean = tl.sum(shares * weights[:, None], 0) / tl.sum(weights, 0)
    token = tl.load(query_starts + tl.load(tile_rows + tile)).to(tl.int64)
    target = out + (token * num_heads + head) * VALUE_SIZE + lanes
    tl.store(target, mean.to(out.dtype.element_ty), mask=lanes < VALUE_SIZE)


@triton.jit
def write_slots(
    key,
    value,
    keys,
    values,
    slot_blocks,
    slot_places,
    clears,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
):
    """Grid (T, kv_heads): one token's K and V, `key` [T, kv_heads, HEAD_SIZE] and `value` alike, into its slot. With
    `clears` what follows in the block becomes zero."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(slot_places + token)
    first_slot = (tl.load(slot_blocks + token) * tl.num_programs(1) + head) * BLOCK_SIZE
    source = token * tl.num_programs(1) + head
    key_lanes = tl.arange(0, KEY_LANES)
    value_lanes = tl.arange(0, VALUE_LANES)
    is_key = key_lanes < HEAD_SIZE
    is_value = value_lanes < VALUE_SIZE
    k = tl.load(key + source * HEAD_SIZE + key_lanes, mask=is_key, other=0.0)
    v = tl.load(value + source * VALUE_SIZE + value_lanes, mask=is_value, other=0.0)
    key_target = keys + first_slot * HEAD_SIZE + key_lanes
    value_target = values + first_slot * VALUE_SIZE + value_lanes
    tl.store(key_target + place * HEAD_SIZE, k.to(keys.dtype.element_ty), mask=is_key)
    tl.store(value_target + place * VALUE_SIZE, v.to(values.dtype.element_ty), mask=is_value)
    if tl.load(clears + token) != 0:
        no_key = tl.full([KEY_LANES], 0.0, keys.dtype.element_ty)
        no_value = tl.full([VALUE_LANES], 0.0, values.dtype.element_ty)
        for later in range(place + 1, BLOCK_SIZE):
            tl.store(key_target + later * HEAD_SIZE, no_key, mask=is_key)
            tl.store(value_target + later * VALUE_SIZE, no_value, mask=is_value)
