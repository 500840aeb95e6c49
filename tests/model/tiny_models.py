"""Random-weight models of many families, small enough to load in a blink, saved as a checkpoint with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from replica.model_card import ModelCard

VOCAB_SIZE = 128
MAX_POSITION = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    # Large weights: logits far apart, so that a wrong context shows in the chosen token.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION}
_OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_hidden_layers": 3, "init_std": 0.3}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {**_WINDOWED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_WINDOWED, "query_pre_attn_scalar": 16},
    "gpt2": _GPT2,
    "mixtral": _EXPERTS,
    "phi3": {},
    "phi3_longrope": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    "gpt_oss": {**_WINDOWED, **_EXPERTS},
    "opt": _OPT,
    "olmo2": {},
    "nemotron": {},
    "cohere2": {**_WINDOWED},
    "starcoder2": {},
}


def make_config(family: str, **changes: Any) -> Any:
    model_type = family.removesuffix("_longrope")
    return AutoConfig.for_model(model_type, **{**_COMMON, **FAMILIES.get(family, {}), **changes})


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    config = make_config(family, **changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    model.requires_grad_(False)
    model.train(False)
    return model


def save_tiny(family: str, folder: Path, **changes: Any) -> ModelCard:
    """A checkpoint in `folder` and a card that points to it."""
    make_model(family, **changes).save_pretrained(folder)
    return ModelCard(
        source=str(folder),
        revision=None,
        name=family,
        folder=str(folder),
        weights_dir=str(folder),
        architecture=family,
        max_position=MAX_POSITION,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        chat_template=None,
        special_tokens={},
    )
