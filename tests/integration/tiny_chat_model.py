"""A chat model of random weights that a test can serve: a real checkpoint folder, loaded as any local folder is."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tokenizer_families import CHAT_TEMPLATE, EOS, byte_level

MAX_POSITION = 2048


def save_tiny_chat_model(folder: Path) -> Path:
    """Llama, 2 layers, 64 wide, byte-level tokenizer, chat template. Greedy output is stable, its text is noise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer._tokenizer.to_str(), encoding="utf-8")
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder
