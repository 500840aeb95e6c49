"""A claim about numbers, with its verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """`measured` must lie within `tolerance` (a share) of `expected`."""

    name: str
    measured: float
    expected: float
    tolerance: float

    @property
    def off(self) -> float:
        """How far from what was expected, as a share of it."""
        return self.measured / self.expected - 1.0

    @property
    def passed(self) -> bool:
        return abs(self.off) <= self.tolerance

    def as_line(self) -> str:
        verdict = "ok  " if self.passed else "FAIL"
        expected = f"expected {self.expected:.3f} within {self.tolerance:.0%}"
        return f"{verdict} {self.name}: {self.measured:.3f}, {expected} ({self.off:+.1%})"
