"""Planning ahead changes no answer: crowds in pools that can't hold them, through failing steps, poison rows and short
memory, on a device that is late, beside the same engine that waits for every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from replica.model.api import InFlightStep
from replica.model.fake import FakeModel, FakeStep
from replica.model.late import LateRunner
from replica.request import FinishReason
from replica.scheduler.plan import StepPlan
from tests.fake_replica import EngineDriver, fake_shape
from tests.property.engine.world import DEVICES, POISON, World

NUM_SEEDS = 60


@dataclass(slots=True)
class FlakyModel(FakeModel):
    """Now and then a step raises that would have run, before it computes or with its result. Never when it is run
    again, whole or in parts."""

    flaky: random.Random = field(default_factory=lambda: random.Random(1))
    num_failed: int = 0
    newest: int = 0

    def submit(self, plan: StepPlan) -> InFlightStep:
        is_new = plan.step > self.newest
        self.newest = max(self.newest, plan.step)
        if not is_new or self.flaky.random() > 0.1:
            return FakeModel.submit(self, plan)
        self.num_failed += 1
        if self.flaky.random() < 0.5:
            raise RuntimeError("by chance")
        FakeModel.submit(self, plan)
        return FakeStep(RuntimeError("by chance, and late"))


@cache
def waiting(seed: int, *, faulty: bool) -> EngineDriver:
    """The same crowd at an engine that waits for every step."""
    return crowd(seed, "host", faulty=faulty).driver


def crowd(seed: int, device: str, *, faulty: bool) -> World:
    """Up to 14 requests that come while others run, in a pool for about two of them."""
    rng = random.Random(seed)
    shape = fake_shape(num_blocks=rng.randint(8, 14), block_size=rng.choice([2, 4]), max_model_len=60)
    num_seqs = rng.randint(1, 5)
    settings = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_seqs + rng.randint(1, 12),
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "watermark": rng.choice([0.0, 0.01]),
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
    }
    faults: dict[str, Any] = {"eos_ratio": 0.05}
    if faulty:
        faults |= {"oom_every": rng.choice([0, 0, 5, 9]), "late": rng.random() < 0.5}
        faults |= {"poison_token": POISON if rng.random() < 0.5 else None}
    world = World(device, faults, settings, shape, model_class=FlakyModel if faulty else FakeModel)
    longest = shape.max_seq_len - 1
    for _ in range(rng.randint(2, 14)):
        world.submit_request(
            num_prompt=min(longest, rng.randint(1, 24)),
            max_tokens=rng.randint(1, 14),
            first=rng.choice([0, 0, rng.randrange(90)]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.2,
            priority=rng.randint(0, 2),
        )
        for _ in range(rng.choice([0, 0, 1, 3])):
            world.driver.step()
    world.driver.run(5000)
    world.check()
    return world


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_crowd_gets_what_it_gets_from_an_engine_that_waits(device: str, faulty: bool) -> None:
    num_preemptions = num_stops = num_wasted = num_overlapped = num_failed = 0
    for seed in range(NUM_SEEDS):
        ahead, expected = crowd(seed, device, faulty=faulty), waiting(seed, faulty=faulty)
        assert ahead.driver.tokens == expected.tokens, f"tokens of seed {seed}"
        assert ahead.driver.ends == expected.ends, f"ends of seed {seed}"
        num_preemptions += sum(update.stats.num_preemptions for update in ahead.driver.updates)
        num_stops += list(ahead.driver.ends.values()).count([FinishReason.STOP])
        num_wasted += ahead.num_wasted
        late = ahead.runner.runner
        num_overlapped += late.num_overlapped if isinstance(late, LateRunner) else 0
        num_failed += ahead.model.num_failed if isinstance(ahead.model, FlakyModel) else 0
    print(f"{num_preemptions} preemptions, {num_stops} stops, {num_wasted} tokens wasted, {num_failed} failures")
    assert num_preemptions > 40 and num_stops > 60, "without them this test proves nothing"
    assert num_stops / 3 < num_wasted <= num_stops
    assert num_overlapped > 1000 or device == "fast"
    assert (num_failed > 100) == faulty
