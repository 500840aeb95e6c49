"""Arrays in large pages of memory, for what every step reads: weights, KV cache, what lies between two products.

A processor looks up where a page lies. It remembers some thousand of them, which are a few MB of pages of 4 kB, and
every step reads gigabytes. Linux gives larger ones (2 MB on most machines) to who asks, where
/sys/kernel/mm/transparent_hugepage/enabled says `madvise` or `always`; elsewhere this is memory like any other.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE = 2 << 20
_REGION = 16 << 20
"""Numbers in a region of an arena."""
_LINE = 16
"""Numbers in a line of the cache."""


def empty(*shape: int) -> NDArray[np.float32]:
    """A C-contiguous float32 array of this shape in memory of its own, zero until something else is written. Takes up
    to a large page more than it holds. Raises `MemoryError`."""
    num_bytes = 4 * math.prod(shape)
    try:
        memory = mmap.mmap(-1, num_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _ask_for_huge_pages(memory)
    whole: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    first = -whole.ctypes.data % _PAGE
    return _shaped(whole[first : first + num_bytes], shape)


class Arena:
    """Arrays side by side, so that small ones share their pages. All of it is given back with the last array."""

    def __init__(self) -> None:
        self._region = empty(0)
        self._used = 0

    def empty(self, *shape: int) -> NDArray[np.float32]:
        """As the function of this name."""
        size = math.prod(shape)
        first = -(-self._used // _LINE) * _LINE
        if first + size > len(self._region):
            first = 0
            self._region = empty(max(size, _REGION))
        self._used = first + size
        return self._region[first : self._used].reshape(shape)


def _shaped(memory: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    numbers: Any = memory.view(np.float32)
    return numbers.reshape(shape)  # type: ignore[no-any-return]


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return
