"""The product's point on the real engine: a place that a finished sequence leaves is computed for another in the very
next step, and no step is planned above its token budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.model.api import InFlightStep
from replica.model.runner import load_runner
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.plan import StepPlan
from tests.fake_replica import EngineDriver
from tests.model.tiny_models import VOCAB_SIZE, save_tiny
from tests.model.wrapped_runner import WrappedRunner

NUM_PLACES = 4
MAX_TOKENS = (3, 24, 9, 17, 5, 12, 30, 7)


@dataclass(slots=True)
class PlanRecorder(WrappedRunner):
    """Passes steps on to the real runner and keeps what they computed: rows and tokens, by step."""

    rows: list[list[int]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> InFlightStep:
        self.rows.append(list(plan.seq_ids))
        self.num_tokens.append(len(plan.token_ids))
        return self.runner.submit(plan)


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(3 + (number * 31 + i * 7) % (VOCAB_SIZE - 3) for i in range(length))


def run_engine(tmp_path: Path, budget: int, prompt_length: int) -> tuple[EngineDriver, PlanRecorder]:
    card = save_tiny("llama", tmp_path)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), num_blocks=40, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=NUM_PLACES, max_num_batched_tokens=budget),
        check_invariants=True,
    )
    recorder = PlanRecorder(load_runner(card, config.model, config.scheduler, progress=lambda line: None))
    driver = EngineDriver(config, recorder)
    for number, max_tokens in enumerate(MAX_TOKENS):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        driver.submit(GenerationRequest(f"r{number}", prompt(number, prompt_length), sampling))
    driver.run()
    recorder.close()
    return driver, recorder


@pytest.mark.parametrize(("budget", "prompt_length"), [(64, 6), (12, 20)])
def test_the_step_after_a_sequence_finishes_computes_one_that_waited(
    tmp_path: Path, budget: int, prompt_length: int
) -> None:
    driver, recorder = run_engine(tmp_path, budget, prompt_length)
    assert len(recorder.rows) == len(driver.updates)
    assert max(map(len, recorder.rows)) == NUM_PLACES
    assert max(recorder.num_tokens) <= budget
    num_handovers = 0
    for step, update in enumerate(driver.updates[:-1]):
        num_ended = sum(reason is not None for reason in update.finish_reasons)
        if num_ended and update.load.num_waiting:
            computed_before = set().union(*map(set, recorder.rows[: step + 1]))
            newcomers = set(recorder.rows[step + 1]) - computed_before
            num_handovers += len(newcomers)
            assert len(newcomers) == num_ended, f"step {step}: {num_ended} places free, {len(newcomers)} taken"
    assert num_handovers == len(MAX_TOKENS) - NUM_PLACES
    for number, max_tokens in enumerate(MAX_TOKENS):
        assert len(driver.tokens[f"r{number}", 0]) == max_tokens
        assert driver.ends[f"r{number}", 0] == [FinishReason.LENGTH]


def test_a_full_batch_needs_no_more_steps_than_its_tokens_demand(tmp_path: Path) -> None:
    _, recorder = run_engine(tmp_path, 64, 6)
    # The first step prefills and samples; the batch then stays at four rows until fewer than four are left.
    widths = [len(rows) for rows in recorder.rows]
    assert sum(widths) == sum(MAX_TOKENS)
    assert widths == sorted(widths, reverse=True)
