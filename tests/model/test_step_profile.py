"""The profile of a step: every part of the runner gets its time, and nothing of the spans stays behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from torch import nn

from bench.engine_speed import profile
from replica.config import ModelConfig, SchedulerConfig
from replica.engine import Engine
from replica.model import step_profile
from replica.model.fused_layer import FusedLayer
from replica.model.runner import Runner, load_runner
from replica.model.step_profile import ProfiledRunner, Spans, part_of
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import save_tiny


def test_a_span_within_a_span_counts_for_itself_only() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    spans = Spans(lambda: next(times))
    spans.enter("mlp")
    spans.enter("norm")
    spans.leave()
    spans.leave()
    assert spans.cut() == {"loop": 1.0 + 2.0, "mlp": 2.0 + 1.0, "norm": 4.0}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens", "embedding"),
        ("model.rotary_emb", "rope"),
        ("model.layers.0", "other"),
        ("model.layers.0.input_layernorm", "norm"),
        ("model.layers.0.self_attn", "rope"),
        ("model.layers.0.self_attn.k_proj", "qkv"),
        ("model.layers.0.self_attn.qkv_proj", "qkv"),
        ("model.layers.0.self_attn.o_proj", "o"),
        ("model.layers.0.mlp", "mlp"),
        ("model.layers.0.mlp.down_proj", "mlp"),
        ("model.layers.0.mlp.act_fn", "mlp"),
        ("model.norm", "norm"),
        ("lm_head", "lm_head"),
        ("transformer.wte", "embedding"),
        ("transformer.h.3.attn.c_attn", "qkv"),
        ("transformer.h.3.attn.c_proj", "o"),
    ],
)
def test_a_modules_name_tells_its_part(name: str, part: str) -> None:
    assert part_of(name) == part


def test_the_reader_knows_every_part_that_is_written() -> None:
    assert set(step_profile.OUTSIDE) | {"detokenising"} == set(profile.OUTSIDE)
    assert set(step_profile.FORWARD) == set(profile.FORWARD)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_part_of_a_step_gets_its_time_and_the_runner_is_itself_again(family: str, tmp_path: Path) -> None:
    """llama's layers are fused, gpt2's are transformers' own."""
    card = save_tiny(family, tmp_path / "model")
    config = ModelConfig(model=card.folder, device="cpu", block_size=4, num_blocks=32)
    runner = load_runner(card, config, SchedulerConfig(4, 16), progress=lambda _: None)
    model = runner._model
    assert model is not None
    before = _everything_planted(runner, model)
    profiled = ProfiledRunner(runner, tmp_path / "steps.json", _ticking())
    prompt = [5, 9, 40, 77, 12]
    first = profiled.submit(make_plan(1, [Row(0, 0, prompt, [3, 7])], joined=(0,))).result().token_ids[0]
    profiled.submit(make_plan(2, [Row(0, 5, [first], [3, 7])])).result()
    assert _everything_planted(runner, model) != before
    profiled.close()
    assert _everything_planted(runner, model) == before
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [(step["num_rows"], step["num_tokens"], step["idle"]) for step in steps] == [(1, 5, False), (1, 1, True)]
    for step in steps:
        assert set(step["parts"]) <= set(step_profile.FORWARD) | set(step_profile.OUTSIDE)
        needed = {"embedding", "norm", "qkv", "attention", "mlp", "lm_head", "inputs", "sampling", "loop"}
        needed |= {"o"} if family == "gpt2" else set()
        assert needed <= {part for part, seconds in step["parts"].items() if seconds > 0}


def _ticking() -> Callable[[], float]:
    """A clock on which every reading is a second after the last."""
    ticks = count()
    return lambda: float(next(ticks))


def _everything_planted(runner: Runner, model: nn.Module) -> list[object]:
    """Whatever a profile may have replaced."""
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    functions = [getattr(owner, name) for owner, name, _ in step_profile._FUNCTIONS]
    fused = [module for module in model.modules() if isinstance(module, FusedLayer)]
    parts = [getattr(layer, name) for layer in fused for name, _ in step_profile._FUSED_PARTS]
    return [*hooks, *functions, *parts, type(runner._backend).prepare, Engine.idle_update]
