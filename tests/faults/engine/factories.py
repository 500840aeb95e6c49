"""Runner factories with faults, importable by the engine's process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from replica.config import EngineConfig
from replica.model.api import InFlightStep, ModelRunner
from replica.model.fake import FakeModel
from replica.model_card import ModelCard
from replica.scheduler.plan import StepPlan
from tests.fake_replica import FakeFactory, write_model


@dataclass(slots=True)
class SlowModel(FakeModel):
    """Each step takes as long as a small model's, so that there is time to meddle."""

    step_s: float = 0.01
    num_sound_steps: int = 1_000_000

    def submit(self, plan: StepPlan) -> InFlightStep:
        time.sleep(self.step_s)
        if self.num_submitted >= self.num_sound_steps:
            raise RuntimeError("the device is gone")
        return FakeModel.submit(self, plan)


@dataclass(frozen=True)
class SlowFactory(FakeFactory):
    def __call__(self, config: EngineConfig, progress: Callable[[str], None]) -> tuple[ModelRunner, ModelCard]:
        return SlowModel(self.shape, **self.faults), write_model(self.folder)


@dataclass(frozen=True)
class FailingFactory:
    error: Exception

    def __call__(self, config: EngineConfig, progress: Callable[[str], None]) -> tuple[ModelRunner, ModelCard]:
        raise self.error


def dying_factory(config: EngineConfig, progress: Callable[[str], None]) -> tuple[ModelRunner, ModelCard]:
    os._exit(3)


def stuck_factory(config: EngineConfig, progress: Callable[[str], None]) -> tuple[ModelRunner, ModelCard]:
    progress("stuck")
    time.sleep(1000)
    raise AssertionError
