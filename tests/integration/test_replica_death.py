"""A replica that dies under load: its requests end in an error within 2 s, the others go on, another one comes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.integration.service import QUIET, Service

pytestmark = pytest.mark.slow

NUM_CLIENTS = 8
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of the load: when it was sent and ended (seconds on the monotonic clock), and how."""

    sent_s: float
    ended_s: float
    ok: bool
    error_code: str | None


async def one_request(client: httpx.AsyncClient) -> Outcome:
    sent_s = time.monotonic()
    done, code = False, None
    async with client.stream("POST", "/v1/completions", json=BODY) as answer:
        if answer.status_code != 200:
            code = json.loads(await answer.aread())["error"]["code"]
        else:
            async for line in answer.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith('data: {"error"'):
                    code = json.loads(line.removeprefix("data: "))["error"]["code"]
    return Outcome(sent_s, time.monotonic(), done and code is None, code)


@asynccontextmanager
async def load(service: Service) -> AsyncIterator[list[Outcome]]:
    """Keeps `NUM_CLIENTS` requests going inside the block; yields what became of them, complete after it."""
    outcomes: list[Outcome] = []
    stop = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            outcomes.append(await one_request(client))

    async with httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as client:
        asking = [asyncio.create_task(keep_asking(client)) for _ in range(NUM_CLIENTS)]
        try:
            yield outcomes
        finally:
            stop.set()
            await asyncio.gather(*asking)


async def busiest(service: Service) -> dict[str, Any]:
    """The replica that computes most streams, once there is one with several. Those open but not taken yet don't count:
    they lose nothing when it dies, another replica takes them."""
    while True:
        replica = max(await service.replicas("tiny"), key=lambda replica: int(replica["load"]["num_running"]))
        if replica["load"]["num_running"] >= 2:
            return replica


@pytest.mark.parametrize("victim", ["pid", "engine_pid"])
async def test_killed_under_load(service: Service, victim: str) -> None:
    assert len(await service.until_replicas("tiny", 2, set(), 60)) == 2
    async with load(service) as outcomes:
        while len(outcomes) < NUM_CLIENTS:
            await asyncio.sleep(0.05)
        killed = await busiest(service)
        killed_s = time.monotonic()
        os.kill(killed[victim], signal.SIGKILL)
        while sum(outcome.ok and outcome.sent_s > killed_s for outcome in outcomes) < NUM_CLIENTS:
            await asyncio.sleep(0.05)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert failed, "nobody was in flight at the killed replica: the test proves nothing"
    assert {outcome.error_code for outcome in failed} == {"engine_dead"}
    assert max(outcome.ended_s for outcome in failed) - killed_s < 2.0
    assert max(outcome.sent_s for outcome in failed) - killed_s < 1.0
    assert min(outcome.sent_s for outcome in outcomes if outcome.ok and outcome.sent_s > killed_s) - killed_s < 1.0
    after = await service.until_replicas("tiny", 2, {killed["pid"]}, 30 - (time.monotonic() - killed_s))
    assert len(after) == 2, "the replica wasn't replaced within 30 s"
    assert await service.until_quiet(2.0) == QUIET


async def test_a_replica_that_hangs_loses_its_streams_and_gets_no_new_ones(service: Service) -> None:
    assert len(await service.until_replicas("tiny", 2, set(), 60)) == 2
    async with load(service) as outcomes:
        while len(outcomes) < NUM_CLIENTS:
            await asyncio.sleep(0.05)
        hung = await busiest(service)
        hung_s = time.monotonic()
        os.kill(hung["pid"], signal.SIGSTOP)
        try:
            while all(outcome.ok for outcome in outcomes) and time.monotonic() - hung_s < 20:
                await asyncio.sleep(0.05)
        finally:
            os.kill(hung["pid"], signal.SIGKILL)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert {outcome.error_code for outcome in failed} == {"engine_dead"}
    assert max(outcome.ended_s for outcome in failed) - hung_s < 10.0
    assert max(outcome.sent_s for outcome in failed) - hung_s < 1.0
    assert len(await service.until_replicas("tiny", 2, {hung["pid"]}, 60)) == 2


async def test_a_model_without_any_replica_refuses_at_once_and_comes_back(service: Service) -> None:
    replicas = await service.until_replicas("cramped", 1, set(), 60)
    os.kill(replicas[0]["pid"], signal.SIGKILL)
    answers: list[tuple[int, int, int]] = []
    deadline_s = time.monotonic() + 30
    async with httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as client:
        while time.monotonic() < deadline_s and 200 not in [codes[0] for codes in answers]:
            started_s = time.monotonic()
            answer = await client.post(
                "/cramped/v1/completions", json={"model": "cramped", "prompt": "hello", "max_tokens": 1}
            )
            assert time.monotonic() - started_s < 2.0
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) >= 1
            health, ready = await client.get("/health"), await client.get("/ready")
            answers.append((answer.status_code, health.status_code, ready.status_code))
            await asyncio.sleep(0.1)
    assert {codes[1] for codes in answers} == {200}  # the ingress lives: nobody may restart it for this
    assert (503, 200, 503) in answers
    assert answers[-1] == (200, 200, 200)
