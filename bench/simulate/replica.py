"""One replica in virtual time: the real scheduler, steps that last as long as the cost model says, tokens without a
model.

The loop is the engine's (`replica/engine.py`): between two steps requests come in; then expire, plan, run, commit.

    submitted:     a     b  c                        d
    steps:      |--- 1 ---|------- 2 -------|-- 3 --|
    taken:       ^ (idle)  ^ b, c            ^       ^ d

Every request makes exactly `max_tokens` tokens unless the context ends before; all are token 0, so that a multi-turn
trace must bring its own prompts. A request's gaps between tokens are counted step by step: all that got a token in two
steps running share one gap.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from bench.simulate.step_cost import StepCost
from bench.simulate.step_totals import StepTotals
from replica.config import SchedulerConfig
from replica.engine_rates import TokenRate
from replica.errors import BrimfulError
from replica.model.api import ModelShape
from replica.request import FinishReason, GenerationRequest, LoadReport
from replica.scheduler.plan import StepOutcome, StepPlan, StepResult
from replica.scheduler.preemption import newest
from replica.scheduler.scheduler import Scheduler
from replica.scheduler.state import VictimRule


class Ended(NamedTuple):
    """One request's whole story, times in virtual seconds. REJECTED: never taken, `message` says why; TIMEOUT: waited
    too long for a place. `first_token_s` is None without a token."""

    number: int
    reason: FinishReason
    first_token_s: float | None
    end_s: float
    num_output_tokens: int
    num_preemptions: int
    message: str = ""


class SimulatedReplica:
    """`submit` in order of time, `advance`, then take what is in `accepted`, `started` (first token) and `ended` (and
    clear it). `now_s` is the next step boundary, or when the replica last fell idle. `totals` may be shared."""

    def __init__(
        self,
        config: SchedulerConfig,
        shape: ModelShape,
        cost: StepCost,
        totals: StepTotals,
        *,
        check_invariants: bool = False,
        victim_rule: VictimRule = newest,
    ) -> None:
        self.scheduler = Scheduler(config, shape, check_invariants=check_invariants, victim_rule=victim_rule)
        self.now_s = 0.0
        self.num_steps = 0
        self.ended: list[Ended] = []
        self.accepted: list[int] = []
        self.started: list[int] = []
        self._cost = cost
        self._totals = totals
        self._longest = shape.max_seq_len
        self._arriving: deque[tuple[float, int, GenerationRequest]] = deque()
        self._final_tokens: dict[int, int] = {}  # live request -> tokens that it makes in all
        self._first_token_s: dict[int, float] = {}
        self._paused: dict[int, float] = {}  # has tokens, but got none in the last step -> time of its last one
        self._last_end_s = 0.0  # of the last step
        self._last_rows: list[int] | None = []  # who got a token in the last step and lives; None: see `_last_set`
        self._last_set: set[int] = set()
        self._tokens = [0] * (config.max_num_seqs + 1)
        self._prefill_rate, self._decode_rate = TokenRate(), TokenRate()

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is about to come in."""
        return not self.scheduler.has_work and not self._arriving

    def submit(self, number: int, request: GenerationRequest, at_s: float) -> None:
        """The request reaches the replica at `at_s` and is looked at in the next step boundary. One sequence each."""
        self._arriving.append((at_s, number, request))

    def next_s(self) -> float | None:
        """When the next step begins, as far as it is known now; None while idle."""
        if self.scheduler.has_work:
            return self.now_s
        return max(self.now_s, self._arriving[0][0]) if self._arriving else None

    def advance(self, until_s: float) -> None:
        """Run all steps that begin before `until_s`; the last one may end after it."""
        while (begins_s := self.next_s()) is not None and begins_s < until_s:
            self.step()

    def step(self) -> None:
        """Go to the next step boundary at which there is work, take what has come in, and run one step."""
        begins_s = self.next_s()
        assert begins_s is not None, "an idle replica has no step"
        self.now_s = begins_s
        self._take()
        scheduler = self.scheduler
        for number in scheduler.expire(begins_s):
            self._end(number, FinishReason.TIMEOUT)
        plan = scheduler.plan(begins_s)
        if plan is None:
            self._nothing_planned()
            return
        ends_s = begins_s + self._cost.of_plan(plan)
        num_rows = len(plan.seq_ids)
        tokens = (plan.num_prefill_tokens, plan.num_decode_tokens, plan.num_recomputed_tokens)
        held = scheduler.block_pool.num_held
        self._totals.add_step(begins_s, ends_s, num_rows, tokens, scheduler.num_waiting, held)
        self._prefill_rate.add(plan.num_prefill_tokens + plan.num_recomputed_tokens, ends_s - begins_s)
        self._decode_rate.add(plan.num_decode_tokens, ends_s - begins_s)
        outcome = scheduler.commit(plan, self._result(plan, num_rows), ends_s)
        self.num_steps += 1
        self._count_gaps(outcome.seq_ids, ends_s)
        self.now_s = ends_s
        if any(outcome.finish_reasons):
            self._end_all(outcome)

    def load(self) -> LoadReport:
        """As the scheduler reports it: unsigned, without rates (see `rates`)."""
        return self.scheduler.load()

    @property
    def rates(self) -> tuple[float, float]:
        """Prefill and decode tokens per second, measured as the engine measures them."""
        return self._prefill_rate.per_s, self._decode_rate.per_s

    def _take(self) -> None:
        while self._arriving and self._arriving[0][0] <= self.now_s:
            at_s, number, request = self._arriving.popleft()
            try:
                self.scheduler.add(number, request, 0, 0, at_s)
            except BrimfulError as error:
                self.ended.append(Ended(number, FinishReason.REJECTED, None, self.now_s, 0, 0, error.message))
                continue
            room = self._longest - len(request.prompt_ids)
            self._final_tokens[number] = min(request.sampling.max_tokens, room)
            self.accepted.append(number)

    def _result(self, plan: StepPlan, num_rows: int) -> StepResult:
        if num_rows > len(self._tokens):
            self._tokens = [0] * num_rows
        return StepResult(plan.step, self._tokens[:num_rows])

    def _nothing_planned(self) -> None:
        """Time must pass before anything can be computed: until somebody comes in. A live engine would ask again."""
        if not self.scheduler.has_work:
            return
        if not self._arriving:
            raise RuntimeError(f"{self.scheduler.num_waiting} requests wait at {self.now_s:.6f} s, none can be planned")
        self.now_s = self._arriving[0][0]

    def _count_gaps(self, rows: list[int], now_s: float) -> None:
        """`rows` got a token now. Who got one in the last step too has waited since then, the same for all of them."""
        totals = self._totals
        totals.num_output_tokens += len(rows)
        if rows and rows == self._last_rows:
            totals.itl.add(now_s - self._last_end_s, len(rows))
        else:
            self._count_changed(rows, now_s)
        self._last_end_s = now_s

    def _count_changed(self, rows: list[int], now_s: float) -> None:
        last = self._last_set if self._last_rows is None else set(self._last_rows)
        current = set(rows)
        num_both = len(last & current)
        if num_both:
            self._totals.itl.add(now_s - self._last_end_s, num_both)
        for number in current - last:
            paused_s = self._paused.pop(number, None)
            if paused_s is None:
                self._first_token_s[number] = now_s
                self.started.append(number)
            else:
                self._totals.itl.add(now_s - paused_s)
        for number in last - current:
            self._paused[number] = self._last_end_s
        self._last_rows = list(rows)

    def _end_all(self, outcome: StepOutcome) -> None:
        pairs = zip(outcome.seq_ids, outcome.finish_reasons, strict=True)
        ends = [(number, reason) for number, reason in pairs if reason is not None]
        for number, reason in ends:
            self._end(number, reason)
        self._last_set = set(outcome.seq_ids).difference([number for number, _ in ends])
        self._last_rows = None

    def _end(self, number: int, reason: FinishReason) -> None:
        num_preemptions = self.scheduler.timings(number).num_preemptions
        self.scheduler.forget(number)
        final = self._final_tokens.pop(number)
        self._paused.pop(number, None)
        first_s = self._first_token_s.pop(number, None)
        num_tokens = final if reason is FinishReason.LENGTH else 0
        self.ended.append(Ended(number, reason, first_s, self.now_s, num_tokens, num_preemptions))
