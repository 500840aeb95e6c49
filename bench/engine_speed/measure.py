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
    `busy_beside`: the largest share of one core that the idle sides together used during a run; `disturbance`: the most
    cores that the machine spent on anything else than the run."""

    runs: dict[Row, dict[str, list[Run]]]
    limits: list[MachineLimits] = field(default_factory=list)
    busy_beside: float = 0.0
    disturbance: float = 0.0

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
    machine_cpu_seconds: Callable[[], float],
    settle: Callable[[], None],
    *,
    rounds: int,
    fewer_rounds: Mapping[str, int],
    vocab_size: int,
    progress: Progress,
) -> Measured:
    """Every side warms up; then, `rounds` times, every row on every side (`fewer_rounds`: by name, for sides so slow
    that they only run in the first ones). Every second round begins with the last side. The limits are measured in the
    beginning and after each round. `settle` is called before each measurement and waits until those that worked before
    are idle."""
    found = Measured({row: {} for row in rows})
    watch = _Watch(sides, machine_cpu_seconds, found)
    for side in sides:
        progress(f"{side.name}: warming up")
        side.run(WARM_UP, prompts(WARM_UP, vocab_size, -1))
    progress("measuring what the machine can do")
    settle()
    found.limits.append(measure_limits())
    for number in range(rounds):
        taking_part = [side for side in sides if number < fewer_rounds.get(side.name, rounds)]
        for row in rows:
            asked = prompts(row, vocab_size, number)
            for side in taking_part if number % 2 == 0 else taking_part[::-1]:
                progress(f"round {number + 1}/{rounds}: {row} on {side.name}")
                settle()
                found.runs[row].setdefault(side.name, []).append(watch.run(side, row, asked))
        progress("measuring what the machine can do")
        settle()
        found.limits.append(measure_limits())
    return found


class _Watch:
    """Runs a side and notices who else used the machine meanwhile."""

    def __init__(self, sides: Sequence[Side], machine_cpu_seconds: Callable[[], float], found: Measured) -> None:
        self._sides = sides
        self._machine_cpu_seconds = machine_cpu_seconds
        self._found = found

    def run(self, side: Side, row: Row, asked: list[list[int]]) -> Run:
        before = self._used(side)
        run = side.run(row, asked)
        waiting, rest = (now - then for now, then in zip(self._used(side), before, strict=True))
        self._found.busy_beside = max(self._found.busy_beside, waiting / run.seconds)
        self._found.disturbance = max(self._found.disturbance, rest / run.seconds)
        return run

    def _used(self, side: Side) -> tuple[float, float]:
        """CPU seconds so far of the sides that wait, and of all but the one that runs."""
        waiting = sum(other.cpu_seconds() for other in self._sides if other is not side)
        return waiting, self._machine_cpu_seconds() - side.cpu_seconds()
