"""The double of a real engine: the engine's own code in virtual time.

Each step takes exactly as long as a given function of its plan says; between steps no time passes. What is measured on
it is therefore known beforehand, which is how measuring, fitting and validating are tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.fit.engine import Order, Played
from replica.config import EngineConfig
from replica.engine import Engine
from replica.engine_api import EngineUpdate
from replica.model.api import InFlightStep, ModelRunner, ModelShape
from replica.model.fake import FakeStep
from replica.scheduler.plan import PENDING_TOKEN, StepPlan, StepResult

SecondsOf = Callable[[StepPlan], float]


@dataclass(slots=True)
class ConstantModel:
    """Says the same token always. For requests that end by length, whose tokens nobody reads."""

    shape: ModelShape

    @property
    def is_async(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> InFlightStep:
        return FakeStep(StepResult(plan.step, [1 if samples else PENDING_TOKEN for samples in plan.samples]))

    def close(self) -> None:
        pass


class VirtualEngine:
    """A `MeasuredEngine`. `seconds_of` tells what a step costs, such as `StepCost.of_plan`; `model` is who makes the
    tokens."""

    def __init__(
        self, config: EngineConfig, shape: ModelShape, seconds_of: SecondsOf, model: ModelRunner | None = None
    ) -> None:
        self.config = config
        self.shape = shape
        self._now_s = 0.0
        self._seconds_of = seconds_of
        self._model = model or ConstantModel(shape)
        self._engine = Engine(
            config, self, clock=lambda: self._now_s, random_seed=lambda: 0, replica_id="virtual", epoch="0"
        )

    @property
    def is_async(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> InFlightStep:
        """As its engine's `ModelRunner`: the model's step, and its time."""
        self._now_s += self._seconds_of(plan)
        return self._model.submit(plan)

    def close(self) -> None:
        self._model.close()

    def play(self, orders: Sequence[Order], progress: Callable[[int], None]) -> Played:
        """Raises `RuntimeError` when the engine has work that it can't plan and nobody comes: time stands still."""
        started_s, num_ended = self._now_s, 0
        coming, updates = deque(orders), list[EngineUpdate]()
        while coming or self._engine.has_work:
            if not self._engine.has_work:
                updates.append(self._engine.idle_update())
                self._now_s = max(self._now_s, started_s + coming[0].at_s)
            while coming and started_s + coming[0].at_s <= self._now_s:
                self._engine.apply(coming.popleft().commands(started_s))
            begun_s = self._now_s
            updates.append(self._engine.step())
            if self._now_s == begun_s and _brought_nothing(updates[-1]):
                if not coming:
                    raise RuntimeError("the engine plans nothing, although it has work")
                self._now_s = started_s + coming[0].at_s
            num_ended += sum(reason is not None for reason in updates[-1].finish_reasons)
            progress(num_ended)
        return Played(started_s, updates)


def _brought_nothing(update: EngineUpdate) -> bool:
    return not update.stats.num_tokens and not update.request_ids and not update.accepted
