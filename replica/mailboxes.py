"""What the streams of a replica have to say, in one mailbox a reader: fetched by polls, each for all streams at once.

    Stream -> Mailbox (by lease) -> Mailboxes.poll -> NewsBatch

A message costs a process far more than a token, and a poll far more than a message. So a poll asks for several batches:
a reader that keeps up for many, one that is slow for a single one, and while no poll is here news gather in their
streams: it gets fewer and larger batches. Each batch is made of the next news, at the end of the engine's step that
made them, for they come from the engine together: one batch a step at most. A poll that finds no news for `wait_s` is
over. A stream's first news are no part of this: whoever adds it says them, and then lets polls have the rest (`begin`).

Answers can get lost. So a mailbox keeps its batches until a poll acknowledges the number of the last one that arrived,
and gives all later ones again. A poll under way while another one comes is the older one, which nobody reads any more:
it is over without news. Nothing is thus lost, nothing kept but what one poll brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from replica.request import MAX_BATCHES, GenerationRequest, LoadReport, NewsBatch, StreamNews
from replica.stream import Stream

TOKEN_BYTES = 8
"""Of a token's id in an answer, at most."""


@dataclass(slots=True)
class _Entry:
    """A stream that is still to be read, by polls once it has `begun`. `fetched` is set when nobody has to wait for
    its reader any more."""

    stream: Stream
    begun: bool = False
    fetched: asyncio.Event = field(default_factory=asyncio.Event)


class Mailbox:
    """The streams of one reader. Knows no clock and never waits: `Mailboxes` does.

    A stream is in it from `add` until its end was taken, or until `remove`; polls know of it from `begin` on. `wake` is
    set when there is something to answer. `silent_s` is how long no poll came.
    """

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.kept: list[NewsBatch] = []  # not acknowledged yet
        self.num_polls = 0
        self.silent_s = 0.0
        self._entries: dict[str, _Entry] = {}
        self._ready: dict[str, None] = {}  # requests with news, those that wait longest first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, stream: Stream) -> asyncio.Event:
        if stream.request.request_id in self._entries:
            self._drop(stream.request.request_id)
        entry = _Entry(stream)
        self._entries[stream.request.request_id] = entry
        return entry.fetched

    def begin(self, stream: Stream) -> None:
        """Polls bring what the stream says from now on, and what it has said meanwhile."""
        entry = self._entries.get(stream.request.request_id)
        if entry is None or entry.stream is not stream:
            return
        entry.begun = True
        stream.on_news = self.put
        self.silent_s = 0.0  # until now there may have been nothing to poll for
        if stream.has_news:
            self.put(stream)
        elif stream.finished:
            self._drop(stream.request.request_id)

    def remove(self, stream: Stream) -> None:
        stream.on_news = None
        entry = self._entries.get(stream.request.request_id)
        if entry is not None and entry.stream is stream:
            self._drop(stream.request.request_id)

    def put(self, stream: Stream) -> None:
        """The stream has news."""
        self._ready[stream.request.request_id] = None
        self.wake.set()

    @property
    def has_news(self) -> bool:
        return bool(self._ready)

    def acknowledge(self, number: int) -> None:
        """The batch arrived, and so did all before it."""
        numbers = [batch.number for batch in self.kept]
        if number in numbers:
            del self.kept[: numbers.index(number) + 1]

    def take(self, max_bytes: int) -> tuple[StreamNews, ...]:
        """The news that wait longest, until they have `max_bytes` or more. They are this mailbox's no more: keep them
        until they have arrived."""
        news: list[StreamNews] = []
        size = 0
        while self._ready and size < max_bytes:
            request_id = next(iter(self._ready))
            del self._ready[request_id]
            entry = self._entries[request_id]
            news.append(StreamNews(request_id, entry.stream.take(), entry.stream.num_cached_tokens))
            size += sum(len(event.token_ids) * TOKEN_BYTES + len(event.text.encode()) for event in news[-1].events)
            if entry.stream.finished:
                self._drop(request_id)
        return tuple(news)

    def drop_finished(self) -> None:
        """No reader comes any more: what has ended is forgotten unread, unless it is yet to begin."""
        for request_id in [r for r, entry in self._entries.items() if entry.begun and entry.stream.finished]:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        entry.stream.on_news = None
        self._ready.pop(request_id, None)
        entry.fetched.set()


class Mailboxes:
    """The mailboxes of a replica by lease. `load_for` makes the report that rides on a batch for a lease.

    One that no poll came for in `timeout_s` (see `age`) loses its finished streams; once no stream is in it, it is
    forgotten. Streams that are open end by their own lease or backlog.
    """

    def __init__(
        self,
        replica_id: str,
        load_for: Callable[[str], LoadReport],
        *,
        wait_s: float = 1.0,
        max_batch_bytes: int = 1 << 20,
    ) -> None:
        self._replica_id = replica_id
        self._load_for = load_for
        self._wait_s = wait_s
        self._max_batch_bytes = max_batch_bytes  # and one stream's backlog more; an answer of 4 MB can't be sent
        self._boxes: dict[str, Mailbox] = {}
        self._num_batches = 0

    def __len__(self) -> int:
        return len(self._boxes)

    def holds(self, request: GenerationRequest) -> bool:
        """A stream with this request's id and lease hasn't been read to its end."""
        box = self._boxes.get(reader_of(request))
        return box is not None and request.request_id in box

    def add(self, stream: Stream) -> asyncio.Event:
        """Its id is taken. The event is set when the stream's end was taken or its news dropped."""
        return self._boxes.setdefault(reader_of(stream.request), Mailbox()).add(stream)

    def begin(self, stream: Stream) -> None:
        """Its first news were said: polls bring the rest. Nothing happens to one that was removed."""
        box = self._boxes.get(reader_of(stream.request))
        if box is not None:
            box.begin(stream)

    def remove(self, stream: Stream) -> None:
        """Nobody wants the rest of it. Idempotent."""
        box = self._boxes.get(reader_of(stream.request))
        if box is not None:
            box.remove(stream)

    def age(self, elapsed_s: float, timeout_s: float) -> None:
        """Lets time pass for readers that don't poll."""
        for lease, box in list(self._boxes.items()):
            box.silent_s = 0.0 if box.num_polls else box.silent_s + elapsed_s
            if box.silent_s >= timeout_s:
                box.drop_finished()
                if not box:
                    del self._boxes[lease]

    async def poll(self, lease: str, acknowledged: int, num_batches: int = 1) -> AsyncGenerator[NewsBatch, None]:
        """The lease's next batches: all that are kept, then new ones, `num_batches` in all (at most `MAX_BATCHES`). One
        without news, after `wait_s`, is the last."""
        box = self._boxes.setdefault(lease, Mailbox())
        box.num_polls += 1
        box.wake.set()  # the poll that waits here is superseded
        box.wake = wake = asyncio.Event()
        try:
            box.acknowledge(acknowledged)
            kept = list(box.kept)
            for batch in kept:
                yield batch
            for _ in range(len(kept), min(num_batches, MAX_BATCHES)):
                batch = await self._next(box, lease, wake)
                yield batch
                if not batch.number:
                    return
        finally:
            box.num_polls -= 1
            box.silent_s = 0.0

    async def _next(self, box: Mailbox, lease: str, wake: asyncio.Event) -> NewsBatch:
        """A new batch, for the poll that `wake` belongs to; without news when another one came or none are made."""
        if box.wake is wake and not box.has_news:
            wake.clear()
            await _within(self._wait_s, wake)
        if box.wake is not wake or not box.has_news:
            return NewsBatch(self._replica_id)
        self._num_batches += 1
        news = box.take(self._max_batch_bytes)
        box.kept.append(NewsBatch(self._replica_id, self._num_batches, news, self._load_for(lease)))
        return box.kept[-1]


def reader_of(request: GenerationRequest) -> str:
    """The lease whose polls bring this request's news; requests without one have a reader in common."""
    return request.lease or ""


async def _within(limit_s: float, wake: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await wake.wait()
    except TimeoutError:
        return
