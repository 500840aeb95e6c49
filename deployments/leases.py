"""The open streams of one ingress process: who listens, who still must be told that nobody listens any more.

Ray's cancellation is a hint that can get lost, so nothing here depends on it:

- Every stream is read by a *pump*, a task of its own, so that a client that leaves cuts no call to a replica in half.
- `close(stream)` may be called at any time, by anybody, and never waits. A stream that hasn't ended is aborted in the
  background, at the replica that holds it. Until the replica has said that it took the request, there is nobody to
  send the abort to: then the abort waits for that message.
- Once per `beat_s` every replica is told which requests still have a listener here (the lease). A replica ends those
  that it wasn't told of for its `lease_timeout_s`: that covers aborts that got lost and ingress processes that died.
- It holds the other way round too. A replica that doesn't answer a renewal is told to the router, which prefers others
  from then on; if it sent no message for `move_after_s` either, requests sent there that it hasn't taken move to
  another, and streams that another can continue end here with `EngineDead` (see `continued_stream.py`). One that
  neither sent a message nor answered for `lost_after_s` is taken for dead: all its streams end so. Requests that could
  be sent to nobody within `accept_s` end with `Unavailable`, and so do at once those of a model that has no replica
  left: nothing ever hangs. A request that a replica has not taken yet waits for the end of the engine's step, however
  long that is, while the replica answers; it watches over its engine itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from deployments.model_client import ModelClient
from deployments.open_stream import OpenStream
from deployments.stream_pump import RETRY_AFTER_S, StreamPump, no_replica, silent
from replica.errors import BrimfulError, Unavailable
from replica.request import GenerationRequest

logger = logging.getLogger(__name__)

STOOD_STILL_S = 3.0
"""A renewal is given up sooner. One that took longer says that this process stood still, and nothing of the replica."""
ABORT_ATTEMPTS = 2


class Leases:
    """Opens, renews and closes the streams of one ingress process. All methods belong to one event loop."""

    def __init__(
        self,
        lease: str,
        clock: Callable[[], float],
        *,
        beat_s: float = 1.0,
        move_after_s: float = 1.5,
        lost_after_s: float = 5.0,
        accept_s: float = 10.0,
        retry_s: float = 0.25,
    ) -> None:
        self.lease = lease
        self._clock = clock
        self._beat_s = beat_s
        self._move_after_s = move_after_s
        self._lost_after_s = lost_after_s
        self._accept_s = accept_s
        self._pump = StreamPump(clock, self._heard, retry_s)
        self._streams: dict[str, OpenStream] = {}
        self._heard_at_s: dict[str, float] = {}
        self._renewing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_background(self) -> int:
        """Pumps, aborts and renewals under way, those of closed streams included."""
        return len(self._tasks)

    def open(
        self,
        client: ModelClient,
        request: GenerationRequest,
        news: asyncio.Event | None = None,
        *,
        can_continue: bool = False,
    ) -> OpenStream:
        """Send a request; whoever opens must `close`. Raises `Unavailable` when the model has no running replica."""
        if client.num_replicas() == 0:
            raise no_replica()
        return self._started(OpenStream(client, request, self._clock(), news, can_continue=can_continue))

    def open_patiently(
        self,
        client: ModelClient,
        request: GenerationRequest,
        news: asyncio.Event,
        *,
        exclude: tuple[str, ...],
        wait_s: float,
        can_continue: bool,
    ) -> OpenStream:
        """As `open`, but for `wait_s` it is offered again and again, also when no replica runs now: one that refuses
        may have room by then, and another may be started. Those of `exclude` are asked only when there is no other."""
        now = self._clock()
        return self._started(
            OpenStream(
                client, request, now, news, exclude=exclude, wait_until_s=now + wait_s, can_continue=can_continue
            )
        )

    def _started(self, stream: OpenStream) -> OpenStream:
        self._streams[stream.request.request_id] = stream
        stream.pump = self._in_background(self._pump.run(stream))
        return stream

    def close(self, stream: OpenStream) -> None:
        """Nobody reads this stream any more: abort it unless it has ended. Idempotent, never waits, never raises."""
        if stream.closed:
            return
        stream.closed = True
        del self._streams[stream.request.request_id]
        self._in_background(self._wind_up(stream))

    async def beat(self) -> None:
        """One round of renewals and of judging who is lost. A replica whose last renewal is still under way is left
        out."""
        by_replica: dict[str, list[OpenStream]] = {}
        now = self._clock()
        for stream in list(self._streams.values()):
            replica_id = _holder(stream)
            if replica_id is not None:
                by_replica.setdefault(replica_id, []).append(stream)
            elif stream.wait_until_s is None and stream.client.num_replicas() == 0:
                stream.fail(no_replica())
            elif now > (stream.sent_at_s + self._accept_s if stream.wait_until_s is None else stream.wait_until_s):
                stream.fail(Unavailable("no replica took the request in time", retry_after_s=RETRY_AFTER_S))
        self._heard_at_s = {replica_id: self._heard_at_s.get(replica_id, now) for replica_id in by_replica}
        due = [(replica_id, streams) for replica_id, streams in by_replica.items() if replica_id not in self._renewing]
        self._renewing.update(replica_id for replica_id, _ in due)
        await asyncio.gather(*(self._renew(replica_id, streams) for replica_id, streams in due))

    async def run(self) -> None:
        """Beat for ever. No round waits for the one before it, so that a silent replica delays nobody else's lease."""
        while True:
            await asyncio.sleep(self._beat_s)
            self._in_background(self._logged_beat())

    async def _logged_beat(self) -> None:
        try:
            await self.beat()
        except Exception:
            logger.exception("lease round failed")

    async def shut_down(self) -> None:
        """Close every stream and wait until the aborts are delivered or given up."""
        for stream in list(self._streams.values()):
            stream.fail(Unavailable("the service is stopping", retry_after_s=RETRY_AFTER_S))
            self.close(stream)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _heard(self, replica_id: str) -> None:
        self._heard_at_s[replica_id] = self._clock()

    async def _renew(self, replica_id: str, streams: list[OpenStream]) -> None:
        began_s = self._clock()
        try:
            ids = tuple(stream.request.request_id for stream in streams)
            await streams[0].client.renew(replica_id, self.lease, ids)
            self._heard(replica_id)
        except BrimfulError as error:
            logger.warning("replica %s didn't renew: %s", replica_id, error)
            if self._clock() - began_s <= STOOD_STILL_S:
                streams[0].client.distrust(replica_id)
                self._judge(replica_id)
        finally:
            self._renewing.discard(replica_id)

    def _judge(self, replica_id: str) -> None:
        """The replica didn't answer: move and end what is there now, which need not be what was when it was asked."""
        silent_s = self._clock() - self._heard_at_s.get(replica_id, self._clock())
        for stream in [stream for stream in self._streams.values() if _holder(stream) == replica_id]:
            if silent_s > self._move_after_s and _can_move(stream):
                self._move(stream, replica_id)
            elif silent_s > (self._move_after_s if _can_be_continued(stream) else self._lost_after_s):
                stream.fail(silent())

    def _move(self, stream: OpenStream, replica_id: str) -> None:
        """Give up the call to a silent replica; its pump asks another one. If that replica wakes up and does take the
        request, it ends it again, because nobody renews it there."""
        assert stream.pump is not None
        stream.left = replica_id
        stream.pump.cancel()

    async def _wind_up(self, stream: OpenStream) -> None:
        """Abort at the replica, then let the pump run out: the replica answers an abort with the stream's end."""
        pump = stream.pump
        assert pump is not None
        if not stream.finished:
            await _within(stream.known.wait(), self._accept_s)
        replica_id = _holder(stream)
        if replica_id is not None and not pump.done() and not stream.finished:
            await self._abort(stream, replica_id)
        if not pump.done():
            await asyncio.wait({pump}, timeout=self._lost_after_s)
            pump.cancel()

    async def _abort(self, stream: OpenStream, replica_id: str) -> None:
        for attempt in range(ABORT_ATTEMPTS):
            try:
                await stream.client.abort(replica_id, stream.request.request_id)
                return
            except BrimfulError as error:
                logger.warning("abort of %s, attempt %d: %s", stream.request.request_id, attempt + 1, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In a context of its own: when a client leaves, Serve cancels every call that was made in the context of its
        request, whoever made it, and with them the abort."""
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _holder(stream: OpenStream) -> str | None:
    """The replica that took the request, or else to which it was sent; None: to nobody yet."""
    return stream.replica_id or stream.client.replica_of(stream.request.request_id)


def _can_move(stream: OpenStream) -> bool:
    """The replica has computed nothing for it as far as we know, and another may be asked: there is one, and this one
    is the first or the request patient."""
    return stream.may_move and stream.left is None and stream.replica_id is None and stream.client.num_replicas() > 1


def _can_be_continued(stream: OpenStream) -> bool:
    """At another replica, now."""
    return stream.can_continue and stream.replica_id is not None and stream.client.num_ready() > 0


async def _within(work: Coroutine[Any, Any, object], limit_s: float) -> None:
    """Wait for `work`, but no longer than `limit_s`."""
    try:
        await asyncio.wait_for(work, limit_s)
    except TimeoutError:
        return
