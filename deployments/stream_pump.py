"""Reads one open stream: finds a replica that takes the request, and hands on what that one says.

    offered -> refused, or nobody there, or silent -> offered to another ...
            -> taken -> read to its end, to the replica's death, or until nobody listens

A request that nobody has taken yet has cost nothing, so it may go elsewhere. What was taken is never asked for again
here: that is for whoever knows which tokens came of it (`continued_stream.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from deployments.open_stream import OpenStream
from replica.errors import BrimfulError, EngineDead, EngineFailure, QueueFull, Unavailable, error_from_info
from replica.request import StreamMessage

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0


class StreamPump:
    """`heard` is told of every replica that says something; `retry_s` is the pause between two offers of a patient
    request."""

    def __init__(self, clock: Callable[[], float], heard: Callable[[str], None], retry_s: float) -> None:
        self._clock = clock
        self._heard = heard
        self._retry_s = retry_s

    async def run(self, stream: OpenStream) -> None:
        """Read the messages of whichever replica takes the request. Whatever goes wrong, the reader is told."""
        try:
            if stream.wait_until_s is None:
                await self._ask_two(stream)
            else:
                await self._ask_until(stream, stream.wait_until_s)
            if not stream.finished:
                stream.fail(EngineFailure("the replica ended the stream before its end"))
        except BrimfulError as error:
            if isinstance(error, EngineDead) and stream.replica_id is not None:
                stream.client.distrust(stream.replica_id)
            stream.failed_at = stream.replica_id or stream.client.last_replica_of(stream.request.request_id)
            stream.fail(error)
        except Exception:
            logger.exception("request %s: reading its stream failed", stream.request.request_id)
            stream.fail(EngineFailure("the request failed inside the service"))
        finally:
            stream.known.set()
            stream.client.forget(stream.request.request_id)

    async def _ask_two(self, stream: OpenStream) -> None:
        """If a replica refuses, dies or falls silent before it took the request: another is tried, once."""
        try:
            await self._read_replica(stream, exclude=())
        except _NotTaken as refusal:
            error = refusal.error
            if stream.closed or stream.client.num_replicas() <= len(refusal.by):
                raise error from None
            logger.warning("request %s: %s; trying another replica", stream.request.request_id, error)
            stream.may_move, stream.sent_at_s = False, self._clock()
            await self._read_replica(stream, exclude=refusal.by, last=True)

    async def _ask_until(self, stream: OpenStream, until_s: float) -> None:
        """Replicas are tried, one after the other, until one takes the request or the time is over."""
        exclude, pause_s = stream.exclude, 0.0
        while True:
            try:
                await self._read_replica(stream, exclude, pause_s=pause_s)
                return
            except _NotTaken as refusal:
                if stream.closed or self._clock() >= until_s:
                    raise refusal.error from None
                logger.debug("request %s: %s; asking again", stream.request.request_id, refusal.error)
                stream.left = None
                exclude, pause_s = (*stream.exclude, *refusal.by), self._retry_s

    async def _read_replica(
        self, stream: OpenStream, exclude: tuple[str, ...], last: bool = False, pause_s: float = 0.0
    ) -> None:
        """Hand over what one replica says. Unless it is the `last` try, a refusal raises `_NotTaken` instead."""
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            if stream.client.num_replicas() == 0:
                raise no_replica()
            async for message in stream.client.generate(stream.request, exclude):
                refusal = None if last or stream.replica_id is not None else _refusal(message)
                if refusal is not None:
                    if isinstance(refusal, EngineDead):
                        stream.client.distrust(message.replica_id)
                    raise _NotTaken(refusal, (message.replica_id,))
                self._heard(message.replica_id)
                stream.take(message)
        except (EngineDead, Unavailable) as error:
            if last or stream.replica_id is not None:
                raise
            raise _NotTaken(error, ()) from error
        except asyncio.CancelledError:
            if stream.left is None or stream.closed:
                raise
            pump = asyncio.current_task()
            assert pump is not None
            pump.uncancel()
            raise _NotTaken(silent(), (stream.left,)) from None


class _NotTaken(Exception):
    """No replica has the request: nothing was computed, another may be asked. `by`: who refused."""

    def __init__(self, error: BrimfulError, by: tuple[str, ...]) -> None:
        super().__init__(error.message)
        self.error = error
        self.by = by


def _refusal(message: StreamMessage) -> BrimfulError | None:
    """What a first message refuses with, if another replica might not: it is full, draining or dead."""
    for event in message.events:
        if event.error is not None:
            error = error_from_info(event.error)
            if isinstance(error, (QueueFull, Unavailable, EngineDead)):
                return error
    return None


def silent() -> EngineDead:
    return EngineDead("the replica stopped answering", retry_after_s=RETRY_AFTER_S)


def no_replica() -> Unavailable:
    return Unavailable("no replica of this model is running", retry_after_s=RETRY_AFTER_S)
