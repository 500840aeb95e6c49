"""The main promise on the real model: greedy answers equal `transformers`' own `generate`, however they are scheduled.

Law 8 of the scheduler: equal, or first different where the two best logits are closer than 1e-3; counted and printed.
One schedule is in the fast suite, the one that every user meets; the others take a minute more.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from replica.config import ModelConfig, SchedulerConfig
from replica.model.runner import Runner, load_runner
from tests.model.embedded import chat_prompts, embedded_card
from tests.model.generation import (
    Reference,
    Run,
    count_near_ties,
    generate,
    greedy,
    reference_answers,
    scheduler_for,
)

_NUM_TOKENS = 16
_BLOCK_SIZE = 16

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    model = AutoModelForCausalLM.from_pretrained(embedded_card().weights_dir, dtype=torch.float32)
    return reference_answers(model, chat_prompts(), _NUM_TOKENS)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    config = ModelConfig(num_blocks=256, block_size=_BLOCK_SIZE, device="cpu")
    runner = load_runner(embedded_card(), config, SchedulerConfig(8, 512), progress=lambda _: None)
    yield runner
    runner.close()


def _judge(how: str, run: Run, expected: list[Reference]) -> None:
    num_parted = count_near_ties(run.tokens, expected)
    print(f"{how}: {len(expected)} answers, {num_parted} part from transformers at a near tie")


@pytest.mark.slow
def test_alone(runner: Runner, expected: list[Reference]) -> None:
    for prompt, reference in zip(chat_prompts(), expected, strict=True):
        run = generate(runner, scheduler_for(runner.shape), [prompt], greedy(_NUM_TOKENS))
        _judge("alone", run, [reference])


def test_eight_at_once(runner: Runner, expected: list[Reference]) -> None:
    run = generate(runner, scheduler_for(runner.shape), chat_prompts(), greedy(_NUM_TOKENS), overlap=True)
    assert max(len(plan) for plan in run.plans) == 8
    _judge("eight at once", run, expected)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16, 64])
def test_chunked(runner: Runner, expected: list[Reference], budget: int) -> None:
    run = generate(runner, scheduler_for(runner.shape, budget=budget), chat_prompts(), greedy(_NUM_TOKENS))
    assert max(len(plan.token_ids) for plan in run.plans) <= budget
    _judge(f"budget {budget}", run, expected)


@pytest.mark.slow
def test_with_a_prefix_hit(runner: Runner, expected: list[Reference]) -> None:
    scheduler = scheduler_for(runner.shape)
    generate(runner, scheduler, chat_prompts(), greedy(1))
    run = generate(runner, scheduler, chat_prompts(), greedy(_NUM_TOKENS))
    assert min(run.num_cached_tokens) >= _BLOCK_SIZE
    _judge("prefix hit", run, expected)


@pytest.mark.slow
def test_through_preemption(runner: Runner, expected: list[Reference]) -> None:
    # Room for three of these sequences, not for eight.
    run = generate(runner, scheduler_for(runner.shape, num_blocks=14), chat_prompts(), greedy(_NUM_TOKENS))
    assert run.num_preemptions > 0
    print(f"{run.num_preemptions} preemptions")
    _judge("preempted", run, expected)
