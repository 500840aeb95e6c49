"""The streams of one HTTP request, read as one: a list of prompts is several requests to the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from deployments.continued_stream import ContinuedStream, Continuing
from deployments.leases import Leases
from deployments.model_client import ModelClient
from deployments.sse import event_error
from replica.errors import BrimfulError
from replica.request import GenerationRequest, StreamMessage, TokenEvent

NEVER = Continuing(limit=0, wait_s=0.0)


class OpenCall:
    """Use as a context manager: however the block is left, no replica goes on for it.

    One that fails fails the whole call: `read` raises its error, after everything that came before it.
    """

    def __init__(
        self,
        leases: Leases,
        client: ModelClient,
        requests: Sequence[GenerationRequest],
        continuing: Continuing = NEVER,
    ) -> None:
        self._leases = leases
        self._client = client
        self._requests = requests
        self._continuing = continuing
        self._streams: list[ContinuedStream] = []
        self._news = asyncio.Event()
        self._error: BrimfulError | None = None

    def __enter__(self) -> Self:
        """Raises `Unavailable` when the model has no running replica."""
        try:
            for request in self._requests:
                stream = ContinuedStream(self._leases, self._client, request, self._news, self._continuing)
                self._streams.append(stream)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    async def read(self) -> list[tuple[int, StreamMessage]]:
        """(number of the request, message) of all that came since the last call, at least one that has events; an
        empty list after the end of the last request."""
        while True:
            self._news.clear()
            came = self._take_all()
            if not came and self._error is not None:
                raise self._error
            if came or all(stream.finished for stream in self._streams):
                return came
            await self._news.wait()

    def _take_all(self) -> list[tuple[int, StreamMessage]]:
        """What came with events, up to the first thing that failed; that goes to `_error`."""
        came: list[tuple[int, StreamMessage]] = []
        for number, stream in enumerate(self._streams):
            try:
                while messages := stream.take_all():
                    for message in messages:
                        _check(message.events)
                        came.append((number, message))
            except BrimfulError as error:
                self._error = self._error or error
        return came

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()


def _check(events: tuple[TokenEvent, ...]) -> None:
    """Raises the error of the first event that ended badly."""
    for event in events:
        error = event_error(event)
        if error is not None:
            raise error
