"""Arrays in large pages: of the asked shape, aligned, apart from each other, and given back with their last user."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from replica.model import huge_pages


@pytest.mark.parametrize("empty", [huge_pages.empty, huge_pages.Arena().empty])
def test_arrays_are_zero_contiguous_aligned_and_apart(empty: Callable[..., NDArray[np.float32]]) -> None:
    arrays = [empty(3, 5), empty(7), empty(2, 1, 4)]
    assert [array.shape for array in arrays] == [(3, 5), (7,), (2, 1, 4)]
    assert all(array.flags.c_contiguous and array.flags.writeable and array.dtype == np.float32 for array in arrays)
    assert [array.ctypes.data % 64 for array in arrays] == [0, 0, 0]
    assert not any(array.any() for array in arrays)
    for number, array in enumerate(arrays):
        array.fill(number + 1)
    assert [np.unique(array).tolist() for array in arrays] == [[1.0], [2.0], [3.0]]


def test_memory_is_given_back_with_its_array() -> None:
    large = huge_pages.empty(20 << 20)
    assert large.ctypes.data % (2 << 20) == 0
    gone = weakref.ref(_owner(large))
    del large
    gc.collect()
    assert gone() is None


def test_arrays_of_an_arena_share_its_memory_until_there_is_too_little() -> None:
    arena = huge_pages.Arena()
    first, second, large = arena.empty(16), arena.empty(16), arena.empty(20 << 20)
    assert second.ctypes.data - first.ctypes.data == 64
    assert _owner(first) is _owner(second) is not _owner(large)


def _owner(array: object) -> object:
    """What holds the memory that an array shows."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array


def test_nothing_at_all_may_be_asked_for() -> None:
    assert huge_pages.empty(0).shape == huge_pages.Arena().empty(0).shape == (0,)


@pytest.mark.parametrize("size", [1 << 58, 1 << 70])
def test_what_no_memory_holds_is_a_memory_error(size: int) -> None:
    with pytest.raises(MemoryError, match="bytes of memory can't be had"):
        huge_pages.empty(size)
