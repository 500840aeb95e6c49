"""Which layers are rebuilt, and that a rebuilt one is the original in numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from replica.config import ModelConfig, SchedulerConfig
from replica.model.attention.interface import attention_step
from replica.model.fused_layer import FusedLayer, fuse_layers
from replica.model.huge_pages import Arena
from replica.model.runner import load_runner
from replica.model.support import Probe, ProbeStep, near_and_far, self_test
from tests.model.tiny_models import VOCAB_SIZE, make_model, save_tiny

_CPU = torch.device("cpu")


def _fused(family: str, **changes: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many layers were rebuilt; the probe's logits before and after."""
    model = make_model(family, **changes)
    shapes, probe = self_test(model), Probe(VOCAB_SIZE, _CPU)
    with torch.inference_mode():
        before = probe.run(model)
        count = fuse_layers(model, shapes, [probe], Arena())
        assert sum(isinstance(module, FusedLayer) for module in model.modules()) == count
        return count, before, probe.run(model)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "llama with biases"])
def test_layers_of_the_common_shape_are_rebuilt_and_compute_the_same(family: str) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if family.endswith("biases") else {}
    count, before, after = _fused(family.split()[0], **biases)
    assert count == 3
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen3", "norms of heads"),
        ("gemma2", "four norms"),
        ("gpt2", "other parts"),
        ("mixtral", "experts"),
        ("granite", "a factor before the residual: seen by its numbers only"),
    ],
)
def test_layers_of_another_shape_stay_as_they_are(family: str, why: str) -> None:
    changes = {"residual_multiplier": 0.5} if family == "granite" else {}
    count, before, after = _fused(family, **changes)
    assert count == 0, why
    assert torch.equal(after, before)


@pytest.mark.parametrize(("family", "count"), [("llama", 3), ("qwen3", 0)])
def test_a_start_says_how_many_layers_are_rebuilt(family: str, count: int, tmp_path: Path) -> None:
    card, said = save_tiny(family, tmp_path), list[str]()
    config = ModelConfig(model=str(tmp_path), device="cpu", num_blocks=16, block_size=8)
    load_runner(card, config, SchedulerConfig(4, 16), progress=said.append).close()
    assert [line for line in said if "compiled loops" in line] == [f"{count} of 3 layers run as compiled loops"]


def _narrow(rotation: Any) -> Any:
    return rotation[0], rotation[1][..., :8]


@pytest.mark.parametrize(
    "change",
    [lambda _: None, _narrow, lambda pair: pair[:1], lambda pair: torch.stack(pair), lambda pair: (*pair, pair[0])],
    ids=["nothing", "sines of other sizes", "cosines alone", "one tensor", "three tables"],
)
def test_layers_that_are_given_another_rotation_stay_as_they_are(change: Callable[[Any], Any]) -> None:
    model = make_model("llama")
    shapes, probe = self_test(model), Probe(VOCAB_SIZE, _CPU)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(_with_rotation(change), with_kwargs=True)
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with torch.inference_mode():
        assert fuse_layers(model, shapes, [probe], Arena()) == 0


def _with_rotation(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def changed(_layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_embeddings": change(kwargs["position_embeddings"])}

    return changed


def test_steps_of_changing_size_share_their_scratch_and_leave_nothing_in_it() -> None:
    """Two models of other widths by turns, each with a scratch of its own; many tokens, few, and many again."""
    models = [make_model("llama"), make_model("llama", intermediate_size=100)]
    sizes = (40, 3, 41, 1, 40)
    with torch.inference_mode():
        plain = [[_logits(model, size) for size in sizes] for model in models]
        for model in models:
            assert fuse_layers(model, self_test(model), [Probe(VOCAB_SIZE, _CPU)], Arena()) == 3
        for turn, size in enumerate(sizes):
            for model, wanted in zip(models, plain, strict=True):
                torch.testing.assert_close(_logits(model, size), wanted[turn], atol=1e-4, rtol=1e-4)


def _logits(model: PreTrainedModel, num_tokens: int) -> torch.Tensor:
    """Of one sequence from its beginning on."""
    positions = torch.arange(num_tokens)
    with attention_step(ProbeStep(torch.zeros_like(positions), positions)):
        output = model(input_ids=(positions * 7 % VOCAB_SIZE)[None], position_ids=positions[None], use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits


def test_a_layer_that_looks_common_but_computes_something_else_stays() -> None:
    model = make_model("llama")
    shapes, probe = self_test(model), Probe(VOCAB_SIZE, _CPU)
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: 1.001 * forward(hidden)
    with torch.inference_mode():
        assert fuse_layers(model, shapes, [probe], Arena()) == 2
    assert not isinstance(model.model.layers[1], FusedLayer)


@pytest.mark.parametrize(("max_model_len", "count"), [(32, 3), (33, 0)])
def test_a_layer_that_scales_queries_from_some_position_on_stays(max_model_len: int, count: int) -> None:
    """At the positions of the first probe, and below 32, the factor is 1."""
    model = make_model("ministral3")
    probes = near_and_far(VOCAB_SIZE, _CPU, max_model_len)
    with torch.inference_mode():
        assert fuse_layers(model, self_test(model), probes, Arena()) == count
