"""Supported families answer as transformers does: chunked, batched, from any blocks. Others are refused by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import ModelUnsupported
from replica.model.runner import Runner, load_runner
from replica.model.support import require_supported_config, self_test
from tests.model.generation import count_near_ties, generate, greedy, reference_answers, scheduler_for
from tests.model.tiny_models import FAMILIES, VOCAB_SIZE, make_config, make_model, save_tiny

_LENGTHS = (5, 23, 40, 1, 17)
_NUM_TOKENS = 9


def _prompts(seed: int = 3) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in _LENGTHS]


def _load(family: str, folder: Path, **settings: object) -> Runner:
    card = save_tiny(family, folder)
    config = ModelConfig(model=str(folder), device="cpu", **{"block_size": 8, "num_blocks": 64, **settings})  # type: ignore[arg-type]
    return load_runner(card, config, SchedulerConfig(8, 64), progress=lambda _: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_as_transformers_at_every_budget(family: str, tmp_path: Path) -> None:
    runner = _load(family, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    if family.endswith("_longrope"):
        config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]  # as we pin them
    dense = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    expected = reference_answers(dense, _prompts(), _NUM_TOKENS)
    for budget, overlap in ((64, False), (16, True), (9, False)):
        scheduler = scheduler_for(runner.shape, budget=budget)
        scheduler.block_pool.on_poison = lambda blocks: _fill_with_nan(runner, list(blocks))
        _fill_with_nan(runner, list(range(64)))
        random.Random(budget).shuffle(scheduler.block_pool._free)
        run = generate(runner, scheduler, _prompts(), greedy(_NUM_TOKENS), overlap=overlap)
        assert count_near_ties(run.tokens, expected) == 0


def _fill_with_nan(runner: Runner, blocks: list[int]) -> None:
    for tensor in (*runner._cache.keys, *runner._cache.values):
        tensor[blocks] = float("nan")


_REFUSED: dict[str, dict[str, object]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2},
    "falcon": {"alibi": True},
    "mpt": {},
    "jamba": {},
    "bamba": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "minimax": {},
    "qwen3_next": {},
    "recurrent_gemma": {},
    "rwkv": {},
    "t5": {},
    "vit": {},
}


@pytest.mark.parametrize("family", _REFUSED)
def test_an_architecture_that_would_answer_wrongly_is_refused_by_name(family: str) -> None:
    config = AutoConfig.for_model(family, **_REFUSED[family])
    with pytest.raises(ModelUnsupported, match=family):
        require_supported_config(config)


def test_chunked_attention_is_refused_by_the_static_rule() -> None:
    with pytest.raises(ModelUnsupported, match="llama4"):
        require_supported_config(AutoConfig.for_model("llama4_text"))


def test_the_self_test_refuses_a_model_whose_layer_skips_attention() -> None:
    model = make_model("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelUnsupported, match="attention ran 2 times for 3 layers"):
        self_test(model)


def test_the_self_test_refuses_a_model_that_looks_ahead() -> None:
    with pytest.raises(ModelUnsupported, match=r"bert can't be served: .* logits are off"):
        self_test(make_model("bert"))


def test_the_self_test_refuses_a_model_that_ignores_positions() -> None:
    model = make_model("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda hidden, position_ids: forward(hidden, torch.arange(hidden.shape[1])[None])
    with pytest.raises(ModelUnsupported, match="logits are off"):
        self_test(model)


def test_the_self_test_sees_every_layers_shape() -> None:
    shapes = self_test(make_model("gemma2"))
    assert [(s.num_heads, s.num_kv_heads, s.head_size, s.value_size) for s in shapes] == [(4, 2, 16, 16)] * 3


def test_accepted_families_pass_the_static_rule() -> None:
    for family in FAMILIES:
        require_supported_config(make_config(family))
