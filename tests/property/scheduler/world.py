"""A scheduler, the fake model and the ledger that watches them, driven the way an engine drives them."""

from __future__ import annotations

from dataclasses import dataclass, field

from replica.config import SchedulerConfig
from replica.errors import BrimfulError
from replica.model.api import InFlightStep, ModelShape, OutOfDeviceMemory
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.plan import StepOutcome, StepPlan, StepResult
from replica.scheduler.scheduler import Scheduler
from tests.property.scheduler.ledger import Ledger

VOCAB = 50


def shape_of(num_blocks: int, block_size: int, max_model_len: int = 10_000) -> ModelShape:
    return ModelShape(num_blocks, block_size, VOCAB, max_model_len, eos_token_ids=(1, 2))


def request(prompt: list[int], max_tokens: int, **fields: object) -> GenerationRequest:
    """A greedy request; `fields` are those of the request or of its sampling."""
    ours = {k: fields.pop(k) for k in ("priority", "cache_salt", "n", "prior_output_ids") if k in fields}
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    return GenerationRequest("request", tuple(prompt), sampling, **ours)  # type: ignore[arg-type]


@dataclass
class World:
    config: SchedulerConfig
    model: FakeModel
    now_s: float = 0.0
    num_mishaps: int = 0
    scheduler: Scheduler = field(init=False)
    ledger: Ledger = field(init=False)
    in_flight: list[tuple[StepPlan, InFlightStep]] = field(init=False, default_factory=list)
    seeds: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.model.shape, check_invariants=True)
        self.scheduler.block_pool.on_poison = self.model.poison
        self.ledger = Ledger(self.scheduler, self.model.shape.block_size)

    def add(self, new: GenerationRequest, seed: int = 0) -> int | None:
        """The sequence's id, None when it was refused."""
        seq_id = len(self.ledger.books)
        self.ledger.arrived(seq_id, new, self.now_s)
        self.seeds[seq_id] = seed
        try:
            self.scheduler.add(seq_id, new, 0, seed, self.now_s)
        except BrimfulError:
            self.ledger.ended(seq_id, FinishReason.REJECTED)
            return None
        return seq_id

    def plan(self) -> StepPlan | None:
        plan = self._checked_plan()
        if plan is not None:
            self.in_flight.append((plan, self.model.submit(plan)))
        return plan

    def _checked_plan(self) -> StepPlan | None:
        self.ledger.before_plan(self.now_s)
        plan = self.scheduler.plan(self.now_s)
        if plan is None:
            self.ledger.not_planned()
        else:
            self.ledger.planned(plan)
        return plan

    def commit(self) -> StepOutcome:
        plan, step = self.in_flight.pop(0)
        return self.commit_result(plan, step.result())

    def commit_result(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        outcome = self.scheduler.commit(plan, result, self.now_s)
        self.ledger.committed(plan, outcome)
        return outcome

    def step(self) -> StepPlan | None:
        """Plan and commit one step after whatever is in flight."""
        while self.in_flight:
            self.commit()
        plan = self.plan()
        if plan is not None:
            self.commit()
        return plan

    def rollback(self, which: int = 0) -> None:
        """The step in this place among those in flight raised: it and later ones sampled nothing."""
        plan = self.in_flight[which][0]
        self.scheduler.rollback(plan)
        self.ledger.rolled_back(plan)
        del self.in_flight[which:]

    def abort(self, seq_id: int) -> None:
        live = self.ledger.books[seq_id].end is None
        assert self.scheduler.abort(seq_id) == live
        assert not self.scheduler.abort(seq_id)
        if live:
            self.ledger.ended(seq_id, FinishReason.ABORT)

    def expire(self) -> list[int]:
        expired = self.scheduler.expire(self.now_s)
        for seq_id in expired:
            self.ledger.ended(seq_id, FinishReason.TIMEOUT)
        return expired

    def drain(self) -> int:
        """Step until everything has ended; some sequence gains a token within a bounded number of steps."""
        largest = min(self.model.shape.max_model_len, self.model.shape.num_blocks * self.model.shape.block_size)
        steps = silent = 0
        while self.scheduler.has_work:
            received = self.ledger.num_received
            plan = self.step()
            assert plan is not None or not self.scheduler.has_work, (
                "law 6: deadlock: work is left and nothing is planned"
            )
            steps += 1
            silent = 0 if self.ledger.num_received > received else silent + 1
            assert silent <= largest + 1, "law 6: livelock: no sequence gains a token"
        while self.in_flight:
            self.commit()
        return steps

    def drain_survivably(self) -> None:
        while self.scheduler.has_work:
            self.step_survivably()

    def step_survivably(self) -> None:
        """Like an engine under faults: out of memory preempts, a step that raises is tried row by row."""
        plan = self._checked_plan()
        assert plan is not None
        try:
            result = self.model.submit(plan).result()
        except OutOfDeviceMemory:
            self.scheduler.rollback(plan)
            self.ledger.rolled_back(plan)
            self.scheduler.preempt_newest()
            return
        except RuntimeError:
            result = self._row_by_row(plan)
        self.commit_result(plan, result)

    def _row_by_row(self, plan: StepPlan) -> StepResult:
        tokens, failed = [], {}
        for row in range(len(plan)):
            result = self._one_row(plan.select([row]))
            tokens.append(result.token_ids[0])
            if result.failed_rows:
                failed[row] = result.failed_rows[0]
        return StepResult(plan.step, tokens, failed)

    def _one_row(self, plan: StepPlan) -> StepResult:
        while True:
            try:
                return self.model.submit(plan).result()
            except OutOfDeviceMemory:
                continue
            except RuntimeError:
                return StepResult(plan.step, [-1], {0: "step_failed"})

    def check_cached_blocks(self) -> None:
        """Every name in the prefix cache is that of a full block of some sequence, whose KV is in the block named."""
        cache = self.scheduler._state.tables.cache
        for content, block in {} if cache is None else cache._block_of.items():
            tokens = self.ledger.tokens_named(content)
            assert tokens is not None, "rule of the cache: a name that no full block has"
            assert self.model._slots[block] == tokens, "law 4: a cached block doesn't hold what its name says"

    def check_outputs(self) -> None:
        """Whoever ran to its end gave what it gives alone; whoever was cut gave the beginning of that."""
        for seq_id, book in self.ledger.books.items():
            if book.end is FinishReason.REJECTED:
                continue
            tokens, reason = self.model.alone(book.request, self.seeds[seq_id])
            if book.end in (FinishReason.STOP, FinishReason.LENGTH):
                assert (book.received, book.end) == (tokens, reason), f"law 8: sequence {seq_id}"
            else:
                assert book.received == tokens[: len(book.received)], f"law 8: sequence {seq_id}"
