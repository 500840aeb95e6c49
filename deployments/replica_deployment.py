"""One replica as a Ray Serve deployment: a thin shell around `ReplicaService`, which knows nothing of Ray.

Serve calls the constructor until the model is loaded and has generated a token, asks `check_health` every second,
and `__del__` when the replica has to go and its streams have ended: the call of a request (`submit`) stays open until
the last of its news were fetched (`news`), and Serve waits for open calls. Streams that outlast the graceful shutdown
of a replica that Serve itself stops (scaled down, updated) end with the process, and their ingress has another one
continue them; `brimful serve` drains before (`cli/drain.py`), so that they get the replica's own error.

A dead engine isn't repaired in place: `check_health` raises, and the process ends by itself once its streams have had
their error events, because Serve replaces a process that is gone at once, an unhealthy one only after three checks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

from ray import serve

from deployments.loopback import keep_serve_port_local
from deployments.process_address import metrics_address
from deployments.serve_logging import log_through_serve
from replica.config import EngineConfig
from replica.errors import EngineDead, ErrorInfo, SettingError
from replica.metrics_server import serve_metrics
from replica.model.api import ModelShape
from replica.model_card import TextBundle
from replica.request import GenerationRequest, NewsBatch, StreamMessage
from replica.service import ReplicaService
from router.serve_router import METRICS_ADDRESS
from router.types import RouteRequest

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.2
LAST_WORDS_S = 1.0
DEAD_ENGINE_EXIT_CODE = 70
START_REVISION = (0, "")
"""Of limits that nobody has changed; see `live_limits.py`."""


class ReplicaDeployment:
    """The user class of a `replica-<i>` deployment. Parameters named route, exclude and pin are for the router."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, model_name: str, metrics_host: str, metrics_ports: range
    ) -> None:
        log_through_serve()
        keep_serve_port_local()
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._model_name = model_name
        self._num_streams = 0
        self._revision = START_REVISION
        say = partial(logger.info, "starting: %s")  # `brimful serve` shows the newest of these lines
        self._service = await ReplicaService.start(
            config, replica_id=self._replica_id, model_name=model_name, progress=say
        )
        self._exporter, port = serve_metrics(self._service.metrics.registry, metrics_host, metrics_ports)
        self._metrics_address = metrics_address(metrics_host, port)
        self._watch = asyncio.create_task(self._exit_when_dead())

    async def submit(
        self,
        request: GenerationRequest,
        route: RouteRequest | None = None,
        exclude: tuple[str, ...] = (),
        pin: str | None = None,
    ) -> AsyncGenerator[StreamMessage, None]:
        """Says that the request was taken and its first news, or refuses it, and stays open until its last news were
        fetched: Serve ends a replica only when no call is open. However it ends, nothing of it stays behind; a call
        that was refused touches no other call with the same id."""
        del route, exclude, pin
        self._num_streams += 1
        try:
            async with aclosing(self._service.submit(request)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._num_streams -= 1

    async def news(
        self, lease: str, acknowledged: int, num_batches: int = 1, pin: str | None = None
    ) -> AsyncGenerator[NewsBatch, None]:
        """What the open requests of one ingress process have to say; waits a moment when that is nothing."""
        del pin
        async with aclosing(self._service.news(lease, acknowledged, num_batches)) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, request_id: str, pin: str | None = None) -> None:
        del pin
        self._service.abort(request_id)

    async def renew(self, lease: str, request_ids: tuple[str, ...], pin: str | None = None) -> None:
        del pin
        self._service.renew(lease, request_ids)

    async def limits(self, pin: str | None = None) -> dict[str, Any]:
        """The limits that may change live, and the revision that they are of."""
        del pin
        return {"replica_id": self._replica_id, "revision": self._revision, **self._service.limits()}

    async def check_budgets(self, budgets: dict[str, Any], pin: str | None = None) -> ErrorInfo | None:
        """The `SettingError` that `set_budgets` would answer with. Changes nothing."""
        del pin
        try:
            self._service.check_budgets(**budgets)
        except SettingError as error:
            return error.info()
        return None

    async def set_budgets(
        self, budgets: dict[str, Any], revision: tuple[int, str], pin: str | None = None
    ) -> ErrorInfo | None:
        """Change limits between two steps; the `SettingError` that refuses them, as plain data. An order of a revision
        that isn't newer than what is set comes late: nothing happens."""
        del pin
        if revision <= self._revision:
            return None
        try:
            self._service.set_budgets(**budgets)
        except SettingError as error:
            return error.info()
        self._revision = revision
        logger.info("limits of revision %d: %s", revision[0], budgets)
        return None

    async def drain(self) -> dict[str, Any]:
        """Refuse new requests and end the open ones with their error; `cli/drain.py` has waited for them."""
        await self._service.drain(0.0)
        return await self.status()

    async def facts(self) -> tuple[TextBundle, ModelShape]:
        return self._service.bundle, self._service.shape

    async def describe(self) -> dict[str, Any]:
        """Who this process is and where its metrics are."""
        return {
            "kind": "replica",
            "replica_id": self._replica_id,
            "model_name": self._model_name,
            "pid": os.getpid(),
            "metrics_address": self._metrics_address,
        }

    async def status(self, pin: str | None = None) -> dict[str, Any]:
        del pin
        return {**await self.describe(), **self._service.status()}

    def record_replica_metadata(self) -> dict[str, Any]:
        """What every router learns of this replica without asking it, so also while it hangs."""
        return {METRICS_ADDRESS: self._metrics_address}

    def record_routing_stats(self) -> dict[str, Any]:
        return asdict(self._service.load())

    async def check_health(self) -> None:
        """Raises `EngineDead`; Serve then replaces this replica."""
        self._service.check()

    async def __del__(self) -> None:
        watch = getattr(self, "_watch", None)
        if watch is None:
            return
        watch.cancel()
        self._exporter.shutdown()
        await self._service.close()

    async def _exit_when_dead(self) -> None:
        """Wait for the engine's death, let the streams deliver their error events, end the process."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            try:
                self._service.check()
            except EngineDead as error:
                logger.error("replica %s ends: %s", self._replica_id, error)
                break
        for _ in range(int(LAST_WORDS_S / WATCH_PERIOD_S)):
            if self._num_streams == 0:
                break
            await asyncio.sleep(WATCH_PERIOD_S)
        await asyncio.sleep(WATCH_PERIOD_S)
        os._exit(DEAD_ENGINE_EXIT_CODE)
