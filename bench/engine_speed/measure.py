"""Rounds of all sides, one after the other, so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.engine_speed.limits import MachineLimits
from bench.engine_speed.rows import WARM_UP, Row, prompts
from bench.engine_speed.sides import Run, Side

Progress = Callable[[str], None]


@dataclass(slots=True)
class Measured:
    """`runs`: row -> side's name -> its rounds. `limits`: of the machine, before, between and after the rounds.
    `busy_beside`: the largest share of one core that the idle sides together used during a run."""

    runs: dict[Row, dict[str, list[Run]]]
    limits: list[MachineLimits] = field(default_factory=list)
    busy_beside: float = 0.0

    def seconds(self, row: Row, side: str) -> float | None:
        """The median round's; None where there is none."""
        runs = self.runs[row].get(side)
        return statistics.median(run.seconds for run in runs) if runs else None

    def spread(self, row: Row, side: str) -> float:
        """How far the slowest round is from the quickest, as a share of the median."""
        times = [run.seconds for run in self.runs[row][side]]
        return (max(times) - min(times)) / statistics.median(times)

    def middle_run(self, row: Row, side: str) -> Run:
        """A round whose time is the median's, or the next longer one."""
        runs = sorted(self.runs[row][side], key=lambda run: run.seconds)
        return runs[len(runs) // 2]


def measure(
    rows: Sequence[Row],
    sides: Sequence[Side],
    measure_limits: Callable[[], MachineLimits],
    *,
    rounds: int,
    fewer_rounds: Mapping[str, int],
    vocab_size: int,
    progress: Progress,
) -> Measured:
    """Every side warms up; then, `rounds` times, every row on every side (`fewer_rounds`: by name, for sides so slow
    that they only run in the first ones). Every second round begins with the last side. The limits are measured in the
    beginning and after each round."""
    found = Measured({row: {} for row in rows})
    for side in sides:
        progress(f"{side.name}: warming up")
        side.run(WARM_UP, prompts(WARM_UP, vocab_size, -1))
    progress("measuring what the machine can do")
    found.limits.append(measure_limits())
    for number in range(rounds):
        taking_part = [side for side in sides if number < fewer_rounds.get(side.name, rounds)]
        for row in rows:
            asked = prompts(row, vocab_size, number)
            for side in taking_part if number % 2 == 0 else taking_part[::-1]:
                progress(f"round {number + 1}/{rounds}: {row} on {side.name}")
                run, busy = _watched(side, sides, row, asked)
                found.runs[row].setdefault(side.name, []).append(run)
                found.busy_beside = max(found.busy_beside, busy)
        progress("measuring what the machine can do")
        found.limits.append(measure_limits())
    return found


def _watched(side: Side, sides: Sequence[Side], row: Row, asked: list[list[int]]) -> tuple[Run, float]:
    """A run, and the share of one core that the other sides used meanwhile."""
    others = [other for other in sides if other is not side]
    before = sum(other.cpu_seconds() for other in others)
    run = side.run(row, asked)
    used = sum(other.cpu_seconds() for other in others) - before
    return run, used / run.seconds
