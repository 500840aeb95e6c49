"""Rounds of both sides, one after the other, so that what the machine does meanwhile hits both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bench.scheduler_speed.workload import Side, StepTimes, Workload


@dataclass(frozen=True, slots=True)
class CaseTimes:
    """One workload's rounds; `peer` is empty when there was none."""

    workload: Workload
    ours: list[StepTimes]
    peer: list[StepTimes]


def measure(
    workload: Workload, ours: Side, peer: Side | None, *, rounds: int, steps: int, progress: Callable[[str], None]
) -> CaseTimes:
    """Builds the workload on both sides; then `rounds` times `steps` steps on each, alternating. One round before
    them isn't counted."""
    name = f"{workload.num_running} running, {workload.num_waiting} waiting for {workload.blocked_by}"
    progress(f"{name}: prefilling")
    sides = [ours] if peer is None else [ours, peer]
    for side in sides:
        side.start(workload)
        side.run_round(steps)
    times: list[list[StepTimes]] = [[], []]
    for number in range(rounds):
        progress(f"{name}: round {number + 1} of {rounds}")
        for side, taken in zip(sides, times, strict=False):
            taken.append(side.run_round(steps))
    return CaseTimes(workload, *times)


def median(times: list[StepTimes], of: Callable[[StepTimes], float]) -> float:
    return statistics.median(map(of, times))


def spread(times: list[StepTimes]) -> float:
    """Half the distance between the quartiles of plan + commit, as a share of their median."""
    steps = [each.step_us for each in times]
    if len(steps) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    return (high - low) / 2 / middle
