"""Sides and measurements whose times are known."""

from __future__ import annotations

from bench.engine_speed.rows import Row
from bench.http.answer import StreamTimes
from bench.http.measure import Measured
from bench.http.sides import Prompts, Run


class FakeSide:
    """Takes 2 s a run; `log` hears of each run."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def run(self, row: Row, prompts: Prompts) -> Run:
        self._log.append(f"{self.name} {prompts[0][:2]}")
        return Run(2.0, [StreamTimes([1.0, 2.0], row.num_output_tokens) for _ in prompts], {"engine": 1.0})

    def cpu_seconds(self) -> dict[str, float]:
        return {"engine": 1.0 * len(self._log)}


def run_of(*streams: list[float], tokens_per_event: int = 1, **cpu_seconds: float) -> Run:
    """Streams by the times of their events."""
    told = [StreamTimes(events_s, len(events_s) * tokens_per_event) for events_s in streams]
    return Run(max(stream.events_s[-1] for stream in told), told, cpu_seconds)


def measured(row: Row, **runs: list[Run]) -> Measured:
    return Measured({row: runs})
