"""Loads a prepared model's weights onto the device, in the precision asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from replica.config import ModelConfig
from replica.errors import ModelNotFound, ModelUnsupported, ResourceError, SettingError
from replica.model.convert import first_line, quiet_transformers
from replica.model.support import require_supported_config
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


def load_weights(card: ModelCard, config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The model on `device`, in inference mode of its layers (no dropout), without gradients.

    Raises `ModelNotFound`, `ModelUnsupported` or `ResourceError`.
    """
    dtype = choose_dtype(config.dtype, device)
    if not (Path(card.weights_dir) / "config.json").is_file():
        raise ModelNotFound(f"the weights of {card.name} are gone from {card.weights_dir}; prepare the model again")
    try:
        with quiet_transformers():
            require_supported_config(AutoConfig.from_pretrained(card.weights_dir))
            model = AutoModelForCausalLM.from_pretrained(
                card.weights_dir, dtype=dtype, attn_implementation="eager", device_map={"": device}
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
