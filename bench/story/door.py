"""The queue at the door: requests come faster than fixed batches take them, slower than continuous ones do.

Lengths are W7, arrivals Poisson at the geometric mean of the two capacities (by the closed form), the same for both.
While requests still come, the queue behind fixed batches must grow though every step runs; behind continuous ones it
mustn't.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from bench.fit.engine import MeasuredEngine
from bench.simulate.step_cost import StepCost
from bench.story.closed_form import closed_form
from bench.story.lengths import LengthDistribution
from bench.story.measures import over_time
from bench.story.readings import Reading
from bench.story.replay import Replay, replay
from bench.story.spread import SpreadSize, spread_trace
from bench.traces.trace import Trace

_NUM_PARTS = 4


@dataclass(frozen=True, slots=True)
class Door:
    """While requests still came: how many waited, on average, in each quarter of the time, and tokens per second.
    `tokens_per_s_asked`: what keeping up would have taken. `load_*`: arrivals as a share of a capacity."""

    load_static: float
    load_continuous: float
    tokens_per_s_asked: float
    waiting_static: tuple[float, ...]
    waiting_continuous: tuple[float, ...]
    tokens_per_s_static: float
    tokens_per_s_continuous: float


def play_door(
    static: MeasuredEngine,
    continuous: MeasuredEngine,
    distribution: LengthDistribution,
    size: SpreadSize,
    cost: StepCost,
    progress: Callable[[str], None],
) -> Door:
    """The same arrivals to both."""
    full = closed_form(distribution, size.batch_size, size.num_prompt_tokens, cost)
    capacities = size.batch_size / full.seconds_static, size.batch_size / full.seconds_continuous
    rate = sqrt(capacities[0] * capacities[1])
    trace = _arriving(spread_trace(distribution, size), rate)
    fixed = replay(static, trace, progress, "the queue at the door, fixed batches")
    refilled = replay(continuous, trace, progress, "the queue at the door, continuous")
    span_s = trace.arrival_s[-1]
    return Door(
        load_static=rate / capacities[0],
        load_continuous=rate / capacities[1],
        tokens_per_s_asked=sum(trace.output_tokens) / span_s,
        waiting_static=tuple(over_time(fixed, fixed.steps.waiting, _NUM_PARTS, span_s)),
        waiting_continuous=tuple(over_time(refilled, refilled.steps.waiting, _NUM_PARTS, span_s)),
        tokens_per_s_static=_tokens_until(fixed, span_s) / span_s,
        tokens_per_s_continuous=_tokens_until(refilled, span_s) / span_s,
    )


def _arriving(trace: Trace, rate: float) -> Trace:
    source, now_s, arrivals = random.Random(trace.seed), 0.0, array("d")
    for _ in range(len(trace)):
        arrivals.append(now_s)
        now_s += source.expovariate(rate)
    return replace(trace, arrival_s=arrivals)


def _tokens_until(played: Replay, at_s: float) -> int:
    steps = played.steps
    return sum(width for width, ended_s in zip(steps.width, steps.ended_s, strict=True) if ended_s <= at_s)


def read_door(door: Door, batch_size: int) -> Reading:
    """Shown when the one queue grows from quarter to quarter and the other stays below a batch."""
    grows = all(later > sooner for sooner, later in zip(door.waiting_static, door.waiting_static[1:], strict=False))
    stays = max(door.waiting_continuous) < batch_size
    rates = (
        f"tokens per second: {door.tokens_per_s_static:.0f} and {door.tokens_per_s_continuous:.0f} of "
        f"{door.tokens_per_s_asked:.0f} asked"
    )
    fixed, continuous = _quarters(door.waiting_static), _quarters(door.waiting_continuous)
    text = f"waiting behind fixed batches {fixed}, {continuous} behind continuous ones ({rates})"
    if not grows or not stays:
        return Reading(False, f"not shown: {text}")
    return Reading(True, f"work waits and can't get in: {text}")


def _quarters(waiting: tuple[float, ...]) -> str:
    return " -> ".join(f"{value:.1f}" for value in waiting)
