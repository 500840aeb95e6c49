"""One model over several devices: the first rank, in the engine's process, with the scheduler; the others follow.

A step: the plan goes to all ranks, each runs it on its shard and its own KV cache of the same blocks, meeting in the
collective operations of the sharded layers; the first rank samples and shares the tokens on the device. So plans may
follow each other without waiting for results, as with one device.

When a step raises, every rank tells how many collectives it has begun. If all agree, nobody waits for anybody: the
error is an ordinary one, and the engine looks for the rows at fault. If not, or if a rank is gone or silent, the ranks
can't be brought together again: `EngineDead`, now and for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from replica.errors import EngineDead
from replica.model.api import InFlightStep, ModelRunner, ModelShape, OutOfDeviceMemory
from replica.model.tensor_parallel.messages import Proceed, RunStep, StepDone
from replica.scheduler.plan import StepPlan, StepResult

SETTLE_S = 20.0
"""A rank that has been given a step says so long after the first rank is done with it at the latest."""


class OtherRanks(Protocol):
    """`ranks.Ranks`: the processes of the other ranks."""

    @property
    def pids(self) -> list[int]: ...

    def send(self, message: object) -> None: ...

    def collect(self, limit_s: float) -> list[object]: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


class Collectives(Protocol):
    """`group.RankGroup`: this process among them."""

    def num_collectives(self) -> int: ...

    def leave(self, *, orderly: bool) -> None: ...


@dataclass(slots=True)
class ParallelStep:
    """A step that all ranks were given."""

    _runner: TensorParallelRunner
    _own: StepDone
    _step: InFlightStep

    def result(self) -> StepResult:
        error: Exception | None = None
        try:
            result = self._step.result()
        except Exception as raised:  # noqa: BLE001 - told with what the others say
            error = raised
        self._runner.settle(self._own, error)
        return result


class TensorParallelRunner:
    """A `ModelRunner` of `inner`, which holds the first rank's shard, and the other ranks."""

    def __init__(self, inner: ModelRunner, ranks: OtherRanks, group: Collectives) -> None:
        self._inner = inner
        self._ranks = ranks
        self._group = group
        self._next_ticket = 0
        self._unsettled: deque[StepDone] = deque()
        self._dead: str | None = None

    @property
    def shape(self) -> ModelShape:
        return self._inner.shape

    @property
    def is_async(self) -> bool:
        return self._inner.is_async

    @property
    def rank_pids(self) -> list[int]:
        return self._ranks.pids

    def submit(self, plan: StepPlan) -> InFlightStep:
        """As `ModelRunner` says. Raises `EngineDead` once a rank is lost."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        ticket = self._next_ticket
        self._next_ticket += 1
        with self._dying():
            self._ranks.send(RunStep.of(ticket, plan_for_ranks(plan, self.shape.block_size)))
        try:
            step = self._inner.submit(plan)
        except Exception as error:
            self.settle(self._own_word(ticket), error)
            raise
        return ParallelStep(self, self._own_word(ticket), step)

    def settle(self, own: StepDone, error: Exception | None) -> None:
        """Hears what the other ranks say of a step. Raises `error` where there is one, or what went wrong elsewhere;
        `OutOfDeviceMemory` when that was it anywhere; `EngineDead` when the ranks are out of step."""
        while self._unsettled and self._unsettled[0].ticket <= own.ticket:
            mine = self._unsettled.popleft()
            others = self._said(mine.ticket)
            failed = [said for said in others if said.failure is not None]
            if not failed and (error is None or mine.ticket != own.ticket):
                continue
            if any(said.num_collectives != mine.num_collectives for said in others):
                raise self._death("its ranks are out of step after a failure") from error
            with self._dying():
                self._ranks.send(Proceed(mine.ticket))
            if mine.ticket == own.ticket:
                _raise(error, failed)

    def close(self) -> None:
        orderly = self._dead is None
        if orderly:
            self._ranks.stop()
        self._inner.close()
        self._group.leave(orderly=orderly)
        self._ranks.close() if orderly else self._ranks.kill()

    def _own_word(self, ticket: int) -> StepDone:
        own = StepDone(ticket, self._group.num_collectives())
        self._unsettled.append(own)
        return own

    def _said(self, ticket: int) -> list[StepDone]:
        with self._dying():
            said = self._ranks.collect(SETTLE_S)
        found = [message for message in said if isinstance(message, StepDone) and message.ticket == ticket]
        if len(found) < len(said):
            raise self._death(f"a rank told of another step than {ticket}")
        return found

    @contextmanager
    def _dying(self) -> Iterator[None]:
        try:
            yield
        except EngineDead as error:
            raise self._death(error.message) from error

    def _death(self, reason: str) -> EngineDead:
        self._dead = f"the model can't compute any more: {reason}"
        return EngineDead(self._dead)


def _raise(error: Exception | None, failed: list[StepDone]) -> None:
    if any(said.out_of_memory for said in failed) and not isinstance(error, OutOfDeviceMemory):
        raise OutOfDeviceMemory("another rank ran out of memory") from error
    if error is not None:
        raise error
    raise RuntimeError(f"the step failed on another rank: {failed[0].failure}")


def plan_for_ranks(plan: StepPlan, block_size: int) -> StepPlan:
    """What ranks that don't sample need, with the part of the live block tables that this step reads."""
    context_lens = map(sum, zip(plan.starts, plan.num_tokens, strict=True))
    tables = [table[: -(-length // block_size)] for table, length in zip(plan.block_tables, context_lens, strict=True)]
    return replace(plan, block_tables=tables, joined=[], left=[], token_masks={})
