"""Shapes of models, as their published configurations give them, and the steps to measure by kind of device."""

from __future__ import annotations

from typing import Any

from bench.gpu_speed.measure import StepKind


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    }


MODELS: dict[str, dict[str, Any]] = {
    "tiny": _llama(64, 128, 2, 4, 2, 256),
    "llama-1b": _llama(2048, 8192, 16, 32, 8, 128_256),
    "llama-8b": _llama(4096, 14_336, 32, 32, 8, 128_256),
}
"""Of the Llama architecture, by name."""

DEFAULT_MODEL = {"cuda": "llama-1b", "cpu": "tiny"}

LIMITS = {"cuda": (256, 8192), "cpu": (4, 64)}
"""Sequences and tokens in one step, at most."""


def steps_on(device: str) -> list[StepKind]:
    if device == "cpu":
        return [StepKind(1, 48, 1), StepKind(3, 48, 1), StepKind(1, 0, 64), StepKind(1, 64, 32)]
    decodes = [StepKind(width, context, 1) for context in (500, 2000) for width in (1, 8, 32, 64, 128, 256)]
    chunks = [StepKind(1, start, count) for start, count in ((0, 512), (0, 2048), (0, 8192), (8000, 2048))]
    mixed = [StepKind(4, 0, 2048), StepKind(16, 0, 512)]
    return [*decodes, *chunks, *mixed]
