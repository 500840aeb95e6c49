"""Reads requests from a `ReplicaService` in this process as an ingress process reads them from a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from weakref import WeakKeyDictionary, ref

from deployments.replica_news import ReplicaNews
from replica.errors import BrimfulError, EngineFailure
from replica.request import GenerationRequest, NewsBatch, StreamMessage
from replica.service import ReplicaService


class Call(AsyncIterator[StreamMessage]):
    """A submitting call as Serve makes it: it goes on by itself, whoever listens, until it is over or cancelled."""

    def __init__(self, service: ReplicaService, request: GenerationRequest) -> None:
        self._messages: asyncio.Queue[StreamMessage | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(service, request))

    async def __anext__(self) -> StreamMessage:
        message = await self._messages.get()
        if message is None:
            await self._task
            raise StopAsyncIteration
        return message

    async def cancel(self) -> None:
        """Idempotent; returns when nothing of it is left."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self, service: ReplicaService, request: GenerationRequest) -> None:
        try:
            async with aclosing(service.submit(request)) as messages:
                async for message in messages:
                    self._messages.put_nowait(message)
        finally:
            self._messages.put_nowait(None)


class ReplicaReader:
    """The one reader of a service in this process."""

    def __init__(self, service: ReplicaService) -> None:
        self._service = ref(service)
        self._news = ReplicaNews(self._poll, lambda load: None, _failed)

    async def read(self, service: ReplicaService, request: GenerationRequest) -> AsyncGenerator[StreamMessage, None]:
        call = Call(service, request)
        try:
            async for message in self._news.read(request, call):
                yield message
        finally:
            await call.cancel()

    async def _poll(
        self, replica_id: str, lease: str, acknowledged: int, num_batches: int
    ) -> AsyncGenerator[NewsBatch | None, None]:
        service = self._service()
        assert service is not None
        async with aclosing(service.news(lease, acknowledged, num_batches)) as batches:
            async for batch in batches:
                yield batch


_readers: WeakKeyDictionary[ReplicaService, ReplicaReader] = WeakKeyDictionary()


def read(service: ReplicaService, request: GenerationRequest) -> AsyncGenerator[StreamMessage, None]:
    """The request's messages. Closing the generator aborts what isn't finished."""
    if service not in _readers:
        _readers[service] = ReplicaReader(service)
    return _readers[service].read(service, request)


def _failed(error: Exception) -> BrimfulError:
    return error if isinstance(error, BrimfulError) else EngineFailure(str(error))
