"""A runner that passes steps on to another one: what tests' runners change a step with."""

from __future__ import annotations

from dataclasses import dataclass

from replica.model.api import InFlightStep, ModelRunner, ModelShape
from replica.scheduler.plan import StepPlan


@dataclass(slots=True)
class WrappedRunner:
    """The engine is told to wait for each step, whatever the wrapped runner says."""

    runner: ModelRunner

    @property
    def shape(self) -> ModelShape:
        return self.runner.shape

    @property
    def is_async(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> InFlightStep:
        return self.runner.submit(plan)

    def close(self) -> None:
        self.runner.close()
