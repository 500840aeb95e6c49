"""The engine's recovery on the real runner: rows run again and steps given up change no token of anybody else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.model.api import InFlightStep, OutOfDeviceMemory
from replica.model.runner import load_runner
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.plan import StepPlan
from tests.fake_replica import EngineDriver
from tests.model.tiny_models import VOCAB_SIZE, save_tiny
from tests.model.wrapped_runner import WrappedRunner

NUM_REQUESTS = 6
POISON = 2


@dataclass(slots=True)
class FaultyRunner(WrappedRunner):
    """The real runner, but: every `oom_every`-th step runs out of memory, and steps with `poison` raise after they
    computed, as an error that shows late does."""

    oom_every: int = 0
    poison: int | None = None
    num_steps: int = 0

    def submit(self, plan: StepPlan) -> InFlightStep:
        self.num_steps += 1
        if self.oom_every and self.num_steps % self.oom_every == 0:
            raise OutOfDeviceMemory("told to")
        step = self.runner.submit(plan)
        if self.poison in plan.seq_ids and plan.num_logits != [0]:
            raise RuntimeError("told to")
        return step


def run_engine(folder: Path, *, temperature: float, oom_every: int = 0, poison: int | None = None) -> EngineDriver:
    card = save_tiny("llama", folder)
    config = EngineConfig(
        model=ModelConfig(model=str(folder), num_blocks=40, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        check_invariants=True,
    )
    runner = FaultyRunner(load_runner(card, config.model, config.scheduler, progress=lambda line: None))
    runner.oom_every, runner.poison = oom_every, poison
    driver = EngineDriver(config, runner)
    for number in range(NUM_REQUESTS):
        sampling = SamplingParams(max_tokens=8 + number, temperature=temperature, seed=number, ignore_eos=True)
        prompt = tuple(3 + (number * 31 + i * 7) % (VOCAB_SIZE - 3) for i in range(5 + 9 * number))
        driver.submit(GenerationRequest(f"r{number}", prompt, sampling))
    driver.run(2000)
    runner.close()
    load = driver.engine.idle_update().load
    assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)
    return driver


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_of_a_poison_row_get_the_tokens_of_an_undisturbed_run(tmp_path: Path, temperature: float) -> None:
    undisturbed = run_engine(tmp_path, temperature=temperature)
    disturbed = run_engine(tmp_path, temperature=temperature, poison=POISON)
    poisoned = (f"r{POISON}", 0)
    assert disturbed.ends[poisoned] == [FinishReason.ERROR]
    expected = {key: tokens for key, tokens in undisturbed.tokens.items() if key != poisoned}
    assert disturbed.tokens == expected


@pytest.mark.parametrize("oom_every", [3, 7])
def test_memory_that_runs_out_now_and_then_changes_no_token(tmp_path: Path, oom_every: int) -> None:
    undisturbed = run_engine(tmp_path, temperature=1.0)
    disturbed = run_engine(tmp_path, temperature=1.0, oom_every=oom_every)
    assert sum(update.stats.num_preemptions for update in disturbed.updates) > 0
    assert disturbed.tokens == undisturbed.tokens
