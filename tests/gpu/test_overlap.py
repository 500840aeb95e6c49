"""Two steps in flight on the device: the tokens are those of an engine that waits for every step, kernel by kernel and
with captured graphs, greedy and drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.engine import Engine
from replica.model.api import ModelRunner
from replica.model.runner import load_runner
from replica.request import GenerationRequest, SamplingParams
from replica.scheduler.plan import PENDING_TOKEN
from tests.model.tiny_models import VOCAB_SIZE, save_tiny
from tests.model.wrapped_runner import WrappedRunner

NUM_REQUESTS = 24
STOPS = tuple(range(3, VOCAB_SIZE, 9))


@pytest.fixture(scope="module", params=["graphs", "eager"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineConfig, ModelRunner]]:
    folder: Path = tmp_path_factory.mktemp("llama")
    config = EngineConfig(
        model=ModelConfig(
            model=str(folder), device="cuda", dtype="float32", num_blocks=12, enforce_eager=request.param == "eager"
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48),
        check_invariants=True,
    )
    runner = load_runner(save_tiny("llama", folder), config.model, config.scheduler, progress=print)
    yield config, runner
    runner.close()


def play(config: EngineConfig, runner: ModelRunner, temperature: float, stops: tuple[int, ...]) -> dict[str, list[int]]:
    """Tokens by request. Prompts share beginnings, and more requests come than there are places."""
    engine = Engine(
        config, runner, clock=time.monotonic, random_seed=lambda: 0, replica_id="gpu", epoch=f"{temperature}"
    )
    for number in range(NUM_REQUESTS):
        prompt = tuple(3 + (i * 7 + number % 5) % (VOCAB_SIZE - 3) for i in range(5 + number * 3))
        sampling = SamplingParams(
            max_tokens=8 + number, temperature=temperature, seed=number, stop_token_ids=stops, ignore_eos=True
        )
        engine.submit(GenerationRequest(str(number), prompt, sampling), time.monotonic())
    tokens: dict[str, list[int]] = {}
    num_overlapped = 0
    while engine.has_work:
        update = engine.step()
        num_overlapped += len(engine._pipeline)
        for request_id, token in zip(update.request_ids, update.token_ids, strict=True):
            if token != PENDING_TOKEN:
                tokens.setdefault(request_id, []).append(token)
    assert (num_overlapped > 20) == runner.is_async
    assert engine.idle_update().load.kv_usage_ratio == 0.0
    return tokens


@pytest.mark.parametrize(("temperature", "stops"), [(0.0, ()), (1.0, ()), (0.0, STOPS)])
def test_planning_ahead_changes_no_token(
    served: tuple[EngineConfig, ModelRunner], temperature: float, stops: tuple[int, ...]
) -> None:
    config, runner = served
    waiting = play(config, WrappedRunner(runner), temperature, stops)
    assert runner.is_async
    assert play(config, runner, temperature, stops) == waiting
    assert len(waiting) == NUM_REQUESTS
