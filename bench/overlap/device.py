"""A device that works on its own and takes a given time for every step: what planning ahead gains is measured on it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from replica.model.api import InFlightStep, ModelShape
from replica.scheduler.plan import PENDING_TOKEN, StepPlan, StepResult

_TOKEN = 1


class SleepingDevice:
    """A `ModelRunner` that samples the same token always. A thread sleeps `step_s` for each step, in the order of
    submission: so the interpreter is free meanwhile, as it is beside a GPU. With 0 s a step is done on return.

    `is_async` is what the engine is told: False makes it wait for each step before it plans the next.
    """

    def __init__(self, shape: ModelShape, step_s: float, *, is_async: bool) -> None:
        self.shape = shape
        self.is_async = is_async
        self._step_s = step_s
        self._thread = ThreadPoolExecutor(1)

    def submit(self, plan: StepPlan) -> InFlightStep:
        result = StepResult(plan.step, [_TOKEN if samples else PENDING_TOKEN for samples in plan.samples])
        if not self._step_s:
            return _Done(result)
        return self._thread.submit(self._compute, result)

    def close(self) -> None:
        self._thread.shutdown()

    def _compute(self, result: StepResult) -> StepResult:
        time.sleep(self._step_s)
        return result


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result
