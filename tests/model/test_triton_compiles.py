"""Our Triton kernels compile for GPUs that aren't here, in a process of its own: this one interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton isn't installed: there is nothing to compile")

# Shared memory of a program on every GPU since Ampere, bytes.
_SHARED_BYTES = 99 * 1024


def _launches(capability: int, cache: Path, *layers: str) -> list[list[object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compiled_launches", str(capability), *layers],
        cwd=Path(__file__).resolve().parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(launches: list[list[object]], num_layers: int) -> None:
    kinds = [("write_slots", None), ("attend_tiles", True), ("merge_shares", None), ("attend_tiles", False)]
    assert [(kernel, split) for _, kernel, split, _ in launches] == kinds * num_layers
    assert all(isinstance(shared, int) and shared <= _SHARED_BYTES for *_, shared in launches)


def test_the_kernels_of_a_common_layer_compile_for_hopper(tmp_path: Path) -> None:
    _check(_launches(90, tmp_path, "llama-8b"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_kinds_of_layers_compile(capability: int, tmp_path: Path) -> None:
    _check(_launches(capability, tmp_path), 5)
