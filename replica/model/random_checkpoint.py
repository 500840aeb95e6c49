"""A checkpoint with random weights: for measurements and tests on a machine that can fetch no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from replica.model.convert import quiet_transformers
from replica.model.weights import choose_device, choose_dtype
from replica.model_card import ModelCard

_SPREAD = 0.02


def save_random(
    name: str, model_type: str, config: Mapping[str, Any], folder: Path, *, device: str = "auto", dtype: str = "auto"
) -> ModelCard:
    """Write config.json and weights into `folder`; the weights are made on `device`. The same ones every time."""
    where = choose_device(device)
    made: Any = AutoConfig.for_model(model_type, **config)
    with quiet_transformers(), torch.inference_mode():
        generator = torch.Generator(where).manual_seed(11)
        with torch.device(where):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                made, dtype=choose_dtype(dtype, where)
            )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, _SPREAD, generator=generator)
        model.save_pretrained(folder)
    return ModelCard(
        source=str(folder),
        revision=None,
        name=name,
        folder=str(folder),
        weights_dir=str(folder),
        architecture=model_type,
        max_position=int(made.max_position_embeddings),
        vocab_size=int(made.vocab_size),
        eos_token_ids=(),
        chat_template=None,
        special_tokens={},
    )
