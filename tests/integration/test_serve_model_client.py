"""The client of an ingress over real Ray Serve, with replicas around the fake model: streams that outlive a scale-down,
replicas that die or fail everything, consumers that leave."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deployments.continued_stream import Continuing
from deployments.leases import Leases
from deployments.open_call import OpenCall
from deployments.replica_deployment import ReplicaDeployment
from deployments.serve_model_client import ServeModelClient
from replica.errors import EngineDead
from replica.request import FinishReason, GenerationRequest, NewsBatch, StreamMessage
from replica.service import ReplicaService
from tests.fake_replica import oracle, request_of, small_config
from tests.faults.engine.factories import SlowFactory
from tests.integration.private_ray import REPLICAS, ROUTER, private_ray

pytestmark = pytest.mark.timeout(300)  # the first test starts Ray

LEASE = "test"
STEP_S = 0.03
NUM_TOKENS = 100


class Replica:
    """A replica deployment as `ReplicaDeployment` is one, around the fake model: 100 tokens take 3 s. The first replica
    to create the file `claim` writes its id there, and its logits are no numbers wherever token 0 is in the context."""

    async def __init__(self, claim: str | None = None) -> None:  # type: ignore[misc]  # Serve awaits it
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._folder = tempfile.mkdtemp()
        factory = SlowFactory(Path(self._folder), faults={"step_s": STEP_S, **self._fault(claim)})
        config = small_config(lease_timeout_s=60.0)
        self._service = await ReplicaService.start(
            config, replica_id=self._replica_id, model_name="fake", runner_factory=factory
        )
        self._num_streams = 0

    def _fault(self, claim: str | None) -> dict[str, int]:
        if claim is None:
            return {}
        try:
            with Path(claim).open("x", encoding="utf-8") as file:
                file.write(self._replica_id)
        except FileExistsError:
            return {}
        return {"nan_token": 0}

    async def submit(
        self, request: GenerationRequest, route: Any = None, exclude: Any = ()
    ) -> AsyncIterator[StreamMessage]:
        async for message in ReplicaDeployment.submit(cast(Any, self), request):
            yield message

    async def news(
        self, lease: str, acknowledged: int, num_batches: int = 1, pin: str | None = None
    ) -> AsyncIterator[NewsBatch]:
        async for batch in ReplicaDeployment.news(cast(Any, self), lease, acknowledged, num_batches):
            yield batch

    async def status(self, pin: str | None = None) -> dict[str, Any]:
        return {"replica_id": self._replica_id, **self._service.status()}

    def record_routing_stats(self) -> dict[str, Any]:
        return asdict(self._service.load())

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            await self._service.close()
            shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="module")
def client() -> Iterator[ServeModelClient]:
    """A private Ray with two replicas behind the router."""
    with private_ray(), ThreadPoolExecutor(1) as threads:
        router = RequestRouterConfig(**ROUTER)
        replica = serve.deployment(num_replicas=2, request_router_config=router, **REPLICAS)(Replica)
        handle: DeploymentHandle[Any] = serve.run(replica.bind(), name="client", route_prefix=None)
        yield ServeModelClient(handle, threads)


def long_request(request_id: str) -> GenerationRequest:
    return request_of(request_id, max_tokens=NUM_TOKENS, lease=LEASE)


async def read(
    client: ServeModelClient, request: GenerationRequest, exclude: str, taken: asyncio.Event
) -> list[StreamMessage]:
    """A request as a pump reads it. `taken` is set once a replica took it."""
    messages = []
    try:
        async for message in client.generate(request, (exclude,)):
            taken.set()
            messages.append(message)
    finally:
        client.forget(request.request_id)
    return messages


async def two_at_each(client: ServeModelClient, name: str) -> dict[str, list[asyncio.Task[list[StreamMessage]]]]:
    """Four long requests that have been taken, by replica."""
    async with asyncio.timeout(30):
        while len(client.loads()) != 2:
            await asyncio.sleep(0.02)
    reading: dict[str, list[asyncio.Task[list[StreamMessage]]]] = {}
    for number in range(4):
        request, taken = long_request(f"{name}-{number}"), asyncio.Event()
        task = asyncio.create_task(read(client, request, client.state.replica_ids()[number % 2], taken))
        await taken.wait()
        replica_id = client.replica_of(request.request_id)
        assert replica_id is not None
        reading.setdefault(replica_id, []).append(task)
    assert [len(tasks) for tasks in reading.values()] == [2, 2]
    return reading


def tokens(messages: list[StreamMessage]) -> list[int]:
    return [token for message in messages for event in message.events for token in event.token_ids]


async def test_all_streams_of_a_replica_are_read_and_nothing_is_left(client: ServeModelClient) -> None:
    for tasks in (await two_at_each(client, "all")).values():
        for messages in await asyncio.gather(*tasks):
            assert messages[0].events == ()
            assert tokens(messages) == oracle(long_request("all"))
            assert messages[-1].events[-1].finish_reason is FinishReason.LENGTH
            assert 3 <= len(messages) <= NUM_TOKENS + 1
    assert len(client.state.ledger) == 0
    async with asyncio.timeout(10):
        while client._news.num_open:
            await asyncio.sleep(0.02)


async def test_a_consumer_that_leaves_ends_its_stream_at_the_replica(client: ServeModelClient) -> None:
    reading = await two_at_each(client, "left")
    tasks = [task for tasks in reading.values() for task in tasks]
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    async with asyncio.timeout(2.0):  # sooner than the streams would end by themselves
        while any(status["num_streams"] for status in await client.ask_all("status")):
            await asyncio.sleep(0.02)


async def test_a_killed_replica_ends_its_streams_at_once_and_no_other(client: ServeModelClient) -> None:
    reading = await two_at_each(client, "killed")
    pids = {status["replica_id"]: status["pid"] for status in await client.ask_all("status")}
    victim, other = sorted(reading)
    os.kill(pids[victim], signal.SIGKILL)
    killed_s = time.monotonic()
    for end in await asyncio.gather(*reading[victim], return_exceptions=True):
        assert isinstance(end, EngineDead)
    assert time.monotonic() - killed_s < 2.0
    for messages in await asyncio.gather(*reading[other]):
        assert len(tokens(messages)) == NUM_TOKENS
    assert len(client.state.ledger) == 0


async def test_a_replica_that_fails_everything_is_ejected_and_no_reader_notices(
    client: ServeModelClient, tmp_path: Path
) -> None:
    """Requests one after the other, until it has failed enough of them."""
    claim, config = tmp_path / "claim", RequestRouterConfig(**ROUTER)
    replica = serve.deployment(num_replicas=3, request_router_config=config, **REPLICAS)(Replica)
    run = partial(serve.run, replica.bind(str(claim)), name="broken", route_prefix=None)
    handle: DeploymentHandle[Any] = await asyncio.to_thread(run)
    with ThreadPoolExecutor(1) as threads:
        broken = ServeModelClient(handle, threads)
        async with asyncio.timeout(30):
            while len(broken.loads()) != 3:
                await asyncio.sleep(0.02)
        leases = Leases(LEASE, time.monotonic)
        async with asyncio.timeout(60):
            number = 0
            while not broken.state.health.ejected():
                number += 1
                prompt_ids = (0, number % 90, 1, 2, 3)  # prompts with nothing in common belong to different replicas
                request = request_of(f"b{number}", max_tokens=2, lease=LEASE, prompt_ids=prompt_ids)
                with OpenCall(leases, broken, [request], Continuing(limit=2, wait_s=10.0)) as call:
                    messages = []
                    while came := await call.read():
                        messages += [message for _, message in came]
                assert tokens(messages) == oracle(request)
        await leases.shut_down()
    assert broken.state.health.ejected() == {claim.read_text(encoding="utf-8")}
    assert len(broken.state.ledger) == 0


async def test_streams_outlive_the_end_of_their_deployment(client: ServeModelClient) -> None:
    """The last test: it deletes the application. Serve ends a replica as soon as it sees no call; between two polls
    there is none but those of the requests."""
    reading = await two_at_each(client, "drained")
    serve.delete("client", _blocking=False)
    for tasks in reading.values():
        for messages in await asyncio.gather(*tasks):
            assert tokens(messages) == oracle(long_request("drained"))
    assert client.state.replica_ids() == []
