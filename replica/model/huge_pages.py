"""Arrays in large pages of memory, for what every step reads: weights, KV cache, what lies between two products.

A processor looks up where a page lies. It remembers some thousand of them, which are a few MB of pages of 4 kB, and
every step reads gigabytes. Linux gives pages of 2 MB to who asks, where /sys/kernel/mm/transparent_hugepage/enabled
says `madvise` or `always`; elsewhere this is memory like any other.
"""

from __future__ import annotations

import math
import mmap
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE = 2 << 20
_CHUNK = 64 << 20
_LINE = 64


class _Chunk:
    """Memory from which arrays are cut one after the other; given back with the last of them."""

    def __init__(self, num_bytes: int) -> None:
        try:
            memory = mmap.mmap(-1, num_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _ask_for_huge_pages(memory)
        whole: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        first = -whole.ctypes.data % _PAGE
        self._bytes = whole[first : first + num_bytes]
        self._used = 0

    def cut(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """None when too little is left."""
        first = -(-self._used // _LINE) * _LINE
        if first + num_bytes > len(self._bytes):
            return None
        self._used = first + num_bytes
        return self._bytes[first : self._used]


class _Chunks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: _Chunk | None = None

    def cut(self, num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > _CHUNK // 2:
            return _cut(_Chunk(num_bytes), num_bytes)
        with self._lock:
            found = None if self._last is None else self._last.cut(num_bytes)
            if found is None:
                self._last = _Chunk(_CHUNK)
                found = _cut(self._last, num_bytes)
            return found


_chunks = _Chunks()


def empty(*shape: int) -> NDArray[np.float32]:
    """A C-contiguous float32 array of this shape, zero until something else is written. Raises `MemoryError`."""
    found: Any = _chunks.cut(4 * math.prod(shape)).view(np.float32)
    return found.reshape(shape)  # type: ignore[no-any-return]


def _cut(chunk: _Chunk, num_bytes: int) -> NDArray[np.uint8]:
    found = chunk.cut(num_bytes)
    assert found is not None  # it was made for it
    return found


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return
