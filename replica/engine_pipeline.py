"""Steps on their way: planned and given to the model, but not committed yet. One at a time, or two.

Where the model works on its own (`ModelRunner.is_async`) the next step is planned while it does:

    host    plan n+1, submit | wait for n | commit n, news, orders | plan n+2, submit | wait for n+1 | ...
    device  ------- step n ------------->|------- step n+1 ----------------------->|--- step n+2 ----

The device never waits while a turn of the host takes less than a step, and there is one synchronisation a step. What n
samples is pending in plan n+1; a stop found in its result comes too late for that plan only, which therefore computes
at most one token for nobody. Elsewhere, and while memory is short, a turn is plan, submit, wait, commit: depth 1.

A step that fails while others were in flight isn't repaired: plan n+1 gave blocks away that its rows might read. All
steps in flight are taken back, and their work is planned again as a step alone, which `run_step` can repair.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from replica.engine_recovery import run_step
from replica.errors import EngineDead
from replica.model.api import InFlightStep, ModelRunner, OutOfDeviceMemory
from replica.scheduler.plan import StepPlan, StepResult
from replica.scheduler.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that is over, to be committed. `result` None: it didn't fit in device memory, and no other is in flight.
    `begun_s`: when it was planned."""

    plan: StepPlan
    begun_s: float
    result: StepResult | None


class Pipeline:
    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: deque[_Submitted] = deque()

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._in_flight)

    def advance(self, now_s: float, *, memory_is_short: bool) -> Ran | None:
        """Plans and submits what may be in flight together, then waits for the oldest step. None when nothing can be
        computed. Raises `EngineDead`."""
        if not self._in_flight and (memory_is_short or not self._runner.is_async):
            return self._run_alone(now_s)
        while len(self._in_flight) < MAX_PLANS_IN_FLIGHT and not self._newest_failed:
            plan = self._scheduler.plan(now_s)
            if plan is None:
                break
            self._in_flight.append(_Submitted(plan, now_s, self._runner))
        if not self._in_flight:
            return None
        step = self._in_flight.popleft()
        try:
            return Ran(step.plan, step.begun_s, step.result())
        except EngineDead:
            raise
        except OutOfDeviceMemory:
            self._take_back_later()
            return Ran(step.plan, step.begun_s, None)
        except Exception:  # noqa: BLE001 - if it wasn't chance, it comes again in the step that runs alone
            _log.exception("step %d failed; what is in flight is planned again", step.plan.step)
            self._take_back_later()
            self._scheduler.rollback(step.plan)
            return self._run_alone(now_s)

    @property
    def _newest_failed(self) -> bool:
        return bool(self._in_flight) and self._in_flight[-1].error is not None

    def _run_alone(self, now_s: float) -> Ran | None:
        plan = self._scheduler.plan(now_s)
        if plan is None:
            return None
        try:
            return Ran(plan, now_s, run_step(self._runner, plan))
        except OutOfDeviceMemory:
            return Ran(plan, now_s, None)

    def _take_back_later(self) -> None:
        """The oldest step failed. Later ones were built on it: they are waited for, so that the device is free, and
        rolled back, whatever came out."""
        if not self._in_flight:
            return
        for later in self._in_flight:
            try:
                later.result()
            except Exception as error:  # noqa: BLE001 - it was to be expected
                _log.info("step %d, built on the one that failed: %s", later.plan.step, type(error).__name__)
        self._scheduler.rollback(self._in_flight[0].plan)
        self._in_flight.clear()


class _Submitted:
    """A step in flight. `error`: why it isn't, which is told with its result."""

    __slots__ = ("_step", "begun_s", "error", "plan")

    def __init__(self, plan: StepPlan, begun_s: float, runner: ModelRunner) -> None:
        self.plan = plan
        self.begun_s = begun_s
        self.error: Exception | None = None
        self._step: InFlightStep
        try:
            self._step = runner.submit(plan)
        except Exception as error:  # noqa: BLE001 - raised by `result`
            self.error = error

    def result(self) -> StepResult:
        if self.error is not None:
            raise self.error
        return self._step.result()
