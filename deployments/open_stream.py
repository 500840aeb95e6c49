"""One open request of an ingress process: what came of it so far, for whoever reads it."""

from __future__ import annotations

import asyncio
from collections import deque

from deployments.model_client import ModelClient
from replica.errors import BrimfulError
from replica.request import GenerationRequest, StreamMessage


class OpenStream:
    """One request's messages on their way from a replica to whoever reads them here.

    `news` is set whenever `take_all` has something new to say; streams that are read together share it.
    `wait_until_s`: a *patient* request is offered to the replicas, those in `exclude` last, until then; None: to two
    of them at most. `can_continue`: whoever reads it can have its answers continued by another replica.
    """

    def __init__(
        self,
        client: ModelClient,
        request: GenerationRequest,
        opened_at_s: float,
        news: asyncio.Event | None = None,
        *,
        exclude: tuple[str, ...] = (),
        wait_until_s: float | None = None,
        can_continue: bool = False,
    ) -> None:
        self.client = client
        self.request = request
        self.exclude = exclude
        self.wait_until_s = wait_until_s
        self.can_continue = can_continue
        self.sent_at_s = opened_at_s  # when the router was last asked for a replica
        self.replica_id: str | None = None
        self.failed_at: str | None = None  # the replica whose call ended with an error
        self.closed = False
        self.pump: asyncio.Task[None] | None = None
        self.may_move = True  # another replica may still be tried, if this one doesn't take it
        self.left: str | None = None  # the silent replica that hadn't taken it when another one was to be asked
        self._messages: deque[StreamMessage] = deque()
        self._num_open = request.n
        self._error: BrimfulError | None = None
        self.news = news or asyncio.Event()
        self.known = asyncio.Event()  # set once a replica took the request, or none ever will

    @property
    def finished(self) -> bool:
        """Every sequence has had its last event: nothing is held at a replica."""
        return self._num_open <= 0

    def take_all(self) -> list[StreamMessage]:
        """All messages that came since the last call; an empty list when nothing has come, and after the last one.

        Raises what ended the stream early, after everything that came before it has been taken.
        """
        if not self._messages and self._error is not None:
            raise self._error
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def take(self, message: StreamMessage) -> None:
        """A first message with events is a refusal: one event for the whole request, and nothing comes after it."""
        if self.replica_id is None and message.events:
            self._num_open = 0
        else:
            self._num_open -= sum(event.finish_reason is not None for event in message.events)
        self.replica_id = message.replica_id
        self.known.set()
        if not self.closed:
            self._messages.append(message)
            self.news.set()

    def fail(self, error: BrimfulError) -> None:
        """End the stream for its reader, unless it has ended. The first error stays."""
        if not self.finished:
            self._error = self._error or error
            self.news.set()
