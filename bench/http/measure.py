"""Rounds of all sides, one after the other, so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.engine_speed.rows import WARM_UP, Row, prompts
from bench.http.sides import Run, Side

Progress = Callable[[str], None]
ROWS = (Row(1, 32, 64), Row(32, 32, 96), Row(64, 32, 96))
"""Short prompts: while the engine reads prompts it has little to say, and HTTP little to do."""
QUICK_ROWS = (Row(1, 16, 16), Row(8, 16, 16))
SINGLE_TIMES = 6
"""Requests of a row with one stream, one after the other in each round: one would say little about first tokens."""


@dataclass(slots=True)
class Measured:
    """`runs`: row -> side's name -> its runs. `disturbance`: the most cores that the machine spent on anything else
    than the side that ran."""

    runs: dict[Row, dict[str, list[Run]]]
    disturbance: float = 0.0

    def tokens_per_s(self, row: Row, side: str) -> float:
        """The median run's."""
        return statistics.median(run.num_tokens / run.seconds for run in self.runs[row][side])

    def first_token_s(self, row: Row, side: str) -> float:
        """Median over all streams."""
        return statistics.median(stream.events_s[0] for run in self.runs[row][side] for stream in run.streams)

    def gaps_s(self, row: Row, side: str) -> list[float]:
        """Between two events of a stream, of all streams, sorted. One event that brings two tokens is one event: who
        holds tokens back has longer gaps."""
        return sorted(
            later - earlier
            for run in self.runs[row][side]
            for stream in run.streams
            for earlier, later in zip(stream.events_s, stream.events_s[1:], strict=False)
        )

    def tokens_per_event(self, row: Row, side: str) -> float:
        runs = self.runs[row][side]
        return sum(run.num_tokens for run in runs) / sum(len(s.events_s) for run in runs for s in run.streams)

    def cpu_s_per_token(self, row: Row, side: str) -> dict[str, float]:
        """By kind of process, over all runs."""
        runs = self.runs[row][side]
        num_tokens = sum(run.num_tokens for run in runs)
        kinds = dict.fromkeys(kind for run in runs for kind in run.cpu_seconds)
        return {kind: sum(run.cpu_seconds.get(kind, 0.0) for run in runs) / num_tokens for kind in kinds}

    def cores(self, row: Row, side: str, kind: str) -> float:
        """How many cores a kind of process kept busy."""
        runs = self.runs[row][side]
        return sum(run.cpu_seconds.get(kind, 0.0) for run in runs) / sum(run.seconds for run in runs)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of `ordered` that at least `share` of all don't exceed; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def measure(
    rows: Sequence[Row],
    sides: Sequence[Side],
    machine_cpu_seconds: Callable[[], float],
    settle: Callable[[], None],
    *,
    rounds: int,
    vocab_size: int,
    progress: Progress,
) -> Measured:
    """Every side warms up; then, `rounds` times, every row on every side. Every second round begins with the last
    side. `settle` is called before each measurement and waits until those that worked before are idle."""
    found = Measured({row: {side.name: [] for side in sides} for row in rows})
    for side in sides:
        progress(f"{side.name}: warming up")
        side.run(WARM_UP, prompts(WARM_UP, vocab_size, -1))
    for number in range(rounds):
        for row in rows:
            for side in sides if number % 2 == 0 else sides[::-1]:
                for again in range(SINGLE_TIMES if row.num_seqs == 1 else 1):
                    progress(f"round {number + 1}/{rounds}: {row} on {side.name}")
                    settle()
                    asked = prompts(row, vocab_size, number * SINGLE_TIMES + again)
                    before = machine_cpu_seconds() - sum(side.cpu_seconds().values())
                    run = side.run(row, asked)
                    beside = machine_cpu_seconds() - sum(side.cpu_seconds().values()) - before
                    found.disturbance = max(found.disturbance, beside / run.seconds)
                    found.runs[row][side.name].append(run)
    return found
