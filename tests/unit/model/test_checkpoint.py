"""Which files hold the weights, and what those take in memory, by what the files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from replica.model.checkpoint import loaded_bytes, weight_files

_HEADER = b"{}"
_SAFETENSORS = len(_HEADER).to_bytes(8, "little") + _HEADER


def _index(file: str) -> bytes:
    return json.dumps({"weight_map": {"w": file}}).encode()


_FILES = {
    "model.safetensors": (_SAFETENSORS, "model.safetensors"),
    "model.safetensors.index.json": (_index("part.safetensors"), "part.safetensors"),
    "pytorch_model.bin": (b"", "pytorch_model.bin"),
    "pytorch_model.bin.index.json": (_index("part.bin"), "part.bin"),
}
"""In the order in which transformers looks: what each holds, and the weights that it leads to."""


@pytest.mark.parametrize("first", range(len(_FILES)))
def test_of_several_checkpoints_in_a_folder_the_one_that_transformers_loads_is_read(first: int, tmp_path: Path) -> None:
    (tmp_path / "part.safetensors").write_bytes(_SAFETENSORS)
    (tmp_path / "part.bin").write_bytes(b"")
    for name, (content, _) in list(_FILES.items())[first:]:
        (tmp_path / name).write_bytes(content)
    assert weight_files(tmp_path) == [tmp_path / list(_FILES.values())[first][1]]


_TYPES = [(torch.float32, 4, 40), (torch.float32, 2, 20), (torch.float16, 4, 40), (torch.float64, 2, 20)]
_OTHERS = [(torch.int64, 2, 80), (torch.int32, 2, 40), (torch.bool, 4, 10), (torch.float8_e4m3fn, 4, 10)]


@pytest.mark.parametrize(("stored", "bytes_per_weight", "wanted"), [*_TYPES, *_OTHERS])
def test_pickled_weights_take_what_they_are_loaded_as(
    stored: torch.dtype, bytes_per_weight: int, wanted: int, tmp_path: Path
) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(2, 5).to(stored)}, file)
    assert loaded_bytes([file], bytes_per_weight, expanded=False) == wanted


def test_pickled_weights_that_are_tied_count_once(tmp_path: Path) -> None:
    file, weight = tmp_path / "pytorch_model.bin", torch.zeros(2, 5)
    torch.save({"embed.weight": weight, "lm_head.weight": weight, "norm.weight": torch.zeros(3)}, file)
    assert loaded_bytes([file], 2, expanded=False) == 2 * (10 + 3)


def test_pickled_files_that_hide_their_tensors_count_with_their_size(tmp_path: Path) -> None:
    old, damaged = tmp_path / "old.bin", tmp_path / "damaged.bin"
    torch.save({"w": torch.zeros(1000)}, old, _use_new_zipfile_serialization=False)
    damaged.write_bytes(b"x" * 77)
    assert loaded_bytes([old], 2, expanded=False) == old.stat().st_size > 4000
    assert loaded_bytes([damaged], 2, expanded=False) == 77
