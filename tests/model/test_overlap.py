"""The real model on a device that is late: planning ahead changes no token, greedy or drawn, through prefix hits,
preemptions, chunks and stops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.model.late import LateRunner
from replica.model.runner import Runner, load_runner
from replica.request import FinishReason, GenerationRequest, SamplingParams
from tests.fake_replica import EngineDriver
from tests.model.tiny_models import VOCAB_SIZE, save_tiny

NUM_REQUESTS = 8
STOPS = tuple(range(3, VOCAB_SIZE, 9))
BLOCK_SIZE = 8
SHARED = tuple(3 + i * 5 % (VOCAB_SIZE - 3) for i in range(20))

CONFIG = EngineConfig(
    model=ModelConfig(device="cpu", num_blocks=9, block_size=BLOCK_SIZE, batch_invariant=True),
    scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=24, scheduler_reserve_full_isl=False),
    check_invariants=True,
)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    card = save_tiny(request.param, folder)
    runner = load_runner(card, CONFIG.model, CONFIG.scheduler, progress=lambda line: None)
    yield runner
    runner.close()


def prompt(number: int) -> tuple[int, ...]:
    """Two thirds begin alike; lengths from 5 to 38."""
    own = tuple(3 + (number * 31 + i * 7) % (VOCAB_SIZE - 3) for i in range(5 + number % 4 * 6))
    return own if number % 3 == 0 else SHARED[: 10 + number % 2 * 10] + own


def play(runner: Runner | LateRunner, temperature: float) -> EngineDriver:
    """Two waves of the same requests, so that the second finds prefixes of the first. Some meet a stop."""
    driver = EngineDriver(CONFIG, runner)
    for wave in range(2):
        for number in range(NUM_REQUESTS):
            sampling = SamplingParams(
                max_tokens=10 + number * 2,
                temperature=temperature,
                top_p=0.9 if number % 2 else 1.0,
                seed=number,
                stop_token_ids=STOPS if number % 2 else (),
            )
            driver.submit(GenerationRequest(f"{wave}.{number}", prompt(number), sampling))
            driver.step()
        driver.run()
    return driver


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_device_that_is_late_gives_the_tokens_of_one_that_is_waited_for(runner: Runner, temperature: float) -> None:
    waiting = play(runner, temperature)
    for lag in (1, 2):
        late = LateRunner(runner, lag)
        ahead = play(late, temperature)
        assert ahead.tokens == waiting.tokens
        assert ahead.ends == waiting.ends
        assert late.num_overlapped > len(ahead.updates) // 2
        reasons = [reason for ends in ahead.ends.values() for reason in ends]
        num_preemptions = sum(update.stats.num_preemptions for update in ahead.updates)
        print(f"{reasons.count(FinishReason.STOP)} of {len(reasons)} stopped, {num_preemptions} preemptions")
        assert min(reasons.count(FinishReason.STOP), reasons.count(FinishReason.LENGTH)) >= 2
        assert num_preemptions > 0
        assert sum(update.stats.prefix_hit_tokens for update in ahead.updates) > 0
        load = ahead.updates[-1].load
        assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)
