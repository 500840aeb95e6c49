"""Which sequences compute in the next step, and what a step changed. The only owner of scheduling state.

    add -> [ waiting ] -> plan: enters the batch -> plan, commit, plan, commit ... -> ended
                 ^                      |
                 +----- preempted ------+

`planning.py` states how a step is made, `admission.py` who may enter, `preemption.py` who gives blocks back,
`commit.py` what a result changes. Pure: no clock, no I/O, no threads; the caller passes times in (one monotonic clock)
and calls from one thread.

Overlap: `plan(n + 1)` may be called before `commit(n)`, while the device works. Tokens in flight are `PENDING_TOKEN`.
A sequence that must end by length at step n isn't planned in n + 1 and its place is free there already; the row of one
that turns out to have ended is ignored at `commit(n + 1)`.
"""

from __future__ import annotations

from typing import Any

from replica.config import SchedulerConfig
from replica.errors import SettingError
from replica.model.api import ModelShape
from replica.request import GenerationRequest, LoadReport
from replica.scheduler import invariants
from replica.scheduler.block_pool import BlockPool
from replica.scheduler.block_tables import BlockTables
from replica.scheduler.budgets import changed, check_against_model
from replica.scheduler.commit import commit_step, end_sequences, roll_back_step
from replica.scheduler.intake import check_queue, check_request, make_sequence
from replica.scheduler.plan import StepOutcome, StepPlan, StepResult
from replica.scheduler.planning import plan_step
from replica.scheduler.preemption import may_lose, newest, preempt
from replica.scheduler.prefix_cache import PrefixCache
from replica.scheduler.running_batch import RunningBatch
from replica.scheduler.sequence import SequenceStatus
from replica.scheduler.state import SchedulerState, Tally, VictimRule
from replica.scheduler.waiting_queue import WaitingQueue
from replica.stats import RequestTimings, StepStats

MAX_PLANS_IN_FLIGHT = 2


class Scheduler:
    """Continuous batching over paged KV blocks for one model replica."""

    def __init__(
        self,
        config: SchedulerConfig,
        shape: ModelShape,
        *,
        check_invariants: bool = False,
        victim_rule: VictimRule = newest,
    ) -> None:
        check_against_model(config, shape)
        if check_invariants and not __debug__:
            raise SettingError("check_invariants", True, "only False under python -O, which leaves all checks out")
        pool = BlockPool(shape.num_blocks)
        cache = PrefixCache(pool) if config.enable_prefix_caching else None
        self._start_config = config
        self._check_always = check_invariants
        self._state = SchedulerState(
            config=config,
            shape=shape,
            tables=BlockTables(pool, shape.block_size, cache),
            batch=RunningBatch(config.max_num_seqs),
            waiting=WaitingQueue(),
            victim_rule=victim_rule,
        )

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force now."""
        return self._state.config

    @property
    def block_pool(self) -> BlockPool:
        """For tests and debug builds: set `on_poison` to overwrite blocks whose content lost its meaning."""
        return self._state.tables.pool

    @property
    def num_running(self) -> int:
        return len(self._state.batch)

    @property
    def num_waiting(self) -> int:
        return len(self._state.waiting)

    @property
    def has_work(self) -> bool:
        """Some sequence hasn't ended."""
        return bool(self._state.live)

    def add(self, seq_id: int, request: GenerationRequest, index: int, seed: int, now_s: float) -> None:
        """Queue sequence `index` of a request. `seq_id` is new; `seed` is the sampler's, final.

        The queue must have room for all n sequences when the first is added; the others are then taken without a
        question, so add all n before anything else. An empty queue takes any request.
        Raises InvalidRequest, PromptTooLong (can never fit; names the largest input that would), QueueFull.
        """
        state = self._state
        if seq_id in state.live or seq_id in state.ended:
            raise ValueError(f"sequence {seq_id} exists already")
        check_request(state, request)
        if index == 0:
            check_queue(state, request, now_s)
        seq = make_sequence(state, seq_id, request, index, seed, now_s)
        state.live[seq_id] = seq
        state.waiting.add_fresh(seq)

    def abort(self, seq_id: int, now_s: float | None = None) -> bool:
        """End a sequence in any state, also between plan and commit; blocks are free at once. False: it isn't live."""
        seq = self._state.live.get(seq_id)
        if seq is None:
            return False
        end_sequences(self._state, [seq], now_s)
        self._checked(f"aborting sequence {seq_id}")
        return True

    def expire(self, now_s: float) -> list[int]:
        """End the sequences that have waited longer than `queue_timeout_s`, oldest first; never preempted ones."""
        expired = self._state.waiting.expired(now_s - self.config.queue_timeout_s)
        for seq in expired:
            end_sequences(self._state, [seq], now_s)
        return [seq.seq_id for seq in expired]

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, now in flight; None when nothing can be computed (before a commit, perhaps)."""
        assert len(self._state.in_flight) < MAX_PLANS_IN_FLIGHT, "commit or roll back before planning further ahead"
        record = plan_step(self._state, now_s)
        self._checked(f"planning step {self._state.num_steps}")
        return None if record is None else record.plan

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> StepOutcome:
        """Apply the result of the oldest plan in flight. Every row of the plan has one in the result; rows that
        weren't computed, because they made the step fail, are named in `failed_rows`."""
        in_flight = self._state.in_flight
        assert in_flight and in_flight[0].plan.step == plan.step == result.step, "commit plans in order, each once"
        outcome = commit_step(self._state, in_flight.pop(0), result, now_s)
        self._checked(f"committing step {plan.step}")
        return outcome

    def rollback(self, plan: StepPlan) -> None:
        """Nothing of this plan was computed (nor of later ones, which are rolled back too): the same work is planned
        again. Who was preempted for it stays preempted. Does nothing when the plan isn't in flight."""
        in_flight = self._state.in_flight
        if all(record.plan.step != plan.step for record in in_flight):
            return
        while in_flight and in_flight[-1].plan.step >= plan.step:
            roll_back_step(self._state, in_flight.pop())
        self._checked(f"rolling back step {plan.step}")

    def preempt_newest(self) -> bool:
        """Make the batch smaller by one, for a step that ran out of memory; the next plan admits nobody. False when
        at most one sequence runs."""
        candidates = may_lose(self._state.batch.running, self.config.policy)
        if not candidates:
            return False
        preempt(self._state, newest(candidates, self._state.tables.pool))
        self._state.admit_nobody = True
        self._checked("preempting the newest")
        return True

    def set_budgets(self, **changes: Any) -> None:
        """Change budgets of a running scheduler, between two steps; `budgets.py` says which. None rises above its
        start value. Raises SettingError, and then nothing has changed.

        `max_num_seqs` below the running count admits nobody until enough have ended, and preempts nobody.
        """
        self._state.config = changed(self._start_config, self.config, changes, self._state.shape)

    def timings(self, seq_id: int) -> RequestTimings:
        """Of a sequence that is live or ended; KeyError once forgotten."""
        seq = self._state.live.get(seq_id) or self._state.ended[seq_id]
        return RequestTimings(
            queued_at_s=seq.queued_at_s,
            scheduled_at_s=seq.scheduled_at_s,
            first_token_at_s=seq.first_token_at_s,
            finished_at_s=seq.finished_at_s,
            num_preemptions=seq.num_preemptions,
            num_cached_tokens=seq.num_cached_tokens,
        )

    def forget(self, seq_id: int) -> None:
        """Drop what is kept of an ended sequence. Every ended sequence must be forgotten once."""
        self._state.ended.pop(seq_id, None)

    def stats(self, plan: StepPlan | None, now_s: float, *, step_s: float, idle_s: float) -> StepStats:
        """What `plan` (None: no step) and the state after it look like. Preemptions and prefix tokens are counted
        since the previous call."""
        state, tally = self._state, self._state.tally
        pool = state.tables.pool
        state.tally = Tally()
        by_reason = dict.fromkeys(("budget", "seqs", "blocks", "long_prefill"), 0)
        by_reason["long_prefill"] = state.waiting.num_parked
        by_reason[state.blocked_by or "budget"] += len(state.waiting) - state.waiting.num_parked
        return StepStats(
            step=state.num_steps if plan is None else plan.step,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_waiting_by_reason=by_reason,
            num_prefill_tokens=0 if plan is None else plan.num_prefill_tokens,
            num_decode_tokens=0 if plan is None else plan.num_decode_tokens,
            num_recomputed_tokens=0 if plan is None else plan.num_recomputed_tokens,
            token_budget=self.config.max_num_batched_tokens if plan is None else plan.token_budget,
            num_blocks_held=pool.num_held,
            num_blocks_cached=pool.num_cached_free,
            num_blocks_total=pool.num_blocks,
            num_preemptions=tally.num_preemptions,
            prefix_query_tokens=tally.prefix_query_tokens,
            prefix_hit_tokens=tally.prefix_hit_tokens,
            oldest_waiting_s=state.waiting.oldest_wait_s(now_s),
            step_s=step_s,
            idle_s=idle_s,
        )

    def load(self, max_hashes: int = 1024) -> LoadReport:
        """A report that its replica has yet to sign: identity, number, time and rates are empty. Hashes: what the
        prefix cache added and evicted since the previous call, at most `max_hashes` of each; the rest comes with the
        next."""
        state = self._state
        pool, cache = state.tables.pool, state.tables.cache
        gaps = [seq.gap for seq in state.prefilling if seq.status is SequenceStatus.RUNNING]
        added, evicted = ((), ()) if cache is None else cache.take_changes(max_hashes)
        num_preempted_tokens = state.waiting.num_returned_tokens
        return LoadReport(
            replica_id="",
            epoch="",
            number=0,
            made_at_s=0.0,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_waiting_tokens=state.waiting.num_fresh_tokens + num_preempted_tokens,
            num_preempted=len(state.waiting.returned),
            num_preempted_tokens=num_preempted_tokens,
            num_prefill_tokens=sum(gap for gap in gaps if gap > 1),
            num_blocks_total=pool.num_blocks,
            num_blocks_free=pool.num_free - pool.num_cached_free,
            num_blocks_cached=pool.num_cached_free,
            block_size=state.tables.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            block_hashes_added=added,
            block_hashes_evicted=evicted,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when the state contradicts itself. Costs O(blocks + sequences); `invariants.py` says
        how much."""
        invariants.check(self._state)

    def _checked(self, after: str) -> None:
        """With `check_invariants`: raises InvariantBroken, which says what is broken, and after what."""
        if self._check_always:
            try:
                invariants.check(self._state)
            except AssertionError as error:
                raise invariants.InvariantBroken(f"{error}, after {after}") from error
