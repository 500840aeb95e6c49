"""A replica that hangs costs only its own place in what the service says; a killed ingress leaves no streams behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.integration.service import QUIET, Service

pytestmark = pytest.mark.slow

NUM_CLIENTS = 8
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
# A lease lapses after 5 s; the rest is for a busy machine.
LEASE_LIMIT_S = 20.0


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes hang inside the block."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # replaced meanwhile
                os.kill(pid, signal.SIGCONT)


async def targets(service: Service) -> list[str]:
    async with httpx.AsyncClient(base_url=service.url, timeout=10, trust_env=False) as client:
        entries = (await client.get("/metrics/targets")).json()
    return sorted(target for entry in entries for target in entry["targets"])


async def test_a_hung_replica_stays_a_target_and_the_others_keep_their_status(service: Service) -> None:
    hung, other = await service.until_replicas("tiny", 2, set(), 60)
    (cramped,) = await service.until_replicas("cramped", 1, set(), 60)
    before = await targets(service)
    assert {replica["metrics_address"] for replica in (hung, other, cramped)} < set(before)
    with stopped(hung["pid"]):
        for _ in range(2):  # both ingress processes are asked, or one of them twice
            assert await targets(service) == before
            assert [replica["replica_id"] for replica in await service.replicas("tiny")] == [other["replica_id"]]
        assert [replica["pid"] for replica in await service.replicas("cramped")] == [cramped["pid"]]
    assert len(await service.until_replicas("tiny", 2, set(), 60)) == 2


async def one_stream(client: httpx.AsyncClient) -> bool:
    """Whether it came to its regular end."""
    with suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=BODY) as answer:
            return "data: [DONE]" in [line async for line in answer.aiter_lines()]
    return False


async def num_streams(service: Service) -> int:
    return sum(int(replica["num_streams"]) for replica in await service.replicas("tiny"))


async def until_streams(service: Service, count: int, limit_s: float) -> int:
    """Open streams in the replicas once they are `count`, or at the limit. An ingress that just died doesn't answer."""
    deadline_s, streams = time.monotonic() + limit_s, -1
    while streams != count and time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            streams = await num_streams(service)
        await asyncio.sleep(0.05)
    return streams


async def until_ingresses(service: Service, count: int, gone: int, limit_s: float) -> int:
    deadline_s, num_up = time.monotonic() + limit_s, 0
    while num_up != count and time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            num_up = sum(ingress["pid"] != gone for ingress in (await service.status())["ingress"])
        await asyncio.sleep(0.2)
    return num_up


async def test_streams_of_a_killed_ingress_end_and_those_of_the_other_go_on(service: Service) -> None:
    replicas = await service.until_replicas("tiny", 2, set(), 60)
    assert await service.until_quiet(5.0) == QUIET
    async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as client:
        clients = [asyncio.create_task(one_stream(client)) for _ in range(NUM_CLIENTS)]
        assert await until_streams(service, NUM_CLIENTS, 30.0) == NUM_CLIENTS
        with stopped(*(replica["engine_pid"] for replica in replicas)):  # no stream can end by itself
            num_open = await num_streams(service)
            ingresses = (await service.status())["ingress"]
            killed = max(ingresses, key=lambda ingress: int(ingress["in_flight"]))
            lost = killed["in_flight"]
            os.kill(killed["pid"], signal.SIGKILL)
            assert await until_streams(service, num_open - lost, LEASE_LIMIT_S) == num_open - lost
        assert lost > 0
        assert sum(await asyncio.gather(*clients)) == NUM_CLIENTS - lost
    assert await until_ingresses(service, 2, killed["pid"], 60.0) == 2
    assert await service.until_quiet(5.0) == QUIET
