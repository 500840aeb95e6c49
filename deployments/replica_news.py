"""How an ingress process reads the streams of one model's replicas: polls, each for all that it has open at a replica.

    submit (a call a request) --> taken, first news ----.
                                                        |--> read()
    poll (a call a replica) --> later news --> Inbox ---'

A *reader* is the task that polls one replica, with one poll under way, while streams have begun there. Later news may
come before the first ones do: they wait in the request's inbox behind them. The submitting call alone speaks of a
stream that has not begun; it stays open until the replica's last news of the request were fetched, so Ray tells each
stream by itself when its replica dies. What the two calls say together once it has begun:

- The call fails: so does the stream, at once.
- The call is over, and a poll that was sent after that brought no end: the replica has forgotten the stream (its lease
  lapsed while this process stood still), and it ends without an end.
- A poll isn't answered in time, or fails in a way that says nothing of the replica: it is sent again, a few times.
  Those who renew its leases judge sooner whether the replica is lost; but one that answers them and no poll is as good
  as lost, and its streams here end.

Pace: each message of a batch goes on as a message of its own, to a proxy that says nothing when it falls behind; what
is sent faster than it is passed on waits there, and everybody's tokens come late. So after a batch all readers together
rest for as long as its messages take. With few streams that is less than a step and holds nothing back. With many, or
fast steps, tokens gather at the replicas and come as fewer, larger messages.

A poll costs more than the batches that it brings. As long as a reader waits for batches longer than it rests after
them, each poll asks for twice as many as the one before; a reader that falls behind asks for one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from contextvars import Context

from replica.errors import BrimfulError, EngineDead, EngineFailure
from replica.request import MAX_BATCHES, GenerationRequest, LoadReport, NewsBatch, StreamMessage, StreamNews

logger = logging.getLogger(__name__)

RETRY_S = 0.25
MAX_FAILED_POLLS = 8
"""In a row, without an answer or with an error for one: then the replica's streams here fail."""
MESSAGE_S = 0.0006
"""CPU time that passing on a message of a stream takes, about: this process and Serve's proxy share it evenly
(`bench/http`), so at this pace neither is busy all the time."""
MAX_REMEMBERED = 1024
"""Replicas that nobody reads and of which it is known which batch came last."""

Poll = Callable[[str, str, int, int], AsyncGenerator[NewsBatch | None, None]]
"""(replica, lease, number of the batch that arrived last, how many are wanted) -> the next ones; None, and nothing
more, when one didn't come in time."""


class Inbox:
    """What polls brought of one request and hasn't been read. `replica_id` is None until the stream has begun."""

    def __init__(self, num_sequences: int) -> None:
        self.replica_id: str | None = None
        self.call_is_over = False
        self._num_open = num_sequences
        self._messages: deque[StreamMessage] = deque()
        self._error: BrimfulError | None = None
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return self._closed or self._num_open <= 0 or self._error is not None

    def put(self, replica_id: str, news: StreamNews) -> None:
        if self.replica_id is not None and self.replica_id != replica_id:
            return
        self._messages.append(StreamMessage(replica_id, news.events, None, news.num_cached_tokens))
        if replica_id == self.replica_id:
            self._count_ends(self._messages[-1])
            self._changed.set()

    def begin(self, first: StreamMessage) -> None:
        """The first news came, by the call. From here on only their replica counts, also in what came early."""
        self.replica_id = first.replica_id
        self._messages = deque(message for message in self._messages if message.replica_id == first.replica_id)
        for message in (first, *self._messages):
            self._count_ends(message)

    def fail(self, error: BrimfulError) -> None:
        """Ends it after what came before, unless it is over."""
        if not self.is_over:
            self._error = error
            self._changed.set()

    def close(self) -> None:
        """Ends it without an end."""
        self._closed = True
        self._changed.set()

    async def get(self) -> StreamMessage | None:
        """The next message; None after the last one. Raises what the stream failed with."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

    def _count_ends(self, message: StreamMessage) -> None:
        self._num_open -= sum(event.finish_reason is not None for event in message.events)


class ReplicaNews:
    """All methods belong to one event loop. `observe` is told the report of every batch.

    `translated` makes one of our errors of what a call raised. `message_s`: how long a message keeps those busy who
    pass it on.
    """

    def __init__(
        self,
        poll: Poll,
        observe: Callable[[LoadReport], None],
        translated: Callable[[Exception], BrimfulError],
        message_s: float = MESSAGE_S,
    ) -> None:
        self._poll = poll
        self._observe = observe
        self._translated = translated
        self._message_s = message_s
        self._passed_on_s = 0.0  # when all messages so far will have been passed on
        self._inboxes: dict[str, Inbox] = {}
        self._readers: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._arrived: dict[tuple[str, str], int] = {}  # number of the last batch
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Streams, readers and calls that aren't over."""
        return len(self._inboxes) + len(self._readers) + len(self._calls)

    async def read(
        self, request: GenerationRequest, call: AsyncIterator[StreamMessage]
    ) -> AsyncGenerator[StreamMessage, None]:
        """All messages of a request that `call` submits, that it was taken (or its refusal) first. Raises what ended
        it early. Of two with one id the later one is read."""
        inbox = self._inboxes[request.request_id] = Inbox(request.n)
        try:
            taken = await _next_of(call)
            if taken is None:
                return
            yield taken
            if taken.events or (first := await _next_of(call)) is None:
                return
            yield first
            inbox.begin(first)
            self._follow(call, inbox)
            if not inbox.is_over:
                self._read_replica(first.replica_id, request.lease or "")
            while (message := await inbox.get()) is not None:
                yield message
        finally:
            inbox.close()
            if self._inboxes.get(request.request_id) is inbox:
                del self._inboxes[request.request_id]

    def _follow(self, call: AsyncIterator[StreamMessage], inbox: Inbox) -> None:
        task = asyncio.create_task(self._until_over(call, inbox))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _until_over(self, call: AsyncIterator[StreamMessage], inbox: Inbox) -> None:
        try:
            async for _ in call:
                raise EngineFailure("the replica's call said more than the first news of the request")
            inbox.call_is_over = True
        except asyncio.CancelledError:  # Ray raises it when the call was cancelled from elsewhere
            inbox.fail(_cancelled())
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the stream
            if not inbox.is_over:
                inbox.fail(self._translated(error))

    def _read_replica(self, replica_id: str, lease: str) -> None:
        """In a context of its own: a poll is no part of the HTTP request that happens to be the first here."""
        key = (replica_id, lease)
        if key in self._readers:
            return
        self._arrived[key] = self._arrived.pop(key, 0)
        self._readers[key] = asyncio.create_task(self._run(replica_id, lease), context=Context())

    async def _run(self, replica_id: str, lease: str) -> None:
        """Polls while streams are open at the replica. However it ends, none of them is left waiting."""
        num_failed, num_batches = 0, 1
        error: BrimfulError = EngineDead("the replica answers no poll")
        try:
            while self._open_at(replica_id) and num_failed < MAX_FAILED_POLLS:
                try:
                    is_answered, keeps_up = await self._read_poll(replica_id, lease, num_batches)
                    num_failed = 0 if is_answered else num_failed + 1
                    num_batches = min(MAX_BATCHES, 2 * num_batches) if keeps_up else 1
                except EngineDead as dead:
                    error = dead
                    return
                except BrimfulError as failure:
                    logger.warning("poll of replica %s failed: %s", replica_id, failure)
                    num_failed, error = num_failed + 1, EngineDead(failure.message, retry_after_s=failure.retry_after_s)
                    await asyncio.sleep(RETRY_S)
        except Exception:
            logger.exception("the reader of replica %s failed", replica_id)
            error = EngineFailure("the request failed inside the service")
        finally:
            del self._readers[replica_id, lease]
            self._forget_old()
            for inbox in self._open_at(replica_id):
                inbox.fail(error)

    def _forget_old(self) -> None:
        """Batches of replicas that nobody reads, those read longest ago first."""
        idle = [key for key in self._arrived if key not in self._readers]
        for key in idle[: max(0, len(idle) - MAX_REMEMBERED)]:
            del self._arrived[key]

    async def _read_poll(self, replica_id: str, lease: str, num_batches: int) -> tuple[bool, bool]:
        """Whether all of the poll was answered, and whether this reader waited for it longer than it rested. Leaves
        early when nobody is open there any more."""
        had_no_call = [inbox for inbox in self._open_at(replica_id) if inbox.call_is_over]
        now, waited_s, rested_s = asyncio.get_running_loop().time, 0.0, 0.0
        polled = self._poll(replica_id, lease, self._arrived[replica_id, lease], num_batches)
        async with aclosing(polled) as batches:
            began_s = now()
            async for batch in batches:
                if batch is None:
                    return False, False
                waited_s += now() - began_s
                self._take(replica_id, lease, batch)
                rested_s += await self._rest(len(batch.news))
                if not self._open_at(replica_id):
                    return True, True
                began_s = now()
        for inbox in had_no_call:
            inbox.close()
        return True, waited_s > rested_s

    def _take(self, replica_id: str, lease: str, batch: NewsBatch) -> None:
        if batch.load is not None:
            self._observe(batch.load)
        if batch.number:
            self._arrived[replica_id, lease] = batch.number
        for news in batch.news:
            inbox = self._inboxes.get(news.request_id)
            if inbox is not None:
                inbox.put(batch.replica_id, news)

    async def _rest(self, num_messages: int) -> float:
        """Until these messages will have been passed on, after all earlier ones: how long that is."""
        now_s = asyncio.get_running_loop().time()
        self._passed_on_s = max(now_s, self._passed_on_s) + num_messages * self._message_s
        rest_s = self._passed_on_s - now_s
        await asyncio.sleep(rest_s)
        return rest_s

    def _open_at(self, replica_id: str) -> list[Inbox]:
        return [inbox for inbox in self._inboxes.values() if inbox.replica_id == replica_id and not inbox.is_over]


async def _next_of(call: AsyncIterator[StreamMessage]) -> StreamMessage | None:
    """None when the call is over. One that was cancelled from elsewhere fails: nobody cancelled whoever reads it."""
    try:
        return await anext(call, None)
    except asyncio.CancelledError:
        reading = asyncio.current_task()
        if reading is None or reading.cancelling():
            raise
        raise _cancelled() from None


def _cancelled() -> EngineFailure:
    return EngineFailure("the call of the request was cancelled")
