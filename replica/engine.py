"""The engine: continuous batching as a loop of plan -> execute -> commit -> emit.

Each turn: expire what waited too long; let the scheduler plan; run the plan on the model; commit what came out; hand
all news over as one `EngineUpdate`. On a device that works on its own the plan that runs is the one of the turn before
(`engine_pipeline.py`). Requests come and go only between two turns. A step that fails is settled inside the turn
(`engine_recovery.py`: rows that fail alone end in an error, the rest is committed). A step that doesn't fit in device
memory is rolled back, the newest sequence gives its blocks back, and the token limit is halved for a while. Only when
the model can't run even one harmless token does `step` raise `EngineDead`.

One thread, no I/O, no clock and no random source of its own. Every sequence ends in `_ended`, whatever the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from replica.config import EngineConfig
from replica.engine_api import EngineCommands, EngineUpdate
from replica.engine_news import News
from replica.engine_pipeline import Pipeline, Ran
from replica.engine_rates import MemoryBrake, TokenRate
from replica.errors import (
    BrimfulError,
    EngineDead,
    ErrorInfo,
    InvalidRequest,
    QueueTimeout,
    StepFailed,
)
from replica.model.api import ModelRunner
from replica.request import FinishReason, GenerationRequest, LoadReport
from replica.request_check import check_request
from replica.scheduler.budgets import budgets_of, changed
from replica.scheduler.plan import PENDING_TOKEN, StepOutcome, StepPlan, StepResult
from replica.scheduler.scheduler import Scheduler

_FAILURE_TEXT = "the model failed on this request"


@dataclass(slots=True)
class _Sequence:
    """What the engine remembers of a live sequence; the rest is the scheduler's."""

    request_id: str
    index: int
    has_first_token: bool = False


class Engine:
    """One replica's engine. `random_seed` gives the seed of requests that name none; `clock` is monotonic seconds."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        clock: Callable[[], float],
        random_seed: Callable[[], int],
        replica_id: str,
        epoch: str,
    ) -> None:
        self._config = config
        self._limits = config.scheduler
        self._runner = runner
        self._clock = clock
        self._random_seed = random_seed
        self._replica_id = replica_id
        self._epoch = epoch
        self._scheduler = Scheduler(config.scheduler, runner.shape, check_invariants=config.check_invariants)
        self._pipeline = Pipeline(self._scheduler, runner)
        self._sequences: dict[int, _Sequence] = {}
        self._requests: dict[str, dict[int, int]] = {}  # request id -> index -> live sequence id
        self._next_seq_id = 0
        self._news = News()
        self._num_reports = 0
        self._idle_since_s: float | None = clock()
        self._handed_over_s = 0.0
        self._prefill_rate = TokenRate()
        self._decode_rate = TokenRate()
        self._brake = MemoryBrake(2 if config.scheduler.enable_chunked_prefill else runner.shape.max_model_len)

    # ---- orders, between two steps ----

    def apply(self, commands: EngineCommands) -> None:
        """Takes one batch of orders; what they cause is in the next update. Never raises for a request's content."""
        for request, arrived_at_s in commands.add:
            self.submit(request, arrived_at_s)
        for order in commands.end:
            self.end(order.request_id, order.sequence_index, order.reason)
        if commands.budgets:
            self.set_budgets(commands.budgets)

    def submit(self, request: GenerationRequest, arrived_at_s: float) -> None:
        """Takes all n sequences of a request or none: then it ends as REJECTED, with the reason."""
        try:
            self._admit(request, arrived_at_s)
        except BrimfulError as error:
            self._news.add(request.request_id, 0, finish_reason=FinishReason.REJECTED, error=error.info())
        else:
            self._news.accepted.append(request.request_id)

    def end(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends one or all sequences of a request. Idempotent in every state; blocks are free when it returns."""
        live = self._requests.get(request_id, {})
        for seq_id in [seq_id for at, seq_id in live.items() if index is None or at == index]:
            self._scheduler.abort(seq_id, self._clock())
            self._ended(seq_id, reason)

    def set_budgets(self, changes: dict[str, Any]) -> None:
        """Changes settings by name, see `scheduler/budgets.py`. Raises `SettingError`, and then nothing has changed."""
        self._limits = changed(self._config.scheduler, self._limits, changes, self._runner.shape)
        self._apply_limits()

    # ---- the loop ----

    @property
    def has_work(self) -> bool:
        """Some sequence isn't finished, a step is in flight, or news wait to be handed over."""
        return bool(self._sequences or self._pipeline) or self._news.waiting

    def step(self) -> EngineUpdate:
        """One turn of the loop. Raises `EngineDead`; `fail_all` then ends what is left."""
        started_s = self._clock()
        for seq_id in self._scheduler.expire(started_s):
            timeout = QueueTimeout(f"waited longer than {self._limits.queue_timeout_s:g} s for a place")
            self._ended(seq_id, FinishReason.TIMEOUT, error=timeout.info())
        ran = self._pipeline.advance(started_s, memory_is_short=self._brake.limit is not None)
        if ran is None:
            return self._update(started_s)
        if ran.result is None:
            self._give_way(ran.plan)
            return self._update(started_s)
        self._emit(self._scheduler.commit(ran.plan, ran.result, self._clock()))
        if self._brake.fitted(self._limits.max_num_batched_tokens):
            self._apply_limits()
        return self._update(started_s, ran)

    def idle_update(self) -> EngineUpdate:
        """A sign of life with a fresh load report, for an engine that has nothing to do."""
        return self._update(self._clock())

    def fail_all(self, error: EngineDead) -> EngineUpdate:
        """Ends every sequence with `error`: the last update of an engine that gives up."""
        for seq_id in list(self._sequences):
            self._ended(seq_id, FinishReason.ERROR, error=error.info())
        return self._update(self._clock())

    # ---- parts of it ----

    def _admit(self, request: GenerationRequest, arrived_at_s: float) -> None:
        check_request(request, self._runner.shape)
        if request.request_id in self._requests:
            raise InvalidRequest("a request with this id is being served already", param="request_id")
        seed = self._random_seed() if request.sampling.seed is None else request.sampling.seed
        taken: dict[int, int] = {}
        try:
            for number in range(request.n):
                seq_id = self._next_seq_id
                self._next_seq_id += 1
                index = request.first_index + number
                self._scheduler.add(seq_id, request, number, sequence_seed(seed, index), arrived_at_s)
                taken[index] = seq_id
        except BrimfulError:
            for seq_id in taken.values():
                self._scheduler.abort(seq_id)
                self._scheduler.forget(seq_id)
            raise
        self._requests[request.request_id] = taken
        for index, seq_id in taken.items():
            self._sequences[seq_id] = _Sequence(request.request_id, index)

    def _give_way(self, plan: StepPlan) -> None:
        """A step didn't fit in device memory: plan less next time. What doesn't fit alone at the floor, again and
        again, ends."""
        self._brake.failed(sum(plan.num_tokens), len(plan))
        if self._brake.gives_up():
            result = StepResult(plan.step, [PENDING_TOKEN], {0: StepFailed.code})
            self._emit(self._scheduler.commit(plan, result, self._clock()))
            return
        self._scheduler.rollback(plan)
        self._scheduler.preempt_newest()
        self._apply_limits()

    def _apply_limits(self) -> None:
        values = budgets_of(self._limits)
        if self._brake.limit is not None:
            tokens = min(self._limits.max_num_batched_tokens, self._brake.limit)
            values["max_num_batched_tokens"] = tokens
            values["max_num_seqs"] = min(self._limits.max_num_seqs, tokens - 1)
        self._scheduler.set_budgets(**values)

    def _emit(self, outcome: StepOutcome) -> None:
        """Turns a commit's columns into news."""
        columns = zip(
            outcome.seq_ids,
            outcome.token_ids,
            outcome.finish_reasons,
            outcome.stop_reasons,
            outcome.error_codes,
            strict=True,
        )
        for seq_id, token_id, finish_reason, stop_reason, error_code in columns:
            sequence = self._sequences[seq_id]
            if finish_reason is not None:
                error = None if error_code is None else ErrorInfo(error_code, _FAILURE_TEXT)
                self._ended(seq_id, finish_reason, token_id, stop_reason, error)
                continue
            num_cached = 0
            if not sequence.has_first_token:
                sequence.has_first_token = True
                num_cached = self._scheduler.timings(seq_id).num_cached_tokens
            self._news.add(sequence.request_id, sequence.index, token_id, num_cached_tokens=num_cached)

    def _ended(
        self,
        seq_id: int,
        reason: FinishReason,
        token_id: int = PENDING_TOKEN,
        stop_reason: int | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """The one end of every sequence: forgotten everywhere, its last row among the news. Its blocks are free."""
        sequence = self._sequences.pop(seq_id)
        live = self._requests[sequence.request_id]
        del live[sequence.index]
        if not live:
            del self._requests[sequence.request_id]
        timings = self._scheduler.timings(seq_id)
        self._scheduler.forget(seq_id)
        self._news.add(
            sequence.request_id,
            sequence.index,
            token_id,
            reason,
            stop_reason,
            error,
            timings.num_cached_tokens,
            timings,
        )

    def _update(self, started_s: float, ran: Ran | None = None) -> EngineUpdate:
        """Hands all news over, with what the step cost and how loaded the replica is now.

        A step lasts from its planning to its end, less the time that the step before it took of that: where steps
        overlap, a second counts once.
        """
        now_s = self._clock()
        idle_s = 0.0 if self._idle_since_s is None else max(0.0, started_s - self._idle_since_s)
        is_busy = self._sequences or self._pipeline
        self._idle_since_s = None if is_busy else started_s if ran is None else now_s
        plan, begun_s = (None, started_s) if ran is None else (ran.plan, max(ran.begun_s, self._handed_over_s))
        step_s = now_s - begun_s
        stats = self._scheduler.stats(plan, now_s, step_s=step_s, idle_s=idle_s)
        self._prefill_rate.add(stats.num_prefill_tokens + stats.num_recomputed_tokens, step_s)
        self._decode_rate.add(stats.num_decode_tokens, step_s)
        self._handed_over_s = now_s
        news, self._news = self._news, News()
        return news.as_update(now_s, stats, self._report(now_s))

    def _report(self, now_s: float) -> LoadReport:
        self._num_reports += 1
        return replace(
            self._scheduler.load(),
            replica_id=self._replica_id,
            epoch=self._epoch,
            number=self._num_reports,
            made_at_s=now_s,
            prefill_tokens_per_s=self._prefill_rate.per_s,
            decode_tokens_per_s=self._decode_rate.per_s,
        )


def sequence_seed(request_seed: int, index: int) -> int:
    """The sampler's seed of one of a request's sequences: 63 bits, the same in every process."""
    digest = hashlib.blake2b(f"{request_seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
