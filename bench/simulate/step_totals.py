"""What all steps of a simulation add up to, and how it went over time; a row a step only where asked for.

Everything is a whole number (seconds as nanoseconds), so that replicas can be added in any order, from any number of
processes, and give the same sums to the last digit.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.simulate.histogram import Histogram

NS = 1_000_000_000
MAX_BINS = 512
_SHORTEST_BIN_NS = 1 << 20  # about a millisecond


class Bin(NamedTuple):
    """One stretch of virtual time, all replicas together; steps count where they begin. `waiting`, `running`, `held`
    (KV blocks) are averages over the stretch, tokens and steps are sums."""

    start_s: float
    width_s: float
    num_steps: int
    num_tokens: int
    waiting: float
    running: float
    held: float


@dataclass(slots=True)
class StepColumns:
    """One row a step: `start_s`, `duration_s`, sequences in it (`width`), tokens, of those recomputed, and after
    planning it: requests waiting, KV blocks held."""

    start_s: array[float] = field(default_factory=lambda: array("d"))
    duration_s: array[float] = field(default_factory=lambda: array("d"))
    width: array[int] = field(default_factory=lambda: array("i"))
    num_tokens: array[int] = field(default_factory=lambda: array("i"))
    num_recomputed: array[int] = field(default_factory=lambda: array("i"))
    num_waiting: array[int] = field(default_factory=lambda: array("i"))
    num_held: array[int] = field(default_factory=lambda: array("i"))


class StepTotals:
    """`itl` counts gaps between tokens of one request. `columns` is None unless every step is kept. Bins are as wide
    as the length of the run asks for: their width doubles when there are too many."""

    def __init__(self, *, keep_steps: bool = False) -> None:
        self.num_steps = 0
        self.busy_ns = 0
        self.width_ns = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.sum_squared_tokens = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_output_tokens = 0
        self.max_waiting = 0
        self.max_held = 0
        self.itl = Histogram()
        self.columns = StepColumns() if keep_steps else None
        self._bin_ns = _SHORTEST_BIN_NS
        self._bins: dict[int, list[int]] = {}

    def add_step(
        self,
        start_s: float,
        end_s: float,
        width: int,
        tokens: tuple[int, int, int],
        num_waiting: int,
        num_held: int,
    ) -> None:
        """`tokens`: prefill, decode, recomputed. Waiting and held as they are while the step runs."""
        num_prefill, num_decode, num_recomputed = tokens
        num_tokens = num_prefill + num_decode + num_recomputed
        start_ns = round(start_s * NS)
        step_ns = round(end_s * NS) - start_ns
        self.num_steps += 1
        self.busy_ns += step_ns
        self.width_ns += width * step_ns
        self.num_rows += width
        self.num_tokens += num_tokens
        self.sum_squared_tokens += num_tokens * num_tokens
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += num_decode
        self.num_recomputed_tokens += num_recomputed
        if num_waiting > self.max_waiting:
            self.max_waiting = num_waiting
        if num_held > self.max_held:
            self.max_held = num_held
        row = self._bins.get(start_ns // self._bin_ns)
        if row is None:
            row = self._new_bin(start_ns)
        row[0] += 1
        row[1] += num_tokens
        row[2] += num_waiting * step_ns
        row[3] += width * step_ns
        row[4] += num_held * step_ns
        if self.columns is not None:
            self._keep(start_s, end_s, width, num_tokens, num_recomputed, num_waiting, num_held)

    def merge(self, other: StepTotals) -> None:
        """Add the steps of other replicas. Kept columns are not merged: they belong to one replica."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_waiting = max(self.max_waiting, other.max_waiting)
        self.max_held = max(self.max_held, other.max_held)
        self.itl.merge(other.itl)
        while self._bin_ns < other._bin_ns:
            self._widen()
        for index, row in other._bins.items():
            self._pour(index * other._bin_ns // self._bin_ns, row)
        while len(self._bins) > MAX_BINS:
            self._widen()

    def bins(self) -> list[Bin]:
        """Stretches in which a step began, in order of time."""
        width_s = self._bin_ns / NS
        return [
            Bin(index * width_s, width_s, row[0], row[1], *(part / self._bin_ns for part in row[2:]))
            for index, row in sorted(self._bins.items())
        ]

    def waiting_growth(self, until_s: float) -> float | None:
        """Slope of the number waiting, in requests a second, by least squares over the bins that end by `until_s`
        (the last arrival); None with fewer than three."""
        num_bins = int(until_s * NS) // self._bin_ns
        if num_bins < 3:
            return None
        waiting = [self._bins[i][2] / self._bin_ns if i in self._bins else 0.0 for i in range(num_bins)]
        middle, mean = (num_bins - 1) / 2, sum(waiting) / num_bins
        above = sum((i - middle) * (value - mean) for i, value in enumerate(waiting))
        below = sum((i - middle) ** 2 for i in range(num_bins))
        return above / below / (self._bin_ns / NS)

    def _new_bin(self, start_ns: int) -> list[int]:
        row = self._bins.setdefault(start_ns // self._bin_ns, [0, 0, 0, 0, 0])
        while len(self._bins) > MAX_BINS:
            self._widen()
            row = self._bins[start_ns // self._bin_ns]
        return row

    def _widen(self) -> None:
        bins, self._bins = self._bins, {}
        self._bin_ns *= 2
        for index, row in bins.items():
            self._pour(index // 2, row)

    def _pour(self, index: int, row: list[int]) -> None:
        kept = self._bins.get(index)
        self._bins[index] = list(row) if kept is None else [a + b for a, b in zip(kept, row, strict=True)]

    def _keep(self, start_s: float, end_s: float, *counts: int) -> None:
        columns = self.columns
        if columns is not None:
            columns.start_s.append(start_s)
            columns.duration_s.append(end_s - start_s)
            width, num_tokens, num_recomputed, num_waiting, num_held = counts
            columns.width.append(width)
            columns.num_tokens.append(num_tokens)
            columns.num_recomputed.append(num_recomputed)
            columns.num_waiting.append(num_waiting)
            columns.num_held.append(num_held)


_SUMS = (
    "num_steps",
    "busy_ns",
    "width_ns",
    "num_rows",
    "num_tokens",
    "sum_squared_tokens",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_recomputed_tokens",
    "num_output_tokens",
)
