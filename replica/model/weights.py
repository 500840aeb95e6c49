"""Loads a prepared model's weights onto the device, in the precision asked for, or says in one line why it can't."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from replica.config import ModelConfig
from replica.errors import ModelNotFound, ModelUnsupported, ResourceError, SettingError
from replica.model import checkpoint
from replica.model.convert import first_line, quiet_transformers, read_model_config, readable_errors
from replica.model.host_memory import available_bytes, is_out_of_memory
from replica.model.linear import can_pack
from replica.model.quantization import require_computable_quantization
from replica.model.tensor_parallel.sharding import require_shardable
from replica.model_card import ModelCard

_NUM_NAMED = 3
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(setting: str) -> torch.device:
    """`auto`: cuda when there is one. Raises `SettingError` for a device that isn't here."""
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(setting)
    except RuntimeError as error:
        raise SettingError("device", setting, "auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingError("device", setting, "auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(
            "device", setting, f"this machine shows {torch.cuda.device_count()} CUDA devices; or use cpu"
        )
    return device


def choose_dtype(setting: str, device: torch.device) -> torch.dtype:
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[setting]


def load_weights(card: ModelCard, config: ModelConfig, device: torch.device, num_shards: int = 1) -> PreTrainedModel:
    """The model on `device`, in inference mode of its layers (no dropout), without gradients. With `num_shards` this
    process's shard of it: all of them load together.

    Raises `ModelNotFound`, `ModelUnsupported`, `ResourceError` or `SettingError`.
    """
    folder = Path(card.weights_dir)
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"the weights of {card.name} are gone from {folder}; prepare the model again")
    dtype = choose_dtype(config.dtype, device)
    model_config = read_model_config(folder)
    if num_shards > 1:
        require_shardable(card.name, model_config, num_shards)
    expanded = require_computable_quantization(model_config, device)
    _require_room(card.name, _Room(checkpoint.weight_files(folder), device, expanded, num_shards), dtype)
    try:
        with quiet_transformers(), readable_errors(str(folder)), weights_fit(card.name, device):
            model, report = _load(folder, model_config, dtype, device, num_shards)
    except OSError as error:
        raise ModelNotFound(f"the weights in {folder} can't be read: {first_line(error)}") from error
    _require_complete(card.name, report)
    model.requires_grad_(False)
    loaded: PreTrainedModel = model.eval()
    return loaded


@contextmanager
def weights_fit(name: str, device: torch.device) -> Iterator[None]:
    """Around what only the weights may have left no memory for."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            f"the weights of {name} don't fit the memory of {device}; choose a smaller model or --dtype bfloat16"
        ) from error


def _load(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, num_shards: int
) -> tuple[Any, dict[str, Any]]:
    """The model and what transformers found amiss. Pickled checkpoints are read as data only: their code isn't run."""
    where: dict[str, Any] = {"device_map": {"": device}}
    if num_shards > 1:
        where = {"distributed_config": DistributedConfig(tp_size=num_shards)}
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=False,
        weights_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, whose names the error lacks
        **where,
    )
    model, report = found
    return model, report


@dataclass(frozen=True, slots=True)
class _Room:
    """What a checkpoint's weights take in one process. Where they are packed, they count twice, as published and
    packed: the most that it can be, though layers that are rebuilt give theirs up one by one."""

    files: list[Path]
    device: torch.device
    expanded: bool
    num_shards: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        size = checkpoint.loaded_bytes(self.files, dtype.itemsize, expanded=self.expanded) // self.num_shards
        packed = self.num_shards == 1 and can_pack(torch.empty(0, dtype=dtype, device=self.device))
        return 2 * size if packed else size


def _require_room(name: str, room: _Room, dtype: torch.dtype) -> None:
    """Better one line now than a process that is killed while it loads."""
    free = torch.cuda.mem_get_info(room.device)[0] if room.device.type == "cuda" else available_bytes()
    need = room.num_bytes(dtype)
    if need <= free:
        return
    fits_half = dtype.itemsize > 2 and room.num_bytes(torch.bfloat16) <= free
    raise ResourceError(
        f"the weights of {name} take {need / 1e9:.2f} GB in {str(dtype).removeprefix('torch.')}, "
        f"{max(free, 0) / 1e9:.2f} GB of memory are left on {room.device}; "
        + ("set --dtype bfloat16" if fits_half else "choose a smaller model")
    )


def _require_complete(name: str, report: dict[str, Any]) -> None:
    """What a checkpoint lacks would be random numbers: the model would answer, and wrongly."""
    for kind, found in (("lacks", report["missing_keys"]), ("has in another shape", report["mismatched_keys"])):
        if found:
            names = sorted(key if isinstance(key, str) else str(key[0]) for key in found)
            more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            raise ModelUnsupported(f"the checkpoint of {name} {kind} {', '.join(names[:_NUM_NAMED])}{more}")
