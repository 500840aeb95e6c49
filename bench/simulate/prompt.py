"""A prompt that is made anew each time somebody reads it: a million live ones take no memory to speak of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, overload

from bench.traces.trace import Trace


class Prompt(Sequence[int]):
    """Request `number` of a trace. The scheduler copies a prompt's tokens once and asks its request only for their
    number afterwards."""

    __slots__ = ("_length", "_number", "_trace", "_vocab_size")

    def __init__(self, trace: Trace, number: int, vocab_size: int) -> None:
        self._trace = trace
        self._number = number
        self._vocab_size = vocab_size
        self._length = trace.prompt_tokens[number]

    def as_ids(self) -> tuple[int, ...]:
        """Itself, where a type asks for a tuple: whatever may be done with it here can be done with a sequence."""
        return cast("tuple[int, ...]", self)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._trace.prompt_ids(self._number, self._vocab_size))

    @overload
    def __getitem__(self, index: int, /) -> int: ...

    @overload
    def __getitem__(self, index: slice, /) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice, /) -> int | tuple[int, ...]:
        return self._trace.prompt_ids(self._number, self._vocab_size)[index]
