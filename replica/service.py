"""A replica's asyncio side: takes requests, speaks text, keeps the books, watches the engine.

    submit -> Stream -> EngineClient.send          (never waits for the engine)
    EngineClient -> _on_update -> Stream.push      (never waits for a consumer)
    submit <- Stream                               (taken, first news)
    news <- Mailboxes <- Stream                    (all later ones: one poll a reader, for all its streams)

All calls are made on one event loop. Time that this loop itself lost (a suspended machine, a long garbage collection)
counts neither against leases nor against the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from replica.cache_changes import CacheChanges
from replica.config import EngineConfig
from replica.engine import Engine
from replica.engine_api import AddRequest, EndRequest, EngineClient, EngineCommands, EngineUpdate
from replica.engine_inline import InlineClient
from replica.engine_process import ProcessClient
from replica.engine_worker import EngineStart, RunnerFactory, load_model
from replica.errors import BrimfulError, EngineDead, InvalidRequest, QueueFull, ResourceError, Unavailable
from replica.mailboxes import Mailboxes, reader_of
from replica.metrics import REPLICA_METRICS, Metrics
from replica.model.api import ModelShape
from replica.model_card import TextBundle
from replica.open_streams import OpenStreams
from replica.recorder import Recorder
from replica.request import FinishReason, GenerationRequest, LoadReport, NewsBatch, StreamMessage, TokenEvent
from replica.request_check import MAX_N, check_request
from replica.scheduler.budgets import allowed, budgets_of, changed
from replica.stats import StepStats
from replica.stream import Stream
from replica.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_RETRY_AFTER_S = 1.0
_DRAIN_POLL_S = 0.05
_DEAD_TEXT = "the engine of this replica failed"
_SHUT_DOWN = Unavailable("the replica was shut down before the answer was finished").info()


class ReplicaService:
    """One replica, as its Serve actor (or a test) uses it. Build it with `start`; end it with `close`.

    `bundle` is what an ingress needs to speak for the model, `shape` what it needs to check lengths, `metrics` the
    registry to serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        bundle: TextBundle,
        shape: ModelShape,
        *,
        replica_id: str,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bundle = bundle
        self.shape = shape
        self.metrics = Metrics(REPLICA_METRICS, {"model_name": model_name, "replica": replica_id})
        self._config = config
        self._limits = config.scheduler
        self._client = client
        self._replica_id = replica_id
        self._model_name = model_name
        self._clock = clock
        self._recorder = Recorder(self.metrics)
        self._streams = OpenStreams(
            self._recorder,
            Tokenizer(bundle.tokenizer_json, bundle.card),
            clock,
            self._end_in_engine,
            config.max_backlog_tokens,
        )
        self._load: LoadReport | None = None
        self._last_step: StepStats | None = None
        self._cache_changes = CacheChanges()
        self._mailboxes = Mailboxes(replica_id, self._load_for)
        self._first_report = asyncio.Event()
        self._silence_s = 0.0
        self._draining = False
        self._death: str | None = None
        self._watch = asyncio.get_running_loop().create_task(self._keep_watch())
        client.listen(self._on_update, self._on_death)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        replica_id: str,
        model_name: str,
        progress: Callable[[str], None] = _log.info,
        runner_factory: RunnerFactory = load_model,
        in_thread: bool = False,
        clock: Callable[[], float] = time.monotonic,
        random_seed: Callable[[], int] | None = None,
    ) -> ReplicaService:
        """Loads the model in a process of its own (`in_thread`: on this loop, for tests) and returns when it can serve.

        Raises `StartupError`. `clock` and `random_seed` apply in-thread only; the process has its own.
        """
        epoch = secrets.token_hex(8)
        client: EngineClient
        if in_thread:
            runner, card = runner_factory(config, progress)
            draw = random_seed or (lambda: secrets.randbits(63))
            engine = Engine(config, runner, clock=clock, random_seed=draw, replica_id=replica_id, epoch=epoch)
            client, shape = InlineClient(engine), runner.shape
        else:
            order = EngineStart(config, runner_factory, replica_id, epoch, os.getpid())
            client = await ProcessClient.start(order, progress)
            card, shape = client.ready.card, client.ready.shape
        try:
            bundle = TextBundle.load(Path(card.folder))
            service = cls(config, client, bundle, shape, replica_id=replica_id, model_name=model_name, clock=clock)
        except BaseException:
            await client.close()
            raise
        try:
            await service._first_report.wait()
            if service._load is None:
                raise ResourceError(f"the engine died as soon as it was up: {service._death}")
        except BaseException:
            await service.close()
            raise
        return service

    # ---- requests ----

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[StreamMessage, None]:
        """The call of one request: it says that the request was taken, and then its first news; or its one refusal.

        Then it stays open until `news` has fetched the stream's end: as long as there are calls, there is something to
        read here. The first news don't wait for a poll, which a reader without other streams has yet to send. Closing
        the call aborts what isn't finished and drops what wasn't fetched.
        """
        try:
            stream = self._open(request)
        except BrimfulError as error:
            first = request.first_index
            self._recorder.refused(max(1, min(request.n, MAX_N)))
            yield self._message(request, (TokenEvent(first, (), "", 0, FinishReason.REJECTED, None, error.info()),))
            return
        try:
            await stream.known()
            if not stream.accepted:
                yield self._message(request, stream.take()[:1])
                return
            fetched = self._mailboxes.add(stream)
            yield self._message(request)
            await stream.first_news()
            yield StreamMessage(self._replica_id, stream.take(), None, stream.num_cached_tokens)
            self._mailboxes.begin(stream)
            await fetched.wait()
        finally:
            self._mailboxes.remove(stream)
            self._streams.end(stream, FinishReason.ABORT)

    def news(self, lease: str, acknowledged: int = 0, num_batches: int = 1) -> AsyncGenerator[NewsBatch, None]:
        """What the requests of `lease` have to say: see `mailboxes.py`. For one reader a lease."""
        return self._mailboxes.poll(lease, acknowledged, num_batches)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is, also one that is still on its way here. Idempotent."""
        self._streams.abort(request_id)

    def renew(self, lease: str, request_ids: Iterable[str]) -> None:
        """The ingress process that holds `lease` still reads these streams."""
        self._streams.renew(lease, request_ids)

    # ---- the replica ----

    def load(self) -> LoadReport:
        """The newest report, without the prefix cache's changes: those ride on answers, once to each lease."""
        assert self._load is not None
        return replace(self._load, draining=True) if self._draining else self._load

    def check(self) -> None:
        """Raises `EngineDead` when the engine's process ended or makes no progress."""
        if self._death is not None:
            raise EngineDead(self._death)
        if self._watch.done() and not self._watch.cancelled():
            self._watch.result()

    def status(self) -> dict[str, Any]:
        """For people: plain JSON. `last_step` tells which limit binds while requests wait."""
        step = self._last_step
        return {
            "replica_id": self._replica_id,
            "model_name": self._model_name,
            "model": self.bundle.card.source,
            "pid": os.getpid(),
            "engine_pid": self._client.pid,
            "state": "dead" if self._death is not None else "draining" if self._draining else "ready",
            "num_streams": len(self._streams),
            "max_model_len": self.shape.max_model_len,
            "kv_bytes_per_token": self.shape.kv_bytes_per_token,
            "limits": asdict(self._limits),
            "load": asdict(self.load()),
            "last_step": None if step is None else _step_status(step),
        }

    def limits(self) -> dict[str, Any]:
        """The settings that may change live, as plain JSON: at the start, now, what each may be while the others stay,
        and what the last report says the engine plans with (`now` only from the step after a change, and less for a
        while after a step that didn't fit in memory)."""
        now, load = budgets_of(self._limits), self.load()
        ranges = allowed(self._config.scheduler, now, self.shape)
        return {
            "start": budgets_of(self._config.scheduler),
            "now": now,
            "allowed": {name: found.as_json() for name, found in ranges.items()},
            "in_force": {name: getattr(load, name) for name in ("max_num_seqs", "max_num_batched_tokens")},
        }

    def check_budgets(self, /, **changes: Any) -> None:
        """Raises the `SettingError` that `set_budgets` would. Changes nothing."""
        changed(self._config.scheduler, self._limits, changes, self.shape)

    def set_budgets(self, /, **changes: Any) -> None:
        """Changes settings of the scheduler between two steps; `scheduler/budgets.py` says which. Raises
        `SettingError`, and then nothing has changed."""
        self._limits = changed(self._config.scheduler, self._limits, changes, self.shape)
        self._client.send(EngineCommands(budgets=changes))

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits until the open ones are finished; what isn't by then ends in an error. True
        when all finished."""
        self._draining = True
        deadline_s = self._clock() + timeout_s
        while self._streams and self._clock() < deadline_s:
            await asyncio.sleep(min(_DRAIN_POLL_S, max(0.0, deadline_s - self._clock())))
        finished = not self._streams
        self._streams.end_all(_SHUT_DOWN)
        return finished

    async def close(self) -> None:
        """Ends every stream and the engine. Leaves no process, socket or task. Idempotent."""
        self._draining = True
        self._watch.cancel()
        self._streams.end_all(_SHUT_DOWN)
        await self._client.close()

    # ---- the engine's side ----

    def _open(self, request: GenerationRequest) -> Stream:
        """Refuses at once what would only wait to be refused by the engine."""
        if self._death is not None:
            raise EngineDead(_DEAD_TEXT)
        if self._draining:
            raise Unavailable("the replica is shutting down", retry_after_s=_RETRY_AFTER_S)
        check_request(request, self.shape)
        if self._mailboxes.holds(request):
            raise InvalidRequest("a request with this id hasn't been read to its end", param="request_id")
        limits = self._config.scheduler
        waiting = self._streams.num_sequences
        if waiting and waiting + request.n > limits.max_num_queued_seqs + limits.max_num_seqs:
            raise QueueFull("the waiting queue is full", retry_after_s=_RETRY_AFTER_S)
        stream = self._streams.open(request)
        if not stream.finished:
            order = AddRequest(replace(request, request_id=stream.engine_id), stream.arrived_at_s)
            self._client.send(EngineCommands(add=(order,)))
        return stream

    def _message(self, request: GenerationRequest, events: tuple[TokenEvent, ...] = ()) -> StreamMessage:
        return StreamMessage(self._replica_id, events, self._load_for(reader_of(request)))

    def _load_for(self, lease: str) -> LoadReport:
        return self._cache_changes.for_reader(lease, self.load())

    def _end_in_engine(self, order: EndRequest) -> None:
        self._client.send(EngineCommands(end=(order,)))

    def _on_update(self, update: EngineUpdate) -> None:
        self._load = self._cache_changes.take(update.load)
        self._last_step = update.stats
        if update.stats.num_tokens or not update.load.num_running + update.load.num_waiting:
            self._silence_s = 0.0
        self._recorder.update(update)
        self._streams.take(update)
        self._first_report.set()

    def _on_death(self, cause: str) -> None:
        _log.error("the engine of replica %s is dead: %s", self._replica_id, cause)
        self._death = cause
        self._recorder.dead()
        self._first_report.set()
        self._streams.end_all(EngineDead(_DEAD_TEXT).info())

    async def _keep_watch(self) -> None:
        """Ages leases, and ends an engine that is alive but makes no progress."""
        last_s = self._clock()
        while self._death is None:
            await asyncio.sleep(_TICK_S)
            now_s = self._clock()
            elapsed_s = min(now_s - last_s, 2 * _TICK_S)
            last_s = now_s
            self._streams.age_leases(elapsed_s, self._config.lease_timeout_s)
            self._mailboxes.age(elapsed_s, self._config.lease_timeout_s)
            self._silence_s += elapsed_s
            if self._silence_s > self._config.stall_timeout_s:
                self._client.kill(f"no step for {self._silence_s:.1f} s with work pending")


def _step_status(step: StepStats) -> dict[str, Any]:
    return {
        "num_tokens": step.num_tokens,
        "token_budget": step.token_budget,
        "num_running": step.num_running,
        "num_waiting_by_reason": step.num_waiting_by_reason,
    }
