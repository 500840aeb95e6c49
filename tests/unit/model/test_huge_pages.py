"""Arrays in large pages: of the asked shape, aligned, apart from each other, and given back with their last user."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from replica.model import huge_pages


def test_arrays_are_zero_contiguous_aligned_and_apart() -> None:
    arrays = [huge_pages.empty(3, 5), huge_pages.empty(7), huge_pages.empty(2, 1, 4)]
    assert [array.shape for array in arrays] == [(3, 5), (7,), (2, 1, 4)]
    assert all(array.flags.c_contiguous and array.flags.writeable and array.dtype == np.float32 for array in arrays)
    assert [array.ctypes.data % 64 for array in arrays] == [0, 0, 0]
    assert not any(array.any() for array in arrays)
    for number, array in enumerate(arrays):
        array.fill(number + 1)
    assert [np.unique(array).tolist() for array in arrays] == [[1.0], [2.0], [3.0]]


def test_a_large_array_begins_at_a_large_page_and_small_ones_dont_keep_it() -> None:
    large = huge_pages.empty(20 << 20)
    assert large.ctypes.data % (2 << 20) == 0
    small = huge_pages.empty(16)
    whole = _owner(large)
    assert _owner(small) is not whole
    gone = weakref.ref(whole)
    del large, whole
    gc.collect()
    assert gone() is None


def _owner(array: object) -> object:
    """What holds the memory that an array shows."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array


def test_nothing_at_all_may_be_asked_for() -> None:
    assert huge_pages.empty(0).shape == (0,)


def test_what_no_memory_holds_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes of memory can't be had"):
        huge_pages.empty(1 << 58)
