"""A replica's open streams: opened, fed with engine updates, ended. The books of who is still owed an answer.

Every answer ends exactly once, in `_end`: by the engine's last row, a stop string, an abort, a lapsed lease, a reader
too slow, a drain or the engine's death.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from replica.engine_api import EndRequest, EngineUpdate
from replica.errors import EngineFailure, ErrorInfo, InvalidRequest, Unavailable
from replica.recorder import Recorder
from replica.request import FinishReason, GenerationRequest
from replica.scheduler.plan import PENDING_TOKEN
from replica.stream import Answer, Stream
from replica.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class RecentIds:
    """The last few thousand ids that were added."""

    _MAX = 4096

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        self._ids[request_id] = None
        self._ids.move_to_end(request_id)
        if len(self._ids) > self._MAX:
            self._ids.popitem(last=False)

    def discard(self, request_id: str) -> bool:
        """Whether it was there."""
        return self._ids.pop(request_id, self) is None


class OpenStreams:
    """`end_in_engine` passes an order on to the engine. Times in seconds, `max_backlog_tokens` is per stream."""

    def __init__(
        self,
        recorder: Recorder,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
        end_in_engine: Callable[[EndRequest], None],
        max_backlog_tokens: int,
    ) -> None:
        self._recorder = recorder
        self._tokenizer = tokenizer
        self._clock = clock
        self._end_in_engine = end_in_engine
        self._max_backlog_tokens = max_backlog_tokens
        self._by_engine_id: dict[str, Stream] = {}  # at least one answer unfinished
        self._by_request_id: dict[str, Stream] = {}
        self._aborted_early = RecentIds()
        self._ended = RecentIds()
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_engine_id)

    @property
    def num_sequences(self) -> int:
        return sum(stream.request.n for stream in self._by_engine_id.values())

    def open(self, request: GenerationRequest) -> Stream:
        """A stream for a checked request; ended already if its abort came first. Raises `InvalidRequest` for an id
        that is open."""
        if request.request_id in self._by_request_id:
            raise InvalidRequest("a request with this id is being served already", param="request_id")
        self._num_opened += 1
        engine_id = f"{self._num_opened}:{request.request_id}"
        stream = Stream(request, engine_id, self._tokenizer, self._clock())
        self._by_engine_id[engine_id] = self._by_request_id[request.request_id] = stream
        if self._aborted_early.discard(request.request_id):
            self.end(stream, FinishReason.ABORT)
        return stream

    def abort(self, request_id: str) -> None:
        """Idempotent. An id never seen is remembered: its request may still be on its way here."""
        stream = self._by_request_id.get(request_id)
        if stream is not None:
            self.end(stream, FinishReason.ABORT)
        elif request_id not in self._ended:
            self._aborted_early.add(request_id)

    def renew(self, lease: str, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            stream = self._by_request_id.get(request_id)
            if stream is not None and stream.request.lease == lease:
                stream.lease_age_s = 0.0

    def age_leases(self, elapsed_s: float, timeout_s: float) -> None:
        """Lets time pass for all leases; streams whose lease has lapsed are aborted."""
        for stream in list(self._by_engine_id.values()):
            if stream.request.lease is not None:
                stream.lease_age_s += elapsed_s
                if stream.lease_age_s >= timeout_s:
                    _log.info("lease %s lapsed for %s", stream.request.lease, stream.request.request_id)
                    self.end(stream, FinishReason.ABORT)

    def take(self, update: EngineUpdate) -> None:
        """Distributes an update's rows. A stream whose text can't be made ends alone."""
        for engine_id in update.accepted:
            if (stream := self._by_engine_id.get(engine_id)) is not None:
                stream.accepted = True
                stream.wake()
        for row, engine_id in enumerate(update.request_ids):
            if (timings := update.timings[row]) is not None:
                self._recorder.timings(timings)
            if (stream := self._by_engine_id.get(engine_id)) is None:
                continue
            try:
                self._push(stream, update, row)
            except Exception:  # noqa: BLE001 - one request's text must not end the others
                _log.exception("no text for %s", stream.request.request_id)
                self.end(stream, FinishReason.ERROR, EngineFailure("the answer's text could not be made").info())

    def end(self, stream: Stream, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Ends all open answers of a stream from this side, and its sequences in the engine. Idempotent."""
        if stream.finished:
            return
        for answer in stream.answers:
            if answer.finish_reason is None:
                answer.push(PENDING_TOKEN, reason, None, error)
                self._end(stream, answer, self._clock())
        if reason is not FinishReason.REJECTED:
            self._end_in_engine(EndRequest(stream.engine_id))

    def end_all(self, error: ErrorInfo) -> None:
        for stream in list(self._by_engine_id.values()):
            self.end(stream, FinishReason.ERROR, error)

    def _push(self, stream: Stream, update: EngineUpdate, row: int) -> None:
        token_id, reason, at_s = update.token_ids[row], update.finish_reasons[row], update.made_at_s
        if reason is FinishReason.REJECTED:
            self.end(stream, reason, update.errors[row])
            return
        answer = stream.answers[update.indexes[row] - stream.request.first_index]
        if answer.finish_reason is not None:
            return
        ended = answer.push(token_id, reason, update.stop_reasons[row], update.errors[row])
        if token_id != PENDING_TOKEN:
            stream.num_cached_tokens = max(stream.num_cached_tokens, update.num_cached_tokens[row])
            self._recorder.token(stream, answer, at_s)
        if ended is not None:
            self._end(stream, answer, at_s)
            if reason is None:
                self._end_in_engine(EndRequest(stream.engine_id, answer.index, FinishReason.STOP))
        elif stream.backlog > self._max_backlog_tokens:
            slow = Unavailable("the stream was given up because its reader was too slow")
            self.end(stream, FinishReason.ABORT, slow.info())
        stream.wake()

    def _end(self, stream: Stream, answer: Answer, at_s: float) -> None:
        """The one end of every answer: counted here, its stream forgotten with the last."""
        assert answer.finish_reason is not None
        self._recorder.ended(stream, answer.finish_reason, at_s)
        if stream.finished:
            del self._by_engine_id[stream.engine_id]
            del self._by_request_id[stream.request.request_id]
            self._ended.add(stream.request.request_id)
        stream.wake()
