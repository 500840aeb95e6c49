"""Which files hold the weights, and what those take in memory, by what the files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replica.model.checkpoint import weight_files

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
def test_of_several_checkpoints_in_a_folder_the_one_that_transformers_loads_is_read(
    first: int, tmp_path: Path
) -> None:
    (tmp_path / "part.safetensors").write_bytes(_SAFETENSORS)
    (tmp_path / "part.bin").write_bytes(b"")
    for name, (content, _) in list(_FILES.items())[first:]:
        (tmp_path / name).write_bytes(content)
    assert weight_files(tmp_path) == [tmp_path / list(_FILES.values())[first][1]]
