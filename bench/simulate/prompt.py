"""Prompts that are made anew when somebody reads them: a million live ones take no memory to speak of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, overload

from bench.traces.trace import Trace


class Prompts:
    """The prompts of a trace. The one read last is kept, because a prompt is mostly read several times in a row."""

    def __init__(self, trace: Trace, vocab_size: int) -> None:
        self._trace = trace
        self._vocab_size = vocab_size
        self._last_number = -1
        self._last_ids: tuple[int, ...] = ()

    def lazy(self, number: int) -> tuple[int, ...]:
        """Request `number`'s prompt, for a field that wants a tuple: who only reads it can't tell the difference. The
        scheduler copies the tokens once and asks its request only for their number afterwards."""
        return cast("tuple[int, ...]", _Prompt(self, number, self._trace.prompt_tokens[number]))

    def ids(self, number: int) -> tuple[int, ...]:
        if number != self._last_number:
            self._last_number = number
            self._last_ids = self._trace.prompt_ids(number, self._vocab_size)
        return self._last_ids


class _Prompt(Sequence[int]):
    __slots__ = ("_length", "_number", "_prompts")

    def __init__(self, prompts: Prompts, number: int, length: int) -> None:
        self._prompts = prompts
        self._number = number
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._prompts.ids(self._number))

    @overload
    def __getitem__(self, index: int, /) -> int: ...

    @overload
    def __getitem__(self, index: slice, /) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice, /) -> int | tuple[int, ...]:
        return self._prompts.ids(self._number)[index]
