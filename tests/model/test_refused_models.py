"""Models that would answer wrongly are refused by name where `brimful serve` meets them: preparing, and loading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.masking_utils import create_causal_mask

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import ModelUnsupported
from replica.model.mask_probe import require_windows_in_calls
from replica.model.prepare import prepare
from replica.model.runner import load_runner
from replica.model.support import require_supported_config, self_test
from tests.model.tiny_models import FAMILIES, MAX_POSITION, card_of, make_config, make_model, save_tiny

# What needs more than its defaults to be one of its kind, or to be built quickly.
_REFUSED: dict[str, dict[str, Any]] = {
    "bamba": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": True},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "jamba": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "llama4_text": {},
    "mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2},
    "minimax": {},
    "mpt": {},
    "qwen3_5_text": {},
    "qwen3_next": {},
    "recurrent_gemma": {},
    "rwkv": {},
    "t5": {},
    "vit": {},
}


@pytest.mark.parametrize("family", _REFUSED)
def test_an_architecture_that_would_answer_wrongly_is_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    AutoConfig.for_model(family, **_REFUSED[family]).save_pretrained(folder)
    model = ModelConfig(model=str(folder), device="cpu")
    with pytest.raises(ModelUnsupported, match=f"^{family} (can't be served: |is )") as prepared:
        prepare(model, cache_dir=tmp_path / "cache", progress=lambda _: None)
    with pytest.raises(ModelUnsupported) as loaded:
        load_runner(card_of(family, folder), model, SchedulerConfig(), progress=lambda _: None)
    assert loaded.value.message == prepared.value.message
    assert "\n" not in loaded.value.message


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama4_text", {"attention_chunk_size": None, "no_rope_layers": [1, 0, 1]}, "attn_temperature_tuning"),
        ("llama", {"num_hidden_layers": 0}, "no layers"),
    ],
)
def test_a_configuration_of_a_sound_family_may_be_what_is_refused(
    family: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=rf"^{family} can't be served: .*{reason}"):
        require_supported_config(make_config(family, **settings))


def test_a_mask_that_looks_up_each_place_of_its_prompt_is_refused() -> None:
    """As masks of images in a prompt do: nobody can ask it about other positions."""
    model = make_model("llama")
    forward, places = model.model.forward, torch.zeros(1, 3, dtype=torch.long)

    def with_own_mask(*args: Any, **kwargs: Any) -> Any:
        mask = create_causal_mask(
            model.config,
            model.model.embed_tokens(kwargs["input_ids"]),
            None,
            None,
            and_mask_function=lambda b, h, q, k: places[b, q] == places[b, k],
        )
        return forward(*args, attention_mask=mask, **kwargs)

    model.model.forward = with_own_mask
    with pytest.raises(ModelUnsupported, match=r"^llama can't be served: it makes attention masks"):
        require_windows_in_calls(model, 64)


def test_accepted_families_pass_the_static_rule() -> None:
    for family in FAMILIES:
        require_supported_config(make_config(family))


class HomemadeConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    model_type = "homemade"


class HomemadeForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Claims to be a transformer like others, but adds to every token the mean of all tokens before it in the step."""

    config_class = HomemadeConfig

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        counts = torch.arange(1, input_ids.shape[1] + 1)[None, :, None]
        return super().forward(inputs_embeds=embedded + embedded.cumsum(1) / counts, **kwargs)


@pytest.fixture
def homemade() -> Iterator[None]:
    AutoConfig.register("homemade", HomemadeConfig)
    AutoModelForCausalLM.register(HomemadeConfig, HomemadeForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop("homemade")
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(HomemadeConfig)


@pytest.mark.usefixtures("homemade")
def test_an_unknown_class_that_fails_the_self_test_is_refused_by_name(tmp_path: Path) -> None:
    settings = make_config("llama").to_dict()
    torch.manual_seed(7)
    HomemadeForCausalLM(HomemadeConfig(**{**settings, "model_type": "homemade"})).save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path), device="cpu", num_blocks=32, block_size=8)
    with pytest.raises(
        ModelUnsupported, match=r"^homemade can't be served: with paged attention its logits are off by"
    ):
        load_runner(card_of("homemade", tmp_path), model, SchedulerConfig(8, 64), progress=lambda _: None)


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


@pytest.mark.parametrize("family", ["phimoe", "olmoe", "qwen2_moe"])
def test_a_window_that_only_the_mask_knows_is_refused_for_longer_contexts(family: str, tmp_path: Path) -> None:
    """Its window is longer than any probe."""
    window = {"sliding_window": 60, "use_sliding_window": True, "max_window_layers": 3}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    card = save_tiny(family, tmp_path, **window, **experts)
    model = {"model": str(tmp_path), "device": "cpu", "num_blocks": 40, "block_size": 8}

    def load(max_model_len: int | None) -> int:
        config = ModelConfig(**model, max_model_len=max_model_len)  # type: ignore[arg-type]
        return load_runner(card, config, SchedulerConfig(8, 64), progress=lambda _: None).shape.max_model_len

    line = f"^{family} can't be served with contexts of {MAX_POSITION} tokens: .*; set --max-model-len 60$"
    with pytest.raises(ModelUnsupported, match=line):
        load(None)
    assert load(60) == 60


def test_windows_that_come_with_the_call_are_accepted_at_any_length() -> None:
    for family in ("mistral", "gemma2", "gpt_oss", "llama"):
        model = make_model(family)
        self_test(model)
        require_windows_in_calls(model, MAX_POSITION)


def test_code_of_a_models_own_is_never_run(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (folder / "own.py").write_text(f"open({str(witness)!r}, 'w')\n")
    model = ModelConfig(model=str(folder), device="cpu")
    with pytest.raises(ModelUnsupported, match=r"^own needs Python code of its own \(trust_remote_code\)"):
        prepare(model, cache_dir=tmp_path / "cache", progress=lambda _: None)
    with pytest.raises(ModelUnsupported, match=r"^own needs Python code of its own"):
        load_runner(card_of("own", folder), model, SchedulerConfig(), progress=lambda _: None)
    assert not witness.exists()
