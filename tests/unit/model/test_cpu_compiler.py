"""Compiled loops are kept on disk by their names alone, so a name stands for one loop."""

from __future__ import annotations

import pytest

from replica.model.cpu_compiler import compiled


def _loop(number: int) -> int:
    return number + 1


def test_a_loop_is_compiled_once_whatever_the_options() -> None:
    assert compiled()(_loop)(2) == 3
    with pytest.raises(ValueError, match="_loop is compiled twice"):
        compiled(parallel=True)(_loop)
