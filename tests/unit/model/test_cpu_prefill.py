"""Attention of prefill chunks by compiled loops against attention written out: sizes, windows, what isn't finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from replica.model import cpu_prefill

Array = NDArray[np.float32]
_NO_WINDOW = 1 << 40
_KV_HEADS, _BLOCK = 2, 16


class _Pool:
    """Some sequences' keys and values, over shuffled blocks; what no sequence owns is NaN."""

    def __init__(self, lengths: list[int], size: int, value_size: int) -> None:
        self.rng = np.random.default_rng(3)
        self.keys, self.values = ([self._numbers(_KV_HEADS, n, d) for n in lengths] for d in (size, value_size))
        widths = [-(-length // _BLOCK) for length in lengths]
        self.starts = np.cumsum([0, *widths[:-1]])
        self.blocks = self.rng.permutation(sum(widths) + 2)[: sum(widths)]

    def _numbers(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def cache(self, sequences: list[Array]) -> Array:
        """[num_blocks, kv_heads, block, D]"""
        found = np.full((len(self.blocks) + 2, _KV_HEADS, _BLOCK, sequences[0].shape[2]), np.nan, dtype=np.float32)
        for first, sequence in zip(self.starts, sequences, strict=True):
            for position in range(sequence.shape[1]):
                found[self.blocks[first + position // _BLOCK], :, position % _BLOCK] = sequence[:, position]
        return found

    def attend(self, query: Array, rows: list[tuple[int, int]], window: int, sinks: Array) -> Array:
        counts = np.array([count for _, count in rows])
        room = max(start + count for start, count in rows) + cpu_prefill.KEYS
        sizes = [_KV_HEADS * sequences[0].shape[2] for sequences in (self.keys, self.values)]
        out = np.full((len(query), query.shape[1], sizes[1] // _KV_HEADS), np.nan, dtype=np.float32)
        cpu_prefill.prefill_attention(
            query, self.cache(self.keys), self.cache(self.values), np.cumsum(counts) - counts,
            np.array([start for start, _ in rows]), counts, self.blocks, self.starts, window, np.float32(0.3), sinks,
            *(np.full(room * size, np.nan, dtype=np.float32) for size in sizes), out,
        )  # fmt: skip
        return out


def _by_the_book(query: Array, key: Array, value: Array, start: int, window: int, sinks: Array) -> Array:
    """One sequence: `query` [Q, heads, D], `key`, `value` [kv_heads, K, D]. Rows see only what they see."""
    group = query.shape[1] // len(key)
    out = np.empty((*query.shape[:2], value.shape[2]))
    for row in range(len(query)):
        seen = slice(max(0, start + row - window + 1), start + row + 1)
        for head in range(query.shape[1]):
            scores = 0.3 * (key[head // group, seen].astype(np.float64) @ query[row, head])
            extra = sinks[head : head + 1]
            shares = torch.softmax(torch.tensor([*scores, *extra], dtype=torch.float64), 0).numpy()
            out[row, head] = shares[: len(scores)] @ value[head // group, seen]
    return out


@pytest.mark.parametrize("window", [1, 5, 127, 129, _NO_WINDOW])
@pytest.mark.parametrize(("group", "size", "value_size"), [(3, 64, 64), (1, 20, 40), (4, 5, 33)])
def test_chunks_of_any_length_and_place_are_dense_attention(
    group: int, size: int, value_size: int, window: int
) -> None:
    """Within a tile of queries and of keys, and over several; contexts that begin before a window by whole tiles."""
    rows = [(0, 2), (0, 150), (100, 70), (300, 50), (15, 1)]
    pool = _Pool([start + count for start, count in rows], size, value_size)
    query = pool._numbers(sum(count for _, count in rows), group * _KV_HEADS, size)
    sinks = np.linspace(-1, 2, group * _KV_HEADS, dtype=np.float32) if size == 20 else np.empty(0, dtype=np.float32)
    found = pool.attend(query, rows, window, sinks)
    first = 0
    for (start, count), key, value in zip(rows, pool.keys, pool.values, strict=True):
        wanted = _by_the_book(query[first : first + count], key, value, start, window, sinks)
        np.testing.assert_allclose(found[first : first + count], wanted, atol=2e-5, rtol=1e-4)
        first += count


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize(("start", "window", "bad"), [(0, _NO_WINDOW, 4), (20, 4, 3), (20, 4, 22), (120, 9, 127)])
def test_what_is_no_number_reaches_only_those_who_see_it(what: str, start: int, window: int, bad: int) -> None:
    pool = _Pool([start + 12], 16, 16)
    (pool.keys if what == "key" else pool.values)[0][:, bad, 3] = np.nan
    found = pool.attend(pool._numbers(12, 2, 16), [(start, 12)], window, np.empty(0, dtype=np.float32))
    sees = [bad <= start + row < bad + window for row in range(12)]
    assert np.isnan(found).any(axis=(1, 2)).tolist() == sees


def test_a_query_whose_scores_are_all_minus_infinity_has_no_answer() -> None:
    pool = _Pool([3], 4, 4)
    pool.keys[0][:] = -np.inf
    found = pool.attend(np.ones((3, 2, 4), dtype=np.float32), [(0, 3)], _NO_WINDOW, np.empty(0, dtype=np.float32))
    assert np.isnan(found).all()
