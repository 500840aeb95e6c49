"""Rounds of questions to all processes, shared by those who ask at the same time.

    asked while none is under way      begins one
    asked while one is under way       waits for the next one, as all do who ask until that begins

So there is at most one round under way, however many ask, and nobody gets an answer that is older than the question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class SharedRounds(Generic[Answer]):
    """`ask` is one round, and must end by itself. Whoever gets an answer shares it: nobody may change it. Belongs to
    one event loop."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
        self._ask = ask
        self._under_way: asyncio.Task[Answer] | None = None
        self._next: asyncio.Task[Answer] | None = None

    async def answer(self) -> Answer:
        """Of a round that begins now or later. Raises what the round raised; one that is cancelled leaves the round to
        the others."""
        if self._next is None:
            if self._under_way is None or self._under_way.done():
                self._under_way = _started(self._ask())
                return await asyncio.shield(self._under_way)
            self._next = _started(self._after(self._under_way))
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[Answer]) -> Answer:
        await asyncio.wait({before})
        self._under_way, self._next = self._next, None
        return await self._ask()


def _started(round_: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
    """In a context of its own: when a client leaves, Serve cancels every call made in the context of its request."""
    task = asyncio.create_task(round_, context=Context())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
    return task
