"""A real engine for measurements: the model in a process of its own, as in a replica, without text and HTTP."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.fit.engine import Order, Played
from replica.config import EngineConfig
from replica.engine_api import EngineUpdate
from replica.engine_process import ProcessClient
from replica.engine_worker import EngineStart, RunnerFactory, load_model
from replica.errors import ResourceError
from replica.model.api import ModelRunner, ModelShape, Progress
from replica.model_card import ModelCard
from replica.request import FinishReason


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A `RunnerFactory`: the model with spans around the parts of a step; the profile is written to `path` when the
    engine ends."""

    path: str

    def __call__(self, config: EngineConfig, progress: Progress) -> tuple[ModelRunner, ModelCard]:
        from replica.model.step_profile import load_profiled

        return load_profiled(config, progress, Path(self.path), time.perf_counter)


SILENCE_S = 600.0
"""No step of a measurement takes so long, and an idle engine speaks every second."""


class RealEngine:
    """A `MeasuredEngine`; see `real_engine`. A play ends with an error when the engine says nothing for `silence_s`."""

    def __init__(self, config: EngineConfig, client: ProcessClient, runner: asyncio.Runner) -> None:
        self.config = config
        self._client = client
        self._runner = runner
        self._news: asyncio.Queue[EngineUpdate | str | BaseException] = asyncio.Queue()
        self.silence_s = SILENCE_S
        client.listen(self._news.put_nowait, self._news.put_nowait)

    @property
    def shape(self) -> ModelShape:
        return self._client.ready.shape

    @property
    def is_async(self) -> bool:
        return self._client.ready.is_async

    @property
    def card(self) -> ModelCard:
        return self._client.ready.card

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._client.pid

    def play(self, orders: Sequence[Order], progress: Callable[[int], None]) -> Played:
        return self._runner.run(self._play(orders, progress))

    async def _play(self, orders: Sequence[Order], progress: Callable[[int], None]) -> Played:
        while not self._news.empty():
            self._news.get_nowait()  # signs of life from before
        started_s = time.monotonic()
        sending = asyncio.create_task(self._send(orders, started_s))
        sending.add_done_callback(self._tell_failure)
        open_requests = {request.request_id for order in orders for request in order.requests}
        num_requests, updates = len(open_requests), list[EngineUpdate]()
        try:
            while open_requests:
                update = await self._next_update()
                updates.append(update)
                _require_no_failure(update)
                ended = zip(update.request_ids, update.finish_reasons, strict=True)
                open_requests.difference_update(name for name, reason in ended if reason is not None)
                progress(num_requests - len(open_requests))
            await sending
        finally:
            sending.cancel()
        return Played(started_s, updates)

    async def _next_update(self) -> EngineUpdate:
        try:
            async with asyncio.timeout(self.silence_s):
                news = await self._news.get()
        except TimeoutError:
            raise ResourceError(f"the engine said nothing for {self.silence_s:g} s while it was measured") from None
        if isinstance(news, BaseException):
            raise news
        if isinstance(news, str):
            raise ResourceError(f"the engine died while it was measured: {news}")
        return news

    def _tell_failure(self, sending: asyncio.Task[None]) -> None:
        """Whoever waits for news of requests that were never sent would wait for ever."""
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._news.put_nowait(error)

    async def _send(self, orders: Sequence[Order], started_s: float) -> None:
        for order in orders:
            await asyncio.sleep(max(0.0, started_s + order.at_s - time.monotonic()))
            self._client.send(order.commands(started_s))


def _require_no_failure(update: EngineUpdate) -> None:
    for reason, error in zip(update.finish_reasons, update.errors, strict=True):
        if reason is FinishReason.ERROR:
            raise ResourceError(f"a request failed while the engine was measured: {error.message if error else reason}")


@contextmanager
def real_engine(
    config: EngineConfig, progress: Callable[[str], None], runner_factory: RunnerFactory = load_model
) -> Iterator[RealEngine]:
    """Loads the model in a process of its own and ends that process at the end. Raises `StartupError`."""
    with asyncio.Runner() as runner:
        start = EngineStart(config, runner_factory, "measured", secrets.token_hex(8), os.getpid())
        client = runner.run(ProcessClient.start(start, progress))
        try:
            yield RealEngine(config, client, runner)
        finally:
            runner.run(client.close())
