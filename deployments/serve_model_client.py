"""`ModelClient` over a Ray Serve handle. Ray's exceptions end here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from deployments.model_client import route_request
from deployments.replica_news import ReplicaNews
from replica.errors import BrimfulError, EngineDead, EngineFailure, Unavailable
from replica.model.api import ModelShape
from replica.model_card import TextBundle
from replica.request import GenerationRequest, LoadReport, NewsBatch, StreamMessage
from replica.scheduler.block_hash import block_hashes
from router.explain import Explanation
from router.serve_router import call_pinned, state_of
from router.state import RouterState
from router.types import RouteRequest

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
MAX_HASHED_INLINE_TOKENS = 2048
FACTS_TIMEOUT_S = 30.0
POLL_TIMEOUT_S = 3.0
"""Well above the time after which a replica answers a poll without news."""
RETRY_AFTER_RESTART_S = 5.0


class ServeModelClient:
    """`ModelClient` over a Serve handle of a replica deployment. `state` is what its router knows in this process.

    `threads`: where long prompts are hashed, so that no other stream waits for it.
    """

    def __init__(self, handle: DeploymentHandle[Any], threads: Executor) -> None:
        self.state: RouterState = state_of(handle)
        self._handle = handle
        self._threads = threads
        self._hashes: dict[str, tuple[bytes, ...]] = {}  # of open requests
        self._submitting = handle.options(method_name="submit", stream=True)
        # Not through the object store, which costs more; unlike the calls of requests, polls need no cancelling.
        self._polling = handle.options(method_name="news", stream=True, _by_reference=False)
        self._news = ReplicaNews(self._poll, self.state.observe, translated)

    def num_replicas(self) -> int:
        return len(self.state.replica_ids())

    def num_ready(self) -> int:
        return self.state.num_answering()

    def loads(self) -> list[LoadReport]:
        return self.state.reports()

    async def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
        route = await self._route_of(request)
        response = self._submitting.remote(request, route=route, exclude=exclude)
        call = aiter(cast(AsyncIterator[StreamMessage], response))
        try:
            async with aclosing(self._news.read(request, call)) as messages:
                async for message in messages:
                    self.state.received(request.request_id, message)
                    yield message
        except BaseException as error:
            response.cancel()  # type: ignore[no-untyped-call]
            if not isinstance(error, Exception):
                raise
            raise translated(error) from error

    async def _poll(
        self, replica_id: str, lease: str, acknowledged: int, num_batches: int
    ) -> AsyncGenerator[NewsBatch | None, None]:
        """Pinned, as `call_pinned` does it, but no answer in time says nothing, and a connection that is cut little:
        the calls of the streams tell when the replica is dead. One that its reader leaves ends by itself."""
        response = self._polling.remote(lease, acknowledged, num_batches, pin=replica_id)
        batches = aiter(cast(AsyncIterator[NewsBatch], response))
        try:
            while True:
                async with asyncio.timeout(POLL_TIMEOUT_S):
                    batch = await anext(batches, None)
                if batch is None:
                    return
                yield batch
        except TimeoutError:
            response.cancel()  # type: ignore[no-untyped-call]
            yield None
        except ActorUnavailableError as error:
            raise Unavailable(f"replica {replica_id} can't be reached") from error
        except Exception as error:
            raise translated(error) from error

    async def _route_of(self, request: GenerationRequest) -> RouteRequest:
        """What the router has to know; the hashes, made once a request, are those by which replicas find prefixes."""
        reports = self.state.reports() if self.state.uses_prefixes else []
        if reports and request.request_id not in self._hashes:
            self._hashes[request.request_id] = await self._hashed(request, reports[0].block_size)
        return route_request(request, self._hashes.get(request.request_id, ()))

    async def _hashed(self, request: GenerationRequest, block_size: int) -> tuple[bytes, ...]:
        token_ids = request.prompt_ids + request.prior_output_ids
        hashed = partial(block_hashes, token_ids, block_size, request.cache_salt)
        if len(token_ids) <= MAX_HASHED_INLINE_TOKENS:
            return hashed()
        return await asyncio.get_running_loop().run_in_executor(self._threads, hashed)

    async def explain(self, request: GenerationRequest) -> Explanation:
        try:
            route = await self._route_of(request)
        finally:
            self._hashes.pop(request.request_id, None)
        return self.state.explain(route)

    def replica_of(self, request_id: str) -> str | None:
        return self.state.replica_of(request_id)

    def last_replica_of(self, request_id: str) -> str | None:
        return self.state.last_replica_of(request_id)

    def forget(self, request_id: str) -> None:
        self._hashes.pop(request_id, None)
        self.state.ended(request_id)

    async def abort(self, replica_id: str, request_id: str) -> None:
        await self._pinned(replica_id, "abort", request_id)

    async def renew(self, replica_id: str, lease: str, request_ids: tuple[str, ...]) -> None:
        await self._pinned(replica_id, "renew", lease, request_ids)

    def distrust(self, replica_id: str) -> None:
        self.state.distrust(replica_id)

    def failed(self, request_id: str, replica_id: str) -> None:
        self.state.health.failed(request_id, replica_id)

    def succeeded(self, request_id: str, replica_id: str) -> None:
        self.state.health.succeeded(request_id, replica_id)

    async def facts(self) -> tuple[TextBundle, ModelShape]:
        try:
            async with asyncio.timeout(FACTS_TIMEOUT_S):
                bundle, shape = await self._handle.facts.remote()
        except Exception as error:
            raise translated(error) from error
        return bundle, shape

    async def ask_all(self, method: str) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*(self._ask(replica_id, method) for replica_id in self.state.replica_ids()))
        return [answer for answer in answers if answer is not None]

    def metrics_addresses(self) -> list[str]:
        return self.state.metrics_addresses()

    async def _ask(self, replica_id: str, method: str) -> dict[str, Any] | None:
        """One replica's answer, None when it has none: each has a time limit of its own, so a silent one costs only
        itself."""
        try:
            answer: dict[str, Any] = await self._pinned(replica_id, method)
        except BrimfulError as error:
            logger.warning("replica %s didn't answer %s: %s", replica_id, method, error)
            return None
        return answer

    async def _pinned(self, replica_id: str, method: str, *args: object) -> Any:
        try:
            return await call_pinned(self._handle, replica_id, method, *args, timeout_s=CONTROL_TIMEOUT_S)
        except Exception as error:
            raise translated(error) from error


def translated(error: Exception) -> BrimfulError:
    """A Ray exception as one of ours. What nobody expected is logged whole and told to the client without details."""
    if isinstance(error, BrimfulError):
        return error
    if isinstance(error, RayActorError):
        return EngineDead("the replica that worked on this request is gone", retry_after_s=RETRY_AFTER_RESTART_S)
    if isinstance(error, (DeploymentUnavailableError, BackPressureError, TimeoutError)):
        return Unavailable("no replica can take the request now", retry_after_s=RETRY_AFTER_RESTART_S)
    if isinstance(error, (RequestCancelledError, RayServeException, RayError)):
        logger.error("call to a replica failed", exc_info=error)
        return EngineFailure("the request failed inside the service")
    logger.error("unexpected error while calling a replica", exc_info=error)
    return EngineFailure("the request failed inside the service")
