"""A tiny Qwen2 as a GGUF file, in any of its types, and the model that its bytes stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tests.model.tiny_models import MAX_POSITION, VOCAB_SIZE, make_model

WIDTH = 256
"""Of hidden and intermediate layers: K types have blocks of 256 weights."""
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "head_dim": WIDTH // 4,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}
# Where a block of these keeps the float16 factors of all its weights, in bytes from its start, and its size.
_FACTORS = {"Q2_K": ((80, 82), 84), "Q4_K": ((0, 2), 144), "Q6_K": ((208,), 210)}


def save_gguf(file: Path, kind: str) -> PreTrainedModel:
    """Matrices in `kind`, norms and biases in float32."""
    model = make_model("qwen2", **SHAPE)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(MAX_POSITION)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*map(chr, range(33, 127)), "!!", *(f"w{index}" for index in range(95, VOCAB_SIZE))])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    state = model.state_dict()
    for name, tensor in state.items():
        short = name
        for ours, theirs in _NAMES.items():
            short = short.replace(ours, theirs)
        quantised = _quantise(tensor.numpy(), kind) if tensor.ndim == 2 else tensor.numpy()
        if tensor.ndim == 2:
            kind_of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(short, quantised, raw_dtype=kind_of)
            state[name] = torch.from_numpy(gguf.quants.dequantize(quantised, kind_of).astype(np.float32))
        else:
            writer.add_tensor(short, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state)
    return model


def _quantise(weights: npt.NDArray[np.float32], kind: str) -> npt.NDArray[Any]:
    """By the rules of the type; blocks of the types that `gguf` can only read are made up."""
    if kind not in _FACTORS:
        return np.asarray(gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind]))
    places, size = _FACTORS[kind]
    rows, columns = weights.shape
    blocks = np.random.default_rng(weights.size).integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    factor = np.frombuffer(np.float16(3e-4).tobytes(), dtype=np.uint8)
    for place in places:
        blocks[:, :, place : place + 2] = factor
    return blocks.reshape(rows, -1)
