"""A device that works on its own, around any runner, on the CPU and in one thread: it is late on purpose.

`submit` only queues a step. The device computes in the order of submission, and no sooner than it must: so everything
that an engine does between a step and its result has been done when the step runs, and what a step finds then is what
it would find on a real device, or the engine has relied on something that isn't there yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from replica.model.api import InFlightStep, ModelRunner, ModelShape
from replica.model.fake import FakeStep
from replica.scheduler.plan import StepPlan, StepResult


class LateRunner:
    """A `ModelRunner`. `lag`: how many steps the device is behind when `submit` returns; with 2 or more it computes
    only when a result is asked for. Faults show with the result. `num_overlapped`: results that were asked for when a
    later step had been submitted. `lose`: overwrites blocks whose content has lost its meaning, in its turn."""

    def __init__(self, runner: ModelRunner, lag: int = 2, lose: Callable[[Sequence[int]], None] | None = None) -> None:
        self.num_submitted = 0
        self.num_overlapped = 0
        self._runner = runner
        self._lag = lag
        self._lose = lose
        self._queue: deque[LateStep | Callable[[], None]] = deque()

    @property
    def shape(self) -> ModelShape:
        return self._runner.shape

    @property
    def is_async(self) -> bool:
        return True

    def submit(self, plan: StepPlan) -> InFlightStep:
        """Reads the plan, whose block tables live on, and returns."""
        self.num_submitted += 1
        plan = replace(plan, block_tables=[table.copy() for table in plan.block_tables])
        step = LateStep(self, plan, self.num_submitted)
        self._queue.append(step)
        while self._num_steps > self._lag:
            self._compute_next()
        return step

    def poison(self, blocks: Sequence[int]) -> None:
        """The content of these blocks means nothing any more, once what was submitted before is done."""
        if self._lose is not None:
            self._queue.append(partial(self._lose, list(blocks)))

    def finish(self, step: LateStep) -> None:
        """Computes up to this step, if that isn't done."""
        self.num_overlapped += step.number < self.num_submitted
        while step.outcome is None:
            self._compute_next()

    def close(self) -> None:
        self._runner.close()

    @property
    def _num_steps(self) -> int:
        return sum(isinstance(entry, LateStep) for entry in self._queue)

    def _compute_next(self) -> None:
        entry = self._queue.popleft()
        if not isinstance(entry, LateStep):
            entry()
            return
        try:
            entry.outcome = FakeStep(self._runner.submit(entry.plan).result())
        except Exception as error:  # noqa: BLE001 - raised by `result`
            entry.outcome = FakeStep(error)


class LateStep:
    """An `InFlightStep`."""

    def __init__(self, runner: LateRunner, plan: StepPlan, number: int) -> None:
        self.plan = plan
        self.number = number
        self.outcome: FakeStep | None = None
        self._runner = runner

    def result(self) -> StepResult:
        self._runner.finish(self)
        assert self.outcome is not None
        return self.outcome.result()
