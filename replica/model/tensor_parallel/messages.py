"""What the first rank (in the engine's process) and the others say to each other, over one socket each.

first rank                         rank r
RankStart ------------------------>
          <------------------------ RankAwake       its libraries are loaded
               (torch.distributed)                  both load their shards in lockstep
          <------------------------ RankReady       or RankFailed, and the process ends
RunStep(0), RunStep(1), ... ------>
          <------------------------ StepDone(0), StepDone(1), ...
Proceed(i) ----------------------->                 after a step that failed, when all may go on
Stop ----------------------------->
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import ErrorInfo
from replica.model.api import ModelShape
from replica.model_card import ModelCard
from replica.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class RankStart:
    """What to load, and where the ranks meet: `rendezvous` is a file that torch.distributed fills."""

    card: ModelCard
    config: ModelConfig
    scheduler: SchedulerConfig
    rank: int
    rendezvous: str
    parent_pid: int


@dataclass(frozen=True, slots=True)
class RankAwake:
    """From now on the process takes part in collectives."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """Its shard is loaded, tested and warm."""

    shape: ModelShape


@dataclass(frozen=True, slots=True)
class RankFailed:
    """It can't load its shard."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class RunStep:
    """`ticket` counts the steps given out, repeats included. Steps run in that order. `plan` is pickled, once for all
    ranks."""

    ticket: int
    plan: bytes

    @classmethod
    def of(cls, ticket: int, plan: StepPlan) -> RunStep:
        return cls(ticket, pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL))

    def unpacked(self) -> StepPlan:
        plan = pickle.loads(self.plan)
        assert isinstance(plan, StepPlan)
        return plan


@dataclass(frozen=True, slots=True)
class StepDone:
    """How a rank fared. `num_collectives`: how many collective operations it has begun so far in its life; ranks that
    agree on it wait for nobody. `failure`: what was raised, None for nothing."""

    ticket: int
    num_collectives: int
    failure: str | None = None
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Proceed:
    """Step `ticket` failed, but no rank is left waiting in a collective: the next one may run."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""
