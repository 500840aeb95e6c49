"""Compiled loops are kept on disk by their names alone, so a name stands for one loop; and what can't be kept, or read
again, is compiled anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from pickle import UnpicklingError

import pytest

from replica.model.cpu_compiler import _Kept, compiled


def test_a_loop_is_compiled_once_whatever_the_options() -> None:
    def loop(number: int) -> int:
        return number + 1

    loop.__qualname__ = f"loop_{id(loop)}"
    compiled()(loop)
    with pytest.raises(ValueError, match=r"loop_\d+ is compiled twice"):
        compiled(parallel=True)(loop)


class _Disk:
    """numba's cache of one loop, on a disk that fails: reading and writing raise what they are told to, once each."""

    cache_path = "a folder"

    def __init__(self, reading: Exception | None = None, writing: Exception | None = None) -> None:
        self.reading, self.writing = reading, writing
        self.kept: list[str] = []

    def load_overload(self, _signature: str) -> str:
        if self.reading is not None:
            raise self.reading
        return "loop"

    def save_overload(self, loop: str) -> None:
        if self.writing is not None:
            error, self.writing = self.writing, None
            raise error
        self.kept.append(loop)

    def flush(self) -> None:
        self.kept.append("emptied")


def test_a_loop_is_read_and_kept() -> None:
    disk = _Disk()
    kept = _Kept(disk)
    kept.save_overload("loop")
    assert (kept.load_overload("signature"), disk.kept, kept.cache_path) == ("loop", ["loop"], "a folder")


@pytest.mark.parametrize("error", [EOFError("Ran out of input"), UnpicklingError("truncated"), OSError(5, "I/O error")])
def test_half_a_file_is_no_file(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert _Kept(_Disk(reading=error)).load_overload("signature") is None
    assert "it is compiled anew" in caplog.text


def test_a_full_disk_keeps_nothing_and_half_an_index_is_begun_anew(caplog: pytest.LogCaptureFixture) -> None:
    full, half = _Disk(writing=OSError(28, "No space left on device")), _Disk(writing=EOFError())
    _Kept(full).save_overload("loop")
    assert "can't be kept in a folder: [Errno 28] No space left on device" in caplog.text
    _Kept(half).save_overload("loop")
    assert (full.kept, half.kept) == ([], ["emptied", "loop"])


_COMPILES_ONE_LOOP = """
import numpy
from replica.model.cpu_compiler import is_first_start
from replica.model.cpu_kernels import silu_times
print(is_first_start())
silu_times(0, *numpy.empty((3, 0), dtype=numpy.float32))
print(is_first_start())
"""


def test_only_the_first_process_on_a_machine_says_that_nothing_is_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", _COMPILES_ONE_LOOP], env=environment, check=True, capture_output=True, text=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert said == [["True", "False"], ["False", "False"]]
