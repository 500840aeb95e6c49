"""Loads a prepared model's weights onto the device, in the precision asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from replica.config import ModelConfig
from replica.errors import ModelNotFound, ModelUnsupported, ResourceError, SettingError
from replica.model.convert import first_line, quiet_transformers
from replica.model.support import require_supported_config
from replica.model.tensor_parallel.sharding import require_shardable
from replica.model_card import ModelCard

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
    """The model on `device`, in inference mode of its layers (no dropout), without gradients; or, of `num_shards`, the
    one of this process's rank in torch.distributed, cut as transformers' own plan says.

    Raises `ModelNotFound`, `ModelUnsupported`, `ResourceError`, or `SettingError` for a number of shards that can't be.
    """
    dtype = choose_dtype(config.dtype, device)
    if not (Path(card.weights_dir) / "config.json").is_file():
        raise ModelNotFound(f"the weights of {card.name} are gone from {card.weights_dir}; prepare the model again")
    try:
        with quiet_transformers():
            published = AutoConfig.from_pretrained(card.weights_dir)
            require_supported_config(published)
            placement: dict[str, Any] = {"device_map": {"": device}}
            if num_shards > 1:
                require_shardable(card.name, published, num_shards)
                placement = {"distributed_config": DistributedConfig(tp_size=num_shards)}
            model = AutoModelForCausalLM.from_pretrained(
                card.weights_dir, dtype=dtype, attn_implementation="eager", **placement
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"the weights of {card.name} don't fit the memory of {device}; choose a smaller model or --dtype bfloat16"
        ) from error
    except OSError as error:
        raise ModelNotFound(f"the weights in {card.weights_dir} can't be read: {first_line(error)}") from error
    except (ValueError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
        raise ModelUnsupported(f"transformers can't load {card.name}: {first_line(error)}") from error
    model.requires_grad_(False)
    loaded: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
    return loaded
