"""What planning, admission, preemption and commit share: the scheduler's whole mutable state in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.scheduler.block_pool import BlockPool
from replica.scheduler.block_tables import BlockTables
from replica.scheduler.decode_rows import DecodeRows
from replica.scheduler.plan import StepPlan
from replica.scheduler.running_batch import RunningBatch
from replica.scheduler.sequence import Sequence
from replica.scheduler.waiting_queue import WaitingQueue

VictimRule = Callable[[list[Sequence], BlockPool], Sequence]
"""Picks who gives its blocks back, from those that may lose: never none, newest arrival first."""

BlockedBy = Literal["budget", "seqs", "blocks", "long_prefill"]


@dataclass(slots=True)
class Tally:
    """Counted since the last `stats()`."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(slots=True)
class InFlight:
    """A plan that is neither committed nor rolled back, with what its rows were when it was made.

    `ends[i]`: known tokens of row i when its chunk is done. `admissions[i]`: the stay that the row belongs to.
    `num_running_before`: running sequences when the plan was begun. `num_departures`: of the running batch, when the
    plan was sealed. The first rows of the plan are the `decodes`.
    """

    plan: StepPlan
    decodes: DecodeRows
    seqs: list[Sequence]
    ends: list[int]
    admissions: list[int]
    num_running_before: int
    num_departures: int


@dataclass(slots=True)
class SchedulerState:
    """`config` is the live one: budgets may lie below those it started with. `blocked_by`: what stopped the last
    admission pass, None when nothing was left waiting. `live`: all that haven't ended; `ended`: those that have, until
    they are forgotten. `decode_rows`: of the newest plan, which the next one carries on; None: look at every sequence.
    `prefilling`: all running sequences with a gap above 1 are among these, the others had one at the last plan.
    `refilling`: the fixed batch of `batching = static` still takes members. `admit_nobody`: the next plan only, and
    while anything runs. `now_s`: the time of the last plan or commit, which is when those between them happen that are
    told no time (preemption, rollback)."""

    config: SchedulerConfig
    shape: ModelShape
    tables: BlockTables
    batch: RunningBatch
    waiting: WaitingQueue
    victim_rule: VictimRule
    live: dict[int, Sequence] = field(default_factory=dict)
    ended: dict[int, Sequence] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    in_flight: list[InFlight] = field(default_factory=list)
    decode_rows: DecodeRows | None = None
    prefilling: list[Sequence] = field(default_factory=list)
    blocked_by: BlockedBy | None = None
    admit_nobody: bool = False
    refilling: bool = False
    num_steps: int = 0
    num_arrivals: int = 0
    now_s: float = 0.0


@dataclass(slots=True)
class StepDraft:
    """A plan being made. `budget`: tokens not given out yet. `rows`: all running sequences with a gap of 1;
    `decodes`: those that get their token (their `chunk` stays 0), the same list unless somebody doesn't;
    `chunks`: rows of `chunk` tokens. `prefills`: all in the batch whose gap is, or was on admission, wider than that;
    some may get nothing. `due`: decodes that take a block or get their last token. `preempted`: somebody gave blocks
    back in this step. `growth`: blocks that the decodes will take in so many steps, once asked for. `owed`: blocks that
    the `prefills` still have to take for all they know, once asked for, while who enters is looked at."""

    budget: int
    num_running_before: int
    rows: DecodeRows
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    due: list[Sequence] = field(default_factory=list)
    preempted: bool = False
    growth: dict[int, int] = field(default_factory=dict)
    owed: int | None = None

    def give(self, seq: Sequence, num_tokens: int) -> None:
        if not seq.chunk:
            self.chunks.append(seq)
        seq.chunk += num_tokens
        self.budget -= num_tokens

    def withdraw(self, seq: Sequence) -> None:
        """Take the sequence out of this step; its tokens return to the budget."""
        if seq in self.prefills:
            self.prefills.remove(seq)
        if seq.chunk:
            self.budget += seq.chunk
            seq.chunk = 0
            self.chunks.remove(seq)
        elif seq in self.decodes:
            self.budget += 1
            self.decodes = [decode for decode in self.decodes if decode is not seq]
