"""One request's answers, whatever becomes of the replicas that make them.

A replica that dies, or is lost because it fell silent, takes no answer along. Every unfinished one continues at another
replica, as a request of its own:

    request, n = 3          index 0  ########|############.      request "id~0.1": prior_output_ids = tokens so far
    sent to replica a       index 1  ####.   |
                            index 2  ######  |##############.    request "id~2.1": the same prompt, seed and settings
                                       a is lost   others finish

What the reader has got is the text of exactly the tokens it has got: both come in the same events, and what a stop
string or an incomplete character held back is in neither. The other replica replays these tokens and says what they
leave to say. Its draws depend on the request's seed, the answer's index and the token's number only. So deltas, taken
together, are those of an undisturbed run: nothing comes twice, nothing is missing.

An answer is sent on at most `limit` times, because a request may be what kills its replicas. An answer that fails
without its replica's death (not a number in its logits, a step or a call that failed) is sent on too if no token of it
has come, but once only and not while there is no other replica: what fails twice fails by itself. The router is told of
these failures and of first tokens, and finds out which replicas fail everything (`router/health.py`). Whatever else
ends an answer (a refusal, a shutdown, a failure later on) is told to the reader. While nobody takes it, it waits for
`wait_s`; when that was in vain the reader is told how it was lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deployments.leases import Leases
from deployments.model_client import ModelClient
from deployments.open_stream import OpenStream
from replica.errors import BrimfulError, EngineDead, EngineFailure, ErrorInfo, error_from_info
from replica.request import FinishReason, GenerationRequest, StreamMessage, TokenEvent

logger = logging.getLogger(__name__)


def _not_counted() -> None:
    """For whoever has no counter."""


@dataclass(frozen=True, slots=True)
class Continuing:
    """How often an answer may lose its replica and go on (0: it is never sent on, whatever happens), and how long it
    waits for another one, in seconds. `count` is called each time."""

    limit: int
    wait_s: float
    count: Callable[[], None] = _not_counted


@dataclass(slots=True)
class _Answer:
    """One of the n answers: who makes it, and the tokens of it that the reader has. `lost`: how it lost its replica.
    `is_heard`: the present replica has given a token of it."""

    index: int
    stream: OpenStream
    token_ids: list[int] = field(default_factory=list)
    excluded: tuple[str, ...] = ()
    num_lost: int = 0
    has_failed: bool = False
    lost: BrimfulError | None = None
    is_heard: bool = False
    is_over: bool = False


class ContinuedStream:
    """Read with `take_all` whenever `news` is set; whoever opens it must `close` it. Belongs to one event loop."""

    def __init__(
        self,
        leases: Leases,
        client: ModelClient,
        request: GenerationRequest,
        news: asyncio.Event,
        continuing: Continuing,
    ) -> None:
        """Raises `Unavailable` when the model has no running replica."""
        self._leases = leases
        self._client = client
        self._request = request
        self._news = news
        self._continuing = continuing
        stream = leases.open(client, request, news, can_continue=continuing.limit > 0)
        self._streams = [stream]
        indexes = range(request.first_index, request.first_index + request.n)
        self._answers = {index: _Answer(index, stream) for index in indexes}
        self._error: BrimfulError | None = None

    @property
    def finished(self) -> bool:
        """Every answer has had its last event."""
        return all(answer.is_over for answer in self._answers.values())

    def take_all(self) -> list[StreamMessage]:
        """What came since the last call, with events; nothing when nothing has come. Raises what ended the request
        early, after everything that came before it."""
        came: list[StreamMessage] = []
        for stream in tuple(self._streams):
            try:
                while messages := stream.take_all():
                    heard = [self._received(stream, message) for message in messages if message.events]
                    came += [message for message in heard if message.events]
            except BrimfulError as error:
                self._ended_early(stream, error)
        if not came and self._error is not None:
            raise self._error
        return came

    def close(self) -> None:
        """Nobody reads any more: no replica goes on. Idempotent."""
        for stream in self._streams:
            self._leases.close(stream)

    def _received(self, stream: OpenStream, message: StreamMessage) -> StreamMessage:
        """What the reader gets of a message: nearly always the message itself."""
        is_continuation = bool(stream.request.prior_output_ids)
        events: list[TokenEvent] = []
        is_as_it_came = not is_continuation
        for event in message.events:
            said = self._said(message.replica_id, event)
            is_as_it_came = is_as_it_came and said is event
            if said is not None:
                events.append(said)
        if is_as_it_came:
            return message
        # What a continuation finds cached is not what the client's prompt found cached.
        num_cached = 0 if is_continuation else message.num_cached_tokens
        return replace(message, events=tuple(events), num_cached_tokens=num_cached)

    def _said(self, replica_id: str, event: TokenEvent) -> TokenEvent | None:
        """All of an event but that its answer was lost, or can't be continued; None when that leaves nothing."""
        answer = self._answers[event.index]
        answer.token_ids += event.token_ids
        if not answer.is_heard and (event.token_ids or event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)):
            answer.is_heard = True
            self._client.succeeded(self._request.request_id, replica_id)
        if event.error is None:
            answer.is_over = event.finish_reason is not None
            return event
        if event.finish_reason is FinishReason.ERROR and event.error.code == EngineDead.code:
            self._client.distrust(replica_id)
            self._go_on(answer, error_from_info(event.error))
            return replace(event, finish_reason=None, error=None) if event.token_ids else None
        if event.finish_reason is FinishReason.ERROR and self._tries_again(answer, replica_id, event.error):
            return None
        if event.finish_reason is FinishReason.REJECTED and answer.lost is not None:
            self._fail(answer.lost)
            return None
        answer.is_over = True
        return event

    def _ended_early(self, stream: OpenStream, error: BrimfulError) -> None:
        for answer in [answer for answer in self._answers.values() if answer.stream is stream and not answer.is_over]:
            if isinstance(error, EngineDead) and stream.replica_id is not None:
                self._go_on(answer, error)
            elif stream.failed_at is not None and self._tries_again(answer, stream.failed_at, error.info()):
                continue
            elif stream.replica_id is None:
                self._fail(answer.lost or error)
            else:
                self._fail(error)

    def _go_on(self, answer: _Answer, loss: BrimfulError) -> None:
        """Have another replica continue the answer, unless it has lost too many."""
        if answer.num_lost >= self._continuing.limit or self._error is not None:
            self._fail(loss)
            return
        answer.num_lost += 1
        self._send_on(answer, loss)

    def _tries_again(self, answer: _Answer, replica_id: str, info: ErrorInfo) -> bool:
        """Tells the router of an answer that failed before its first token, and asks another replica; returns whether
        it did. False also when the error is no such failure."""
        error = error_from_info(info)
        if not isinstance(error, EngineFailure) or isinstance(error, EngineDead) or answer.token_ids:
            return False
        self._client.failed(self._request.request_id, replica_id)
        if answer.has_failed or self._error is not None or self._continuing.limit == 0:
            return False
        if self._client.num_replicas() <= 1:
            return False
        answer.has_failed = True
        self._send_on(answer, error, replica_id)
        return True

    def _send_on(self, answer: _Answer, loss: BrimfulError, failed_at: str | None = None) -> None:
        """Ask another replica for what the reader hasn't got of the answer. `failed_at`: who failed it, if it may not
        have taken it."""
        stream, request = answer.stream, self._request
        answer.lost, answer.is_heard = loss, False
        replica_id = failed_at or stream.replica_id
        answer.excluded += (replica_id,) if replica_id is not None else ()
        logger.warning("request %s: %s; continued elsewhere", stream.request.request_id, loss)
        answer.stream = self._leases.open_patiently(
            self._client,
            replace(
                request,
                request_id=f"{request.request_id}~{answer.index}.{answer.num_lost + answer.has_failed}",
                n=1,
                first_index=answer.index,
                prior_output_ids=(*request.prior_output_ids, *answer.token_ids),
            ),
            self._news,
            exclude=answer.excluded,
            wait_s=self._continuing.wait_s,
            can_continue=answer.num_lost < self._continuing.limit,
        )
        self._streams.append(answer.stream)
        self._continuing.count()
        if all(other.is_over or other.stream is not stream for other in self._answers.values()):
            self._streams.remove(stream)
            self._leases.close(stream)

    def _fail(self, error: BrimfulError) -> None:
        """The whole request has failed. The first error stays."""
        self._error = self._error or error
