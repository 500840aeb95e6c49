"""What a checkpoint's files say before a weight is read: are they whole, how large, do they need what isn't here.

Everything that would end in wrong text, a killed process or a stack trace later is one line here, by name:
code of the checkpoint's own, missing or cut files, a quantisation that this machine can't compute.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Container
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from replica.errors import ModelNotFound, ModelUnsupported

# In transformers' order.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_HEADER_BYTES = 100_000_000
_MAX_NAME_BYTES = 255
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_OTHERS = {"I64": 8, "I32": 4, "I16": 2}
"""Bytes of an element; every type that is in neither has one byte."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its type in safetensors' words ("F32", "F8_E4M3", "U8", ...) and its shape."""

    name: str
    stored_as: str
    shape: tuple[int, ...]


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises `ModelNotFound` where there is none that can be read."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFound(f"{folder} has no config.json: it is not a transformers model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{file} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"{file} holds no JSON object")
    return config


def require_no_own_code(folder: Path, known_types: Container[str]) -> None:
    """Raise `ModelUnsupported` for a model whose architecture is Python code in its folder: that is never run here.

    `known_types`: the model types that transformers implements itself; such a model's own code isn't needed.
    """
    config = read_config(folder)
    model_type = config.get("model_type")
    if config.get("auto_map") and model_type not in known_types:
        raise ModelUnsupported(
            f"{model_type or folder.name} needs Python code of its own (trust_remote_code), which is never run here; "
            "choose a model that transformers implements itself"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, as transformers would choose them, each checked to be there and whole.

    Raises `ModelNotFound` naming the file that is missing or cut.
    """
    for name in _WEIGHTS:
        if (folder / name).is_file():
            files = _indexed_files(folder / name) if name.endswith(".json") else [folder / name]
            break
    else:
        raise ModelNotFound(
            f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, whole or in parts"
        )
    for file in files:
        if not file.is_file():
            raise ModelNotFound(f"{folder} is incomplete: {file.name} is missing")
        if file.suffix == ".safetensors":
            read_header(file)
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelNotFound(f"{index} can't be read: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or len(name.encode()) > _MAX_NAME_BYTES:
            raise ModelNotFound(f"{index} names a file that can't be in its folder: {str(name)[:100]!r}")
    return [index.parent / name for name in names]


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file. Raises `ModelNotFound` when it is cut or not of that format."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelNotFound(f"{file} is cut or no safetensors file; fetch it again")
        try:
            entries = json.loads(stream.read(length))
            tensors = [(name, entry) for name, entry in entries.items() if name != "__metadata__"]
            end = max((entry["data_offsets"][1] for _, entry in tensors), default=0)
            found = [
                StoredTensor(name, entry["dtype"], tuple(map(operator.index, entry["shape"])))
                for name, entry in tensors
            ]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise ModelNotFound(f"{file} is damaged or no safetensors file; fetch it again") from error
    if 8 + length + end != size:
        raise ModelNotFound(f"{file} is cut: {8 + length + end} bytes are announced, {size} are there; fetch it again")
    return found


def loaded_bytes(files: list[Path], bytes_per_weight: int, *, expanded: bool) -> int:
    """What the weights take in memory when every floating-point weight takes `bytes_per_weight`. A pickled file that
    doesn't show its tensors counts with its size.

    `expanded`: quantised ones are turned into such weights too, as transformers does where it can't compute them.
    """
    total = 0
    for file in files:
        tensors = read_header(file) if file.suffix == ".safetensors" else _pickled_tensors(file)
        if tensors is None:
            total += file.stat().st_size
        else:
            total += sum(_tensor_bytes(tensor, bytes_per_weight, expanded) for tensor in tensors)
    return total


def _pickled_tensors(file: Path) -> list[StoredTensor] | None:
    """Types and shapes without the numbers; tensors that share their memory count once. None: they can't be seen so,
    as in PyTorch's old format."""
    import torch

    try:
        content = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # noqa: BLE001 - whatever damage leads to: loading it will say so
        return None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        return None
    types = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    types |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3"}
    found = {
        (value.untyped_storage()._cdata, value.storage_offset(), value.shape): StoredTensor(
            name, types.get(value.dtype, "U8"), tuple(value.shape)
        )
        for name, value in content.items()
    }
    return list(found.values())


def _tensor_bytes(tensor: StoredTensor, bytes_per_weight: int, expanded: bool) -> int:
    count = prod(tensor.shape)
    if tensor.stored_as in _FLOATS or (expanded and tensor.stored_as.startswith("F8_E4M3")):
        return count * bytes_per_weight
    if expanded and tensor.name.endswith("_blocks"):
        return count * 2 * bytes_per_weight  # MXFP4: two weights in a byte
    return count * _OTHERS.get(tensor.stored_as, 1)
