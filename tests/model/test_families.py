"""Every supported family answers as transformers does, whatever a step holds beside it; and its windows, caps and sinks
are such that a model without them would fail here.

Each family is a tiny model with random weights. What is fixed by `support.pin_rope` is fixed in the dense model too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from replica.model.attention.backend import AttentionBackend
from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache
from replica.model.runner import Runner
from replica.scheduler.scheduler import Scheduler
from tests.model.generation import Reference, count_near_ties, generate, greedy, scheduler_for
from tests.model.paged_logits import NUM_BLOCKS, dense_logits, distance, fill_with_nan, load, paged_logits, prompts
from tests.model.tiny_models import FAMILIES, MAX_POSITION, save_tiny

_NUM_TOKENS = 5
_TIGHT = 8
"""Blocks for two prompts of which one loses its own when the other grows."""
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    runner: Runner
    dense: PreTrainedModel
    features: frozenset[str]
    """Of window, softcap, sinks: what some layer's attention has."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    card = save_tiny(name, folder)
    runner = load(card, folder)
    dense_config = AutoConfig.from_pretrained(folder)
    _pin(name, dense_config)
    dense = AutoModelForCausalLM.from_pretrained(
        folder, config=dense_config, dtype=torch.float32, attn_implementation="eager"
    )
    yield Family(name, runner, dense, _features(name))
    runner.close()


def _features(name: str) -> frozenset[str]:
    settings = FAMILIES[name]
    found = {"sliding_window": "window", "attn_logit_softcapping": "softcap"}
    return frozenset([found[key] for key in found if key in settings] + ["sinks"] * (name == "gpt_oss"))


def _pin(name: str, config: Any) -> None:
    """Written out what the pinned frequencies are for MAX_POSITION tokens."""
    rope = getattr(config, "rope_parameters", {})
    if name.endswith("_longrope"):
        rope["short_factor"] = rope["long_factor"]
    elif name.endswith("_dynamic"):
        dim, original, factor = 16, config.max_position_embeddings, rope["factor"]
        stretch = (factor * MAX_POSITION / original) - (factor - 1)
        config.rope_parameters = {
            "rope_type": "default",
            "rope_theta": rope["rope_theta"] * stretch ** (dim / (dim - 2)),
        }


def test_logits_of_ragged_chunks_equal_the_dense_forward(family: Family) -> None:
    paged = paged_logits(family.runner)
    assert distance(paged, dense_logits(family.dense)) <= _TOLERANCE


@pytest.mark.parametrize("family", [name for name in FAMILIES if _features(name)], indirect=True)
def test_a_window_cap_or_sink_that_got_lost_would_show(family: Family) -> None:
    wanted = dense_logits(family.dense)
    backend = family.runner._backend
    lost = {"window": {"window": None}, "softcap": {"softcap": None}, "sinks": {"sinks": None}}
    try:
        for feature in family.features:
            family.runner._backend = _Forgetful(backend, lost[feature])
            assert distance(paged_logits(family.runner), wanted) > 1e-2, feature
    finally:
        family.runner._backend = backend


def test_greedy_tokens_are_equal_however_they_are_scheduled(family: Family) -> None:
    """Blocks hold NaN before they are written and from when they are freed."""
    texts, runner = prompts(), family.runner
    alone = [_answers(_scheduler(runner), runner, [text])[0] for text in texts]
    assert count_near_ties(alone, _dense_answers(family.dense, texts, alone)) == 0
    together = _scheduler(runner)
    assert _answers(together, runner, texts) == alone
    hit = generate(runner, together, texts, greedy(_NUM_TOKENS))
    assert max(hit.num_cached_tokens) > 0
    assert hit.tokens == alone
    assert _answers(_scheduler(runner, budget=9), runner, texts, overlap=True) == alone
    tight = generate(runner, _scheduler(runner, num_blocks=_TIGHT), texts, greedy(_NUM_TOKENS))
    assert tight.num_preemptions > 0
    assert tight.tokens == alone


def _scheduler(runner: Runner, **settings: int) -> Scheduler:
    scheduler = scheduler_for(runner.shape, **settings)
    scheduler.block_pool.on_poison = lambda blocks: fill_with_nan(runner, list(blocks))
    fill_with_nan(runner, list(range(NUM_BLOCKS)))
    random.Random(5).shuffle(scheduler.block_pool._free)
    return scheduler


def _answers(
    scheduler: Scheduler, runner: Runner, prompts: Sequence[Sequence[int]], *, overlap: bool = False
) -> list[list[int]]:
    return generate(runner, scheduler, prompts, greedy(_NUM_TOKENS), overlap=overlap).tokens


def _dense_answers(
    dense: PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Reference]:
    """The best token after each prefix of prompt + answer: transformers' greedy answer, as far as the two agree."""
    references = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = dense(input_ids=torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0]
        best = logits[len(prompt) - 1 :].topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        references.append(Reference(best.indices[:, 0].tolist(), gaps))
    return references


@dataclass(frozen=True, slots=True)
class _Forgetful:
    """A backend that loses an argument of every call."""

    backend: AttentionBackend
    lost: dict[str, None]

    @property
    def block_size(self) -> int:
        return self.backend.block_size

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        return _ForgetfulStep(self.backend.prepare(layout, cache), self.lost)


@dataclass(frozen=True, slots=True)
class _ForgetfulStep:
    step: AttentionStep
    lost: dict[str, Any]

    def attend(self, call: AttentionCall) -> Tensor:
        return self.step.attend(replace(call, **self.lost))
