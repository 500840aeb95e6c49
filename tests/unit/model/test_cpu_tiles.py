"""The innermost loops: exponentials and maxima of whole vectors, whatever numbers they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from replica.model.cpu_tiles import KEYS, exp_all, largest

Array = NDArray[np.float32]
_INF, _NAN = np.inf, np.nan


# As loops are compiled that use them: sums may be reordered, products contracted.
@njit(fastmath={"reassoc", "contract", "arcp", "nsz"})
def _exp(numbers: Any, first: int, count: int, scale: Any, base: Any) -> Any:
    return exp_all(numbers, first, count, scale, base)


@njit(fastmath={"reassoc", "contract", "arcp", "nsz"})
def _largest(numbers: Any, first: int, count: int) -> Any:
    return largest(numbers, first, count)


def _exps(numbers: list[float], scale: float = 1.0, base: float = 0.0) -> Array:
    found = np.array(numbers, dtype=np.float32)
    _exp(found, 0, len(found), np.float32(scale), np.float32(base))
    return found


def test_exponentials_are_exact_to_some_units_in_the_last_place() -> None:
    numbers = np.random.default_rng(1).uniform(-87, 87, 1 << 16).astype(np.float32)
    wanted = np.exp(numbers.astype(np.float64))
    assert np.max(np.abs(_exps(numbers.tolist()) / wanted - 1)) < 3e-7


def test_only_the_numbers_asked_for_change_and_their_sum_is_returned() -> None:
    numbers = np.zeros(4 * KEYS, dtype=np.float32)
    assert _exp(numbers, KEYS, 2 * KEYS, np.float32(1), np.float32(1)) == pytest.approx(2 * KEYS / np.e)
    assert (numbers != 0).tolist() == [False] * KEYS + [True] * 2 * KEYS + [False] * KEYS


def test_nothing_is_left_of_what_is_far_below_and_what_is_no_number_stays_none() -> None:
    found = _exps([-_INF, -1e30, -88.0, 0.0, _NAN, 1e30, _INF, -87.0])
    assert found[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert np.isnan(found[4])
    assert (found[5:7] > 1e38).all() and 0 < found[7] < 1e-37


def test_the_largest_of_huge_numbers_gets_all_although_its_product_is_rounded() -> None:
    numbers = [1e12, 0.0, 5e11, -1e12, 1e12, 0.0, 0.0, 0.0]
    base = float(np.float32(0.3) * np.float32(1e12))
    assert _exps(numbers, 0.3, base).tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([1, 5, -2, 3, 0, 4, 2, -9], 5),
        ([-1, -5, -2, -3, -7, -4, -2, -0.5], -0.5),
        ([_NAN, -5, _NAN, -3, _NAN, -4, _NAN, _NAN], -3),
        ([_NAN] * 8, -_INF),
        ([-_INF] * 8, -_INF),
        ([0, 1, _INF, 2, 0, 0, 0, 0], _INF),
    ],
)
def test_the_largest_passes_over_what_is_no_number(numbers: list[float], wanted: float) -> None:
    for turn in range(8):
        array = np.array([99] * KEYS + numbers[turn:] + numbers[:turn] + [99] * KEYS, dtype=np.float32)
        assert _largest(array, KEYS, KEYS) == wanted
