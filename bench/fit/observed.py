"""What a real engine did with a trace, in the columns in which a simulation reports: one way of counting for both."""

from __future__ import annotations

from collections.abc import Sequence

from bench.fit.engine import Order, Played, fixed_request
from bench.simulate.outcome import Outcome, columns_of
from bench.simulate.replica import Ended, SimulatedReplica
from bench.simulate.step_cost import StepCost
from bench.simulate.step_totals import StepTotals
from bench.traces.trace import Trace
from replica.config import SchedulerConfig
from replica.engine_api import EngineUpdate
from replica.model.api import ModelShape
from replica.request import GenerationRequest
from replica.scheduler.plan import PENDING_TOKEN


def requests_of(trace: Trace, vocab_size: int) -> list[GenerationRequest]:
    """Request i is named by its number, greedy, and makes exactly its tokens."""
    lengths = enumerate(trace.output_tokens)
    return [fixed_request(f"{trace.name}-{i}", trace.prompt_ids(i, vocab_size), length) for i, length in lengths]


def orders_of(trace: Trace, requests: Sequence[GenerationRequest], limits: SchedulerConfig) -> list[Order]:
    """Each request when the trace says; those of one moment together. The first brings the budgets back to `limits`,
    whatever was measured before."""
    found: dict[float, list[GenerationRequest]] = {}
    for arrival_s, request in zip(trace.arrival_s, requests, strict=True):
        found.setdefault(arrival_s, []).append(request)
    budgets = (("max_num_seqs", limits.max_num_seqs), ("max_num_batched_tokens", limits.max_num_batched_tokens))
    return [Order(at_s, tuple(found[at_s]), () if place else budgets) for place, at_s in enumerate(found)]


def simulated(
    trace: Trace, requests: Sequence[GenerationRequest], limits: SchedulerConfig, shape: ModelShape, cost: StepCost
) -> Outcome:
    """One replica in virtual time."""
    totals = StepTotals()
    replica = SimulatedReplica(limits, shape, cost, totals)
    for number, (arrival_s, request) in enumerate(zip(trace.arrival_s, requests, strict=True)):
        replica.submit(number, request, arrival_s)
    replica.advance(float("inf"))
    return Outcome(columns_of(trace.arrival_s, replica.ended), totals, 1, shape.num_blocks)


def observed(trace: Trace, requests: Sequence[GenerationRequest], played: Played, shape: ModelShape) -> Outcome:
    """A play of the same requests. A step's width is the number of its rows that made a token (the updates name no
    others)."""
    seen = _Seen({request.request_id: number for number, request in enumerate(requests)}, played.started_s)
    for update in played.updates:
        seen.take(update)
    return Outcome(columns_of(trace.arrival_s, seen.ended), seen.totals, 1, shape.num_blocks)


class _Seen:
    """Follows one play's updates."""

    def __init__(self, number_of: dict[str, int], started_s: float) -> None:
        self.totals = StepTotals()
        self.ended: list[Ended] = []
        self._number_of = number_of
        self._started_s = started_s
        self._last_end_s = 0.0
        self._tokens: dict[int, list[float]] = {}  # live request -> first token, last token, number of tokens

    def take(self, update: EngineUpdate) -> None:
        end_s, stats = update.made_at_s - self._started_s, update.stats
        made = [token != PENDING_TOKEN for token in update.token_ids]
        if stats.num_tokens:
            tokens = (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_recomputed_tokens)
            start_s = end_s - stats.step_s if stats.idle_s else self._last_end_s
            self.totals.add_step(max(0.0, start_s), end_s, sum(made), tokens, stats.num_waiting, stats.num_blocks_held)
            self._last_end_s = end_s
        for row, name in enumerate(update.request_ids):
            number = self._number_of[name]
            if made[row]:
                self._token(number, end_s)
            reason, timings = update.finish_reasons[row], update.timings[row]
            if reason is not None:
                first_s, _, count = self._tokens.pop(number, [None, None, 0])
                preemptions = timings.num_preemptions if timings else 0
                self.ended.append(Ended(number, reason, first_s, end_s, int(count or 0), preemptions))

    def _token(self, number: int, now_s: float) -> None:
        self.totals.num_output_tokens += 1
        seen = self._tokens.get(number)
        if seen is None:
            self._tokens[number] = [now_s, now_s, 1]
            return
        self.totals.itl.add(now_s - seen[1])
        seen[1] = now_s
        seen[2] += 1
