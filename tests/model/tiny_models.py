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
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_DEEPSEEK = {**_ROUTED, **_LATENT, "head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION}
_OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_hidden_layers": 3, "init_std": 0.3}
_GEMMA3N = {
    **_WINDOWED,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
_GEMMA4 = {key: _GEMMA3N[key] for key in list(_GEMMA3N)[:6]}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}
# Queries are scaled from position 32 on.
_SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": _WINDOWED,
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK,
    "ernie4_5": {},
    "exaone4": {**_WINDOWED, "num_key_value_heads": 4},
    "gemma": {},
    "gemma2": {**_WINDOWED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_WINDOWED, "query_pre_attn_scalar": 16},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "glm4": {},
    "glm4_moe": {**_ROUTED, "use_qk_norm": True},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {},
    "gpt_oss": {**_WINDOWED, **_EXPERTS},
    "gptj": {**_GPT2, "rotary_dim": 8},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "hunyuan_v1_dense": {},
    "llama": {},
    "llama_dynamic": {"rope_parameters": _DYNAMIC, "max_position_embeddings": 32},
    "ministral": _WINDOWED,
    "mistral": {"sliding_window": 8},
    "ministral3": {"rope_parameters": _SCALED, "sliding_window": 8},
    "mixtral": {**_EXPERTS, "sliding_window": 8},
    "nemotron": {},
    "olmo2": {},
    "olmo3": _WINDOWED,
    "opt": _OPT,
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 8},
    "phi3_longrope": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    "phimoe": _EXPERTS,
    "qwen2": {**_WINDOWED, "use_sliding_window": True},
    "qwen3": {**_WINDOWED, "use_sliding_window": True},
    "qwen3_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"qk_layernorm": True},
    "starcoder2": {"sliding_window": 8},
}
"""By model type; a suffix after it names a variant."""
_VARIANTS = ("_longrope", "_dynamic")


def make_config(family: str, **changes: Any) -> Any:
    model_type = family
    for variant in _VARIANTS:
        model_type = model_type.removesuffix(variant)
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
    return card_of(family, folder)


def card_of(family: str, folder: Path) -> ModelCard:
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
