"""Checkpoints that come quantised: transformers computes them where packages and device allow it, or one line says why.

Asked before anything is loaded, so that a missing package doesn't show as a stack trace after minutes of reading.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.import_utils import is_kernels_available

from replica.errors import ModelUnsupported
from replica.model.convert import first_line, quiet_transformers

_KERNELS_FROM_THE_HUB = ("fp8", "mxfp8")


def quantization_method(config: PretrainedConfig) -> str | None:
    """What the checkpoint says it is quantised with ("awq", "gptq", "fp8", ...); None for plain weights."""
    settings = _settings(config)
    if settings is None:
        return None
    return str(settings.get("quant_method") or "a method that it doesn't name")


def require_computable_quantization(config: PretrainedConfig, device: torch.device) -> bool:
    """Whether transformers will turn quantised weights into plain ones, because it has no kernels for them here. Where
    it would only notice in the first forward, `config` is changed to say so.

    Raises `ModelUnsupported` naming the method and what is missing, when they can't be computed on `device` at all.
    """
    settings = _settings(config)
    if settings is None:
        return False
    if settings.get("quant_method") in _KERNELS_FROM_THE_HUB and not is_kernels_available():
        settings["dequantize"] = True
        config.quantization_config = settings
    try:
        with quiet_transformers():
            quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
            quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except Exception as error:
        raise ModelUnsupported(
            f"{config.model_type} is quantised with {quantization_method(config)}, which can't be computed on "
            f"{device.type} here: {first_line(error)}"
        ) from error
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def _settings(config: PretrainedConfig) -> dict[str, Any] | None:
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, dict) else dict(found.to_dict())
    return None
