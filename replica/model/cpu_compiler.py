"""How our loops for the CPU are compiled, kept on disk, and shared out to threads.

Nothing is compiled before the first call; all of it takes half a minute. What was compiled is kept beside the package,
or in our cache folder where that can't be written.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import njit

from replica.model.cache_folder import default_cache_dir

logger = logging.getLogger(__name__)

Loop = TypeVar("Loop", bound=Callable[..., Any])

one_team = threading.Lock()
"""To be held around every loop that uses threads: the library's simplest kind of thread team ends the process when two
callers use it at once."""

_names: set[str] = set()
_FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered; numbers that aren't finite stay what arithmetic makes of them."""


def compiled(**options: Any) -> Callable[[Loop], Loop]:
    """Decorator: numba's, with the options that all our loops have."""
    every = {"fastmath": _FAST, "nogil": True, "error_model": "numpy", **options}

    def decorate(loop: Loop) -> Loop:
        name = f"{loop.__module__}.{loop.__qualname__}"
        if name in _names:
            raise ValueError(
                f"{name} is compiled twice: on disk one would take the other's place, whatever the options"
            )
        _names.add(name)
        try:
            made: Any = njit(cache=True, **every)(loop)
        except RuntimeError:  # neither this folder nor the user's cache can be written: compile in every process
            made = njit(**every)(loop)
        else:
            made._cache = _Kept(made._cache)
        kept: Loop = made
        return kept

    return decorate


class _Kept:
    """numba's cache of a loop. A file that was cut off, or a full disk, costs time only: the loop is compiled."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *which: Any) -> Any:
        try:
            return self._cache.load_overload(*which)
        except Exception as error:  # noqa: BLE001 - whatever reading half a file leads to
            logger.warning(
                "a compiled loop in %s can't be read, it is compiled anew: %r", self._cache.cache_path, error
            )
            return None

    def save_overload(self, *what: Any) -> None:
        try:
            try:
                self._cache.save_overload(*what)
            except (EOFError, pickle.UnpicklingError):  # the index of what is there can't be read
                self._cache.flush()
                self._cache.save_overload(*what)
        except OSError as error:
            logger.warning("a compiled loop can't be kept in %s: %s", self._cache.cache_path, error)


def is_first_start() -> bool:
    """Nothing that this version compiled is kept yet. The folder says nothing: it is made when loops are defined."""
    folder = Path(numba.config.CACHE_DIR)  # type: ignore[attr-defined]  # set when it is imported
    return next(folder.rglob("*.nbi"), None) is None


def use_threads(count: int) -> None:
    """How many threads the calling thread's loops may use from now on; no more than the machine has cores."""
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when it is imported
    numba.set_num_threads(max(1, min(count, most)))


def _folder(chosen: str) -> str:
    """Named after our sources: numba looks at the file in which the outermost loop stands, not at those whose loops it
    calls. `chosen` is the operator's folder, "" for none."""
    here = Path(__file__).parent
    sources = b"".join(file.read_bytes() for file in sorted(here.glob("cpu_*.py")))
    name = f"loops-{hashlib.sha256(sources).hexdigest()[:12]}"
    if chosen:
        return str(Path(chosen) / name)
    return str((here / "__pycache__" if os.access(here, os.W_OK) else default_cache_dir()) / name)


numba.config.CACHE_DIR = _folder(numba.config.CACHE_DIR)  # type: ignore[attr-defined]
