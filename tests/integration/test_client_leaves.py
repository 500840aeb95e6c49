"""Clients that leave: at any moment, in any way, nothing of their requests is left within a second."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.integration.raw_client import RawClient
from tests.integration.service import QUIET, Held, Service

PATH = "/v1/completions"
MINUTES_OF_WORK: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 1000, "ignore_eos": True}
LONG_PROMPT = [5] * 900
QUIET_WITHIN_S = 1.0
LET_IN_LIMIT_S = 60.0


async def until_busy(service: Service) -> Held:
    """Returns once a replica works on something."""
    while not (held := await service.held()).running + held.waiting:
        await asyncio.sleep(0.01)
    return held


async def until_let_in(service: Service) -> None:
    """Returns once a request made now is answered. The proxy accepts connections in the order in which they were made,
    so by then everybody who left before has been let in. A client can leave long before that: its connection and its
    request wait in the kernel, and on a busy machine thousands of them are worked off for many seconds.

    The order holds while no more than 2,048 wait: whom the kernel turns away there comes again seconds later.
    """
    async with httpx.AsyncClient(base_url=service.url, timeout=LET_IN_LIMIT_S, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200


async def expect_quiet(service: Service, within_s: float = QUIET_WITHIN_S) -> None:
    """Nothing is left of any request: not in the replicas, not in the ingresses, not in the routers' ledgers. The time
    counts from when all who left had been let in: of a client that it doesn't know the service can hold nothing."""
    await until_let_in(service)
    assert await service.until_quiet(within_s) == QUIET
    assert await service.router_in_flight() == 0


async def canary(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=10, trust_env=False) as client:
        answer = await client.post(PATH, json={"model": "tiny", "prompt": "hello", "max_tokens": 3, "ignore_eos": True})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_in_the_middle_of_a_stream(service: Service) -> None:
    client = await RawClient.connect(service.url)
    await client.post(PATH, {**MINUTES_OF_WORK, "stream": True})
    await client.read_until(b"data: ")
    assert (await service.held()).running == 1
    await client.leave()
    await expect_quiet(service)


async def test_while_a_plain_answer_is_being_made(service: Service) -> None:
    client = await RawClient.connect(service.url)
    await client.post(PATH, {**MINUTES_OF_WORK, "n": 2})
    assert (await until_busy(service)).streams == 1
    await client.leave()
    await expect_quiet(service)


async def test_during_the_prefill_of_many_long_prompts(service: Service) -> None:
    clients: list[RawClient] = []
    held = QUIET
    while not held.prefill_tokens:  # more and more of them, until a replica is seen in the middle of a prompt
        for _ in range(16):
            clients.append(await RawClient.connect(service.url))
            prompt = [len(clients) % 400 + 4, *LONG_PROMPT]
            await clients[-1].post(PATH, {**MINUTES_OF_WORK, "prompt": prompt, "max_tokens": 100})
        held = await service.held()
    await asyncio.gather(*(client.leave() for client in clients))
    await expect_quiet(service)


async def test_in_the_middle_of_its_own_body(service: Service) -> None:
    client = await RawClient.connect(service.url)
    await client.post(PATH, {**MINUTES_OF_WORK, "prompt": LONG_PROMPT}, cut_at=500)
    while (await service.held()).in_flight != 1:
        await asyncio.sleep(0.01)
    await client.leave()
    await expect_quiet(service)


async def test_several_prompts_at_once(service: Service) -> None:
    client = await RawClient.connect(service.url)
    await client.post(PATH, {**MINUTES_OF_WORK, "prompt": ["a", "b", "c", "d"], "stream": True})
    await client.read_until(b"data: ")
    await client.leave()
    await expect_quiet(service)


async def test_two_hundred_that_leave_at_any_moment_leave_nothing(service: Service) -> None:
    rng = random.Random(7)
    aborts_before = await service.counter("tiny", "brimful_request_success_total", finished_reason="abort")

    async def one(number: int) -> None:
        client = await RawClient.connect(service.url)
        prompt = [number % 400 + 4, *LONG_PROMPT] if number % 3 == 0 else "hello"
        await client.post(PATH, {**MINUTES_OF_WORK, "prompt": prompt, "max_tokens": 100, "stream": number % 2 == 0})
        await asyncio.sleep(rng.uniform(0, 0.3))
        await client.leave()

    for start in range(0, 200, 50):
        await asyncio.gather(*(one(start + number) for number in range(50)))
    await expect_quiet(service)
    aborts = await service.counter("tiny", "brimful_request_success_total", finished_reason="abort") - aborts_before
    assert 0 < aborts <= 200
    await canary(service)


async def test_what_nobody_reads_is_not_generated(service: Service) -> None:
    before = await service.counter("tiny", "brimful_generation_tokens_total")
    clients = [await RawClient.connect(service.url) for _ in range(10)]
    for client in clients:
        await client.post(PATH, {**MINUTES_OF_WORK, "stream": True})
        await client.read_until(b"data: ")
    await asyncio.gather(*(client.leave() for client in clients))
    await expect_quiet(service)
    assert await service.counter("tiny", "brimful_generation_tokens_total") - before < 5000  # of 10,000 asked for


@pytest.mark.slow
async def test_waves_of_clients_that_leave_within_milliseconds_take_nothing_from_those_that_stay(
    service: Service,
) -> None:
    """Cancellations that race with the start of the call they cancel: no slot of any process may stay taken."""
    rng = random.Random(8)

    async def one(number: int) -> None:
        client = await RawClient.connect(service.url)
        body = {**MINUTES_OF_WORK, "prompt": "hello " * 50, "stream": number % 2 == 0}
        await client.post(PATH, body, cut_at=rng.choice([None, None, 100]))
        await asyncio.sleep(rng.uniform(0, 0.02))
        await client.leave()

    for _ in range(10):
        await asyncio.gather(*(one(number) for number in range(250)))
        await until_let_in(service)
    await expect_quiet(service, within_s=5.0)
    await asyncio.gather(*(canary(service) for _ in range(32)))
