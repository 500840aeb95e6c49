"""Two small measurements of an engine: how fast it computes, and how much it may plan while memory is short."""

from __future__ import annotations

_DECAY = 0.9
"""Weight that a step keeps when the next one ends: a rate forgets most of what is older than some 20 steps."""


class TokenRate:
    """Tokens per second over the last steps that had such tokens; 0 until the first.

    The two sums decay, not their quotients, so that a short step doesn't count as much as a long one.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            self._tokens = self._tokens * _DECAY + num_tokens
            self._seconds = self._seconds * _DECAY + seconds

    @property
    def per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0


class MemoryBrake:
    """The token limit while device memory is short: halved by each step that didn't fit, doubled again after every
    `_STEPS_TO_TRUST` steps that did, gone when it no longer binds. 2 tokens (with one sequence) is the floor."""

    FLOOR = 2
    _STEPS_TO_TRUST = 16
    _TRIES_AT_FLOOR = 3

    def __init__(self) -> None:
        self.limit: int | None = None
        self._good_steps = 0
        self._failures_at_floor = 0

    def gives_up(self) -> bool:
        """The last steps all failed at the floor, so that their one sequence can't be saved. Counting starts anew."""
        if self._failures_at_floor < self._TRIES_AT_FLOOR:
            return False
        self._failures_at_floor = 0
        return True

    def failed(self, num_tokens: int) -> None:
        """A step of `num_tokens` didn't fit."""
        self.limit = max(self.FLOOR, num_tokens // 2)
        self._good_steps = 0
        self._failures_at_floor = self._failures_at_floor + 1 if num_tokens <= self.FLOOR else 0

    def fitted(self, configured_tokens: int) -> bool:
        """A step fitted; True when the limit changed by that."""
        self._failures_at_floor = 0
        if self.limit is None:
            return False
        self._good_steps += 1
        if self._good_steps < self._STEPS_TO_TRUST:
            return False
        self._good_steps = 0
        self.limit = self.limit * 2 if self.limit * 2 < configured_tokens else None
        return True
