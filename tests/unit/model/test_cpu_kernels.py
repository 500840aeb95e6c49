"""Compiled loops give what tensor operations give, for few rows and many, and hide nothing that isn't finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from replica.model import cpu_attention, cpu_kernels
from replica.model.cpu_tiles import KEYS

_ROWS = (1, 3, 700)  # the last by all threads


@pytest.mark.parametrize("rows", _ROWS)
def test_the_norm_is_the_root_mean_square_norm(rows: int) -> None:
    torch.manual_seed(1)
    hidden, weight, found = torch.randn(rows, 96) * 30, torch.randn(96), torch.empty(rows, 96)
    cpu_kernels.rms_norm(hidden.numpy(), weight.numpy(), np.float32(1e-5), 2, found.numpy())
    torch.testing.assert_close(found, functional.rms_norm(hidden, (96,), weight, 1e-5), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("rows", _ROWS)
def test_the_gate_is_silu_times_up(rows: int) -> None:
    torch.manual_seed(2)
    gate, up = torch.randn(rows) * 10, torch.randn(rows) * 10
    found = _gated(gate, up)
    torch.testing.assert_close(found, functional.silu(gate) * up, atol=1e-6, rtol=2e-6)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """Whole vectors are computed."""
    whole = functional.pad(torch.stack([gate, up]), (0, -len(gate) % KEYS))
    line = np.empty(whole.shape[1], dtype=np.float32)
    cpu_kernels.silu_times(len(line), whole[0].numpy(), whole[1].numpy(), line)
    return whole[0, : len(gate)]


@given(gate=st.floats(width=32), up=st.floats(width=32))
@settings(max_examples=300)
def test_a_gate_of_any_number_is_what_silu_makes_of_it(gate: float, up: float) -> None:
    found = _gated(torch.tensor([gate]), torch.tensor([up]))
    # The activation may be off by a millionth of itself or, where next to nothing is left of it, by 1e-36.
    activation = functional.silu(torch.tensor(gate)).item()
    wanted = activation * up
    tolerance = (1e-6 * abs(activation) + 1e-36) * abs(up) + 1e-37
    if np.isfinite(wanted) and np.isfinite(tolerance) and abs(wanted) < 3e38:
        assert abs(found.item() - wanted) <= tolerance
    else:
        assert not abs(found.item()) < 1e38


@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("rotated", [16, 8])
def test_heads_are_cut_apart_and_rotated_by_halves(rows: int, rotated: int) -> None:
    torch.manual_seed(3)
    num_heads, num_kv_heads, size = 4, 2, 16
    qkv, cos, sin = torch.randn(rows, 8 * size), torch.randn(rows, rotated), torch.randn(rows, rotated)
    query, key, value = (torch.empty(rows, heads, size) for heads in (num_heads, num_kv_heads, num_kv_heads))
    arrays = [array.numpy() for array in (qkv, cos, sin, query, key, value)]
    cpu_kernels.rotate_heads(2, *arrays)
    heads = qkv.view(rows, 8, size)
    torch.testing.assert_close(query, _rotate(heads[:, :4], cos, sin), atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(key, _rotate(heads[:, 4:6], cos, sin), atol=1e-6, rtol=2e-6)
    assert torch.equal(value, heads[:, 6:])


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the book: x cos + rotate_half(x) sin on the first numbers of each head."""
    width = cos.shape[1]
    turned, rest = heads[..., :width], heads[..., width:]
    first, second = turned.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[:, None] + half * sin[:, None], rest), dim=-1)


@given(scores=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70))
@settings(max_examples=200)
def test_shares_of_any_scores_are_their_softmax(scores: list[float]) -> None:
    """One query of one number, whose scores are the keys; the values tell the shares apart."""
    count = len(scores)
    keys = torch.tensor(scores).view(1, 1, count, 1)
    values = torch.eye(count).view(1, 1, count, count)
    found = torch.empty(1, 1, count)
    one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    cpu_attention.decode_attention(
        np.ones((1, 1, 1), dtype=np.float32),
        keys.numpy(),
        values.numpy(),
        *(zero, zero, zero, zero, one * count, zero, np.array([0, 1]), 1),
        np.float32(1.0),
        np.empty(0, dtype=np.float32),
        found.numpy(),
    )
    torch.testing.assert_close(found[0, 0], torch.softmax(torch.tensor(scores), 0), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("group", "size", "value_size"), [(3, 8, 4), (7, 20, 40), (3, 64, 64), (1, 5, 33), (8, 16, 16)]
)
@pytest.mark.parametrize("together", [True, False])
def test_decodes_over_blocks_are_dense_attention(group: int, size: int, value_size: int, together: bool) -> None:
    """Heads of a row by one thread or by several; windows that begin inside a block; blocks partly filled."""
    rng = np.random.default_rng(group)
    num_kv_heads, block_size, lengths = 2, 16, np.array([1, 300, 37, 130])
    first = np.array([0, 165, 3, 0])
    widths = -(-lengths // block_size)
    starts = np.cumsum(widths) - widths
    blocks = rng.permutation(int(widths.sum()) + 3)[: int(widths.sum())]
    shape = (int(widths.sum()) + 3, num_kv_heads, block_size)
    keys, values = (rng.standard_normal((*shape, d), dtype=np.float32) for d in (size, value_size))
    query = rng.standard_normal((4, num_kv_heads * group, size), dtype=np.float32)
    found = np.full((4, num_kv_heads * group, value_size), np.nan, dtype=np.float32)
    heads = num_kv_heads if together else 1
    work = np.arange(0, 4 * num_kv_heads, heads)
    shares = np.array([0, len(work) // 2, len(work)])
    arrays = (query, keys, values, np.arange(4), blocks, starts, first, lengths, work, shares, heads)
    cpu_attention.decode_attention(*arrays, np.float32(0.3), np.empty(0, dtype=np.float32), found)
    for row in range(4):
        table = blocks[starts[row] : starts[row] + widths[row]]
        seen = slice(first[row], lengths[row])
        for head in range(num_kv_heads * group):
            key, value = (pool[table, head // group].reshape(-1, pool.shape[-1])[seen] for pool in (keys, values))
            wanted = torch.softmax(torch.from_numpy(key @ query[row, head]) * 0.3, 0) @ torch.from_numpy(value)
            torch.testing.assert_close(torch.from_numpy(found[row, head]), wanted, atol=1e-5, rtol=1e-4)


def test_one_score_that_is_no_number_makes_its_row_none_and_no_other() -> None:
    keys = torch.randn(2, 1, 4, 8)
    keys[1, 0, 2, 3] = float("nan")
    found = torch.empty(2, 1, 8)
    rows = np.arange(2)
    cpu_attention.decode_attention(
        np.ones((2, 1, 8), dtype=np.float32),
        keys.numpy(),
        torch.randn(2, 1, 4, 8).numpy(),
        *(rows, rows, rows, rows * 0, rows * 0 + 4, rows, np.array([0, 1, 2]), 1),
        np.float32(1.0),
        np.empty(0, dtype=np.float32),
        found.numpy(),
    )
    assert found.isfinite().all(dim=-1).flatten().tolist() == [True, False]
