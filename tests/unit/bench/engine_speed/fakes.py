"""Sides and measurements whose times are known."""

from __future__ import annotations

from bench.engine_speed.limits import MachineLimits, StepLoad
from bench.engine_speed.measure import Measured
from bench.engine_speed.rows import Row
from bench.engine_speed.sides import Prompts, Run


class FakeSide:
    """Takes `seconds` a run and uses `beside` seconds of CPU whenever somebody else runs; `log` hears of each run."""

    def __init__(self, name: str, seconds: float, log: list[str], beside: float = 0.0) -> None:
        self.name = name
        self._seconds = seconds
        self._log = log
        self._beside = beside

    def run(self, row: Row, prompts: Prompts) -> Run:
        self._log.append(f"{row} {self.name}")
        return Run(self._seconds, [[0] * row.num_output_tokens for _ in prompts])

    def cpu_seconds(self) -> float:
        return self._beside * len(self._log)


def measured(row: Row, *, limits: MachineLimits, steps: list[StepLoad], **seconds: list[float]) -> Measured:
    """One row; `seconds` by side's name, ours with the steps."""
    runs = {
        name: [Run(each, [], first_tokens_s=each / 2, steps=steps if name == "brimful" else []) for each in listed]
        for name, listed in seconds.items()
    }
    return Measured({row: runs}, [limits])
