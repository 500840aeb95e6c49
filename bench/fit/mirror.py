"""Which plan each measured step ran: the scheduler is deterministic, so a second one, told the same, knows.

An update tells how many tokens its step had, not which. A scheduler with the same settings and shape, given the same
requests and budgets at the same step boundaries (an update names the requests that it took first), as far ahead of its
commits, makes the same plans again. Its tokens are made up, which changes no plan as long as every request ends by
length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.fit.engine import MeasuredEngine, Order, Played
from replica.engine_api import EngineUpdate
from replica.request import FinishReason
from replica.scheduler.plan import StepPlan, StepResult
from replica.scheduler.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from replica.stats import StepStats

_TOKEN = 1


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """`seconds`: from the end of the step before to the end of this one, so all that a step costs: taking orders,
    planning, the forward, commit, handing over. None after an idle engine, where no step came before."""

    plan: StepPlan
    seconds: float | None


def measured_steps(engine: MeasuredEngine, orders: Sequence[Order], played: Played) -> Iterator[MeasuredStep]:
    """The steps of a play, with their plans. `engine` must have been idle before, and its prefix cache must not know
    the prompts. Raises `ValueError` when the engine did something else than its scheduler would."""
    scheduler = Scheduler(engine.config.scheduler, engine.shape)
    order_of = {order.requests[0].request_id: order for order in orders}
    requests = {request.request_id: request for order in orders for request in order.requests}
    num_sequences, before_s = 0, None
    depth = MAX_PLANS_IN_FLIGHT if engine.is_async else 1
    in_flight: deque[StepPlan] = deque()
    for update in played.updates:
        _require_ends_by_length(update)
        for name in update.accepted:
            scheduler.add(num_sequences, requests[name], 0, 0, update.made_at_s)
            num_sequences += 1
            if name in order_of and order_of[name].budgets:
                scheduler.set_budgets(**dict(order_of[name].budgets))
        if not update.stats.num_tokens:
            before_s = None
            continue
        while len(in_flight) < depth and (made := scheduler.plan(update.made_at_s)) is not None:
            in_flight.append(made)
        plan = in_flight.popleft() if in_flight else None
        planned, done = None if plan is None else _split(plan), _split(update.stats)
        if plan is None or planned != done:
            raise ValueError(f"a step of the engine had {done} tokens (prefill, decode, again), its plan has {planned}")
        yield MeasuredStep(plan, None if before_s is None else update.made_at_s - before_s)
        outcome = scheduler.commit(plan, StepResult(plan.step, [_TOKEN] * len(plan)), update.made_at_s)
        for seq_id, reason in zip(outcome.seq_ids, outcome.finish_reasons, strict=True):
            if reason is not None:
                scheduler.forget(seq_id)
        before_s = update.made_at_s if scheduler.has_work else None


def _require_ends_by_length(update: EngineUpdate) -> None:
    for reason, error in zip(update.finish_reasons, update.errors, strict=True):
        if reason not in (None, FinishReason.LENGTH):
            raise ValueError(f"a measured request ended by {reason}: {error.message if error else 'no reason given'}")


def _split(step: StepPlan | StepStats) -> tuple[int, int, int]:
    return step.num_prefill_tokens, step.num_decode_tokens, step.num_recomputed_tokens
