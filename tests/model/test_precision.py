"""Half precision on the CPU: as near to the float32 answer as transformers' own dense forward in that precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replica.model.weights import choose_dtype
from tests.model.generation import generate, greedy, scheduler_for
from tests.model.paged_logits import dense_logits, distance, load, paged_logits, prompts
from tests.model.tiny_models import save_tiny

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _dense(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt_neox"])
def test_half_precision_is_as_right_as_the_dense_forward(family: str, dtype: str, tmp_path: Path) -> None:
    card = save_tiny(family, tmp_path, initializer_range=0.1)
    runner = load(card, tmp_path, dtype=dtype)
    assert {tensor.dtype for tensor in (*runner._cache.keys, *runner._cache.values)} == {_DTYPES[dtype]}
    exact = dense_logits(_dense(tmp_path, torch.float32))
    rounding = distance(dense_logits(_dense(tmp_path, _DTYPES[dtype])), exact)
    assert 1e-4 < rounding < 0.1
    assert distance(paged_logits(runner), exact) < 1.25 * rounding
    together = generate(runner, scheduler_for(runner.shape), prompts(), greedy(6)).tokens
    assert [len(tokens) for tokens in together] == [6, 6, 6, 6]
    runner.close()


def test_the_precision_follows_the_device_unless_it_is_set() -> None:
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16
    assert choose_dtype("float32", torch.device("cuda")) == torch.float32
