"""Products against packed weights: right for every shape and number of threads, and alike whoever is beside a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replica.model import cpu_product
from replica.model.cpu_tiles import ROWS, WIDTH

Array = NDArray[np.float32]


def _numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _product(hidden: Array, weights: Array, bias: Array | None, other: Array, parts: int) -> Array:
    panels = cpu_product.pack([weights])
    out = np.full((len(hidden), len(weights)), np.nan, dtype=np.float32)
    packed_bias = cpu_product.pack_bias(bias, len(panels))
    cpu_product.product(hidden, panels, packed_bias, other, cpu_product.ZEROS, parts, out)
    return out


@given(
    num_rows=st.integers(1, 3 * ROWS + 1),
    num_inputs=st.integers(1, 40),
    num_outputs=st.integers(1, 3 * WIDTH + 3),
    parts=st.integers(1, 9),
    has_bias=st.booleans(),
    has_other=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_product_is_numpys(
    num_rows: int, num_inputs: int, num_outputs: int, parts: int, has_bias: bool, has_other: bool
) -> None:
    hidden, weights = _numbers(num_rows, num_inputs, seed=1), _numbers(num_outputs, num_inputs, seed=2)
    bias = _numbers(num_outputs, seed=3) if has_bias else None
    other = _numbers(num_rows, num_outputs, seed=4) if has_other else cpu_product.NOTHING
    wanted = hidden.astype(np.float64) @ weights.T.astype(np.float64)
    wanted += (0 if bias is None else bias) + (other if has_other else 0)
    np.testing.assert_allclose(_product(hidden, weights, bias, other, parts), wanted, atol=2e-5)


@given(
    num_rows=st.integers(1, 3 * ROWS + 1),
    num_inputs=st.integers(1, 40),
    num_outputs=st.integers(1, 3 * WIDTH + 3),
    parts=st.integers(1, 9),
    has_bias=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_gated_product_is_silu_of_one_times_the_other(
    num_rows: int, num_inputs: int, num_outputs: int, parts: int, has_bias: bool
) -> None:
    hidden, gate, up = (
        _numbers(num_rows, num_inputs),
        _numbers(num_outputs, num_inputs),
        _numbers(num_outputs, num_inputs, seed=1),
    )
    biases = [_numbers(num_outputs, seed=seed) if has_bias else None for seed in (2, 3)]
    panels = cpu_product.pack_pairs(gate, up)
    found = np.full((num_rows, num_outputs), np.nan, dtype=np.float32)
    bias = cpu_product.pack_pair_biases(len(panels), *biases)
    cpu_product.gated_product(hidden, panels, bias, cpu_product.ZEROS, parts, found)
    one, other = (
        hidden.astype(np.float64) @ weights.T + (0 if extra is None else extra)
        for weights, extra in zip((gate, up), biases, strict=True)
    )
    np.testing.assert_allclose(found, one / (1 + np.exp(-one)) * other, atol=5e-5, rtol=1e-5)


def test_a_sum_may_be_written_over_what_is_added() -> None:
    hidden, weights, other = _numbers(9, 32), _numbers(20, 32, seed=1), _numbers(9, 20, seed=2)
    wanted = _product(hidden, weights, None, other, 2)
    panels = cpu_product.pack([weights])
    cpu_product.product(hidden, panels, cpu_product.pack_bias(None, 0), other, cpu_product.ZEROS, 2, other)
    assert np.array_equal(other, wanted)


def test_rows_that_fill_more_than_the_second_level_cache_are_computed_by_blocks() -> None:
    hidden, weights = _numbers(140, 1024, seed=1), _numbers(40, 1024, seed=2)
    assert hidden.size > 2 * cpu_product._BLOCK
    found = _product(hidden, weights, None, cpu_product.NOTHING, 2)
    np.testing.assert_allclose(found, hidden.astype(np.float64) @ weights.T.astype(np.float64), atol=2e-4)


@pytest.mark.parametrize("beside", [1, 2, 5, 7, 64, 300])
def test_a_row_is_the_same_to_the_bit_whatever_rows_are_beside_it(beside: int) -> None:
    hidden, weights = _numbers(1 + beside, 576), _numbers(50, 576)
    alone = _product(hidden[:1], weights, None, cpu_product.NOTHING, 1)
    together = _product(hidden, weights, None, cpu_product.NOTHING, 2)
    assert np.array_equal(alone[0], together[0])


def test_a_row_that_is_no_number_touches_no_other() -> None:
    hidden, weights = _numbers(8, 32), _numbers(20, 32)
    hidden[3, 5] = np.nan
    found = _product(hidden, weights, None, cpu_product.NOTHING, 2)
    assert np.isnan(found).all(axis=1).tolist() == [row == 3 for row in range(8)]
    assert np.isfinite(np.delete(found, 3, axis=0)).all()


def test_weights_side_by_side_are_packed_as_one() -> None:
    several = [_numbers(10, 6, seed=1), _numbers(23, 6, seed=2), _numbers(7, 6, seed=3)]
    assert np.array_equal(cpu_product.pack(several), cpu_product.pack([np.concatenate(several)]))
