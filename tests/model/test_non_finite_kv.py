"""Non-finite values in the KV cache end with the request that met them: on the real runner, through the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.model.api import InFlightStep
from replica.model.runner import Runner, load_runner
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.plan import StepPlan
from tests.fake_replica import EngineDriver
from tests.model.tiny_models import save_tiny
from tests.model.wrapped_runner import WrappedRunner

BACKENDS: dict[str, dict[str, object]] = {
    "pool": {"attention_backend": "pool"},
    "gather": {"attention_backend": "gather"},
    "tiles": {"batch_invariant": True},
}
PROMPT = tuple(3 + i * 7 % 100 for i in range(40))


@dataclass(slots=True)
class SickRunner(WrappedRunner):
    """The real runner, but the KV of the first chunk it computes turns into NaN: an overflow, a flipped bit."""

    runner: Runner
    is_sick: bool = False

    def submit(self, plan: StepPlan) -> InFlightStep:
        step = self.runner.submit(plan)
        if self.is_sick:
            self.is_sick = False
            for table in plan.block_tables:
                self.fill_with_nan(table)
        return step

    def fill_with_nan(self, blocks: list[int]) -> None:
        for tensor in (*self.runner._cache.keys, *self.runner._cache.values):
            tensor[blocks] = float("nan")


def driver_of(folder: Path, backend: str) -> tuple[EngineDriver, SickRunner]:
    """Prompts take three steps; the pool holds one and a half of the requests, so that blocks are used again."""
    card = save_tiny("llama", folder)
    model = ModelConfig(model=str(folder), device="cpu", num_blocks=6, block_size=8, **BACKENDS[backend])  # type: ignore[arg-type]
    config = EngineConfig(model=model, scheduler=SchedulerConfig(4, 16), check_invariants=True)
    runner = SickRunner(load_runner(card, config.model, config.scheduler, progress=lambda line: None))
    return EngineDriver(config, runner), runner


def generate(driver: EngineDriver, request_id: str, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    driver.submit(GenerationRequest(request_id, prompt, sampling))
    driver.run()
    return driver.tokens[request_id, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_that_went_bad_mid_prefill_fails_one_request_and_harms_no_later_one(tmp_path: Path, backend: str) -> None:
    driver, runner = driver_of(tmp_path, backend)
    runner.is_sick = True
    driver.submit(GenerationRequest("sick", PROMPT, SamplingParams(max_tokens=6, temperature=0.0)))
    driver.step()
    driver.run()
    error = driver.errors["sick", 0]
    assert driver.ends["sick", 0] == [FinishReason.ERROR]
    assert error is not None and error.code == "non_finite_logits"
    after = generate(driver, "same prompt")
    assert driver.ends["same prompt", 0] == [FinishReason.LENGTH]
    assert after == generate(driver, "from the cache now")
    healthy, _ = driver_of(tmp_path / "healthy", backend)
    assert after == generate(healthy, "r")


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_values_left_in_a_freed_block_never_reach_its_next_owner(tmp_path: Path, backend: str) -> None:
    """0 * NaN is NaN even where attention is masked: a block is cleared when a sequence enters it, or nothing is read
    beyond a context."""
    driver, runner = driver_of(tmp_path, backend)
    prompts = [PROMPT[: 3 + 5 * i] for i in range(7)]
    clean = [generate(driver, f"clean {i}", prompt) for i, prompt in enumerate(prompts)]
    for number, prompt in enumerate(prompts):
        scheduler = driver.engine._scheduler
        cache = scheduler._state.tables.cache
        assert cache is not None and scheduler.block_pool.num_held == 0
        cache.drop(list(cache._block_of))
        runner.fill_with_nan(list(range(6)))
        assert generate(driver, f"among NaN {number}", prompt) == clean[number]
