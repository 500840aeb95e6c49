"""Compiled loops are kept on disk by their names alone, so a name stands for one loop."""

from __future__ import annotations

import pytest

from replica.model.cpu_compiler import compiled


def test_a_loop_is_compiled_once_whatever_the_options() -> None:
    def loop(number: int) -> int:
        return number + 1

    loop.__qualname__ = f"loop_{id(loop)}"
    compiled()(loop)
    with pytest.raises(ValueError, match=r"loop_\d+ is compiled twice"):
        compiled(parallel=True)(loop)
