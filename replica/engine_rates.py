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
    `_STEPS_TO_TRUST` steps that did, gone when it no longer binds. Never below `floor_tokens`: 2, or a whole prompt
    where prompts can't be cut."""

    _STEPS_TO_TRUST = 16
    _TRIES_ALONE = 3

    def __init__(self, floor_tokens: int) -> None:
        self.limit: int | None = None
        self._floor = floor_tokens
        self._good_steps = 0
        self._failures_alone = 0

    def failed(self, num_tokens: int, num_rows: int) -> None:
        """A step of `num_rows` sequences and `num_tokens` in all didn't fit."""
        self.limit = max(self._floor, num_tokens // 2)
        self._good_steps = 0
        if num_rows == 1 and num_tokens <= self._floor:
            self._failures_alone += 1

    def gives_up(self) -> bool:
        """One sequence's least possible work, alone in a step, failed again and again, and nothing fitted in between.
        Counting starts anew."""
        if self._failures_alone < self._TRIES_ALONE:
            return False
        self._failures_alone = 0
        return True

    def fitted(self, configured_tokens: int) -> bool:
        """A step fitted; True when the limit changed by that."""
        self._failures_alone = 0
        if self.limit is None:
            return False
        self._good_steps += 1
        if self._good_steps < self._STEPS_TO_TRUST:
            return False
        self._good_steps = 0
        self.limit = self.limit * 2 if self.limit * 2 < configured_tokens else None
        return True
