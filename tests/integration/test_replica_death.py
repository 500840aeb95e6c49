"""A replica that dies or hangs under load: no client notices, another replica comes. `test_continued_streams.py` looks
at what they get, letter by letter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.service import QUIET, Service

pytestmark = pytest.mark.slow

MANY = 0.75
"""Share of the first requests that the routers, which spread them, never send to one replica: when so many have had a
token, each replica has made some."""
MAX_SILENCE_S = 5.0
"""The longest that a client may wait for its next line. Undisturbed it waits for some milliseconds."""
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
FIRST_BODY = {**BODY, "max_tokens": 900}  # long: most are still on their way when the last of them begins


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of the load: when it was sent and ended (seconds on the monotonic clock), and how. `heard_s`: when
    its lines came."""

    sent_s: float
    ended_s: float
    ok: bool
    error_code: str | None
    heard_s: tuple[float, ...]

    def longest_wait_s(self, from_s: float) -> float:
        """For its next line, as far as it waited after `from_s`."""
        times_s = [max(time_s, from_s) for time_s in (self.sent_s, *self.heard_s, self.ended_s)]
        return max(later_s - earlier_s for earlier_s, later_s in pairwise(times_s))


class Load:
    """Clients, each with one request after another. `outcomes`: what became of those that ended."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.outcomes: list[Outcome] = []
        self.num_computed = 0  # clients whose first request has its first token
        self.stopping = False

    async def client(self, http: httpx.AsyncClient) -> None:
        self.outcomes.append(await self._request(http, is_first=True))
        while not self.stopping:
            self.outcomes.append(await self._request(http))

    async def until_many_are_computed(self) -> None:
        """Returns when `MANY` of the first requests, all sent at once, have had a token. A client whose request is over
        sends the next one, so all are in flight from here on, and a replica's death must hit some of them."""
        while self.num_computed < MANY * self.num_clients:
            await asyncio.sleep(0.001)

    async def until_answered_after(self, when_s: float) -> None:
        """Returns when as many requests as there are clients were sent after `when_s` and answered well."""
        while sum(outcome.ok and outcome.sent_s > when_s for outcome in self.outcomes) < self.num_clients:
            await asyncio.sleep(0.05)

    def longest_wait_s(self, from_s: float) -> float:
        return max(outcome.longest_wait_s(from_s) for outcome in self.outcomes)

    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.ok]

    async def _request(self, http: httpx.AsyncClient, is_first: bool = False) -> Outcome:
        sent_s, done, code = time.monotonic(), False, None
        heard_s: list[float] = []
        async with http.stream("POST", "/v1/completions", json=FIRST_BODY if is_first else BODY) as answer:
            if answer.status_code != 200:
                code = json.loads(await answer.aread())["error"]["code"]
            else:
                self.num_computed += is_first  # the status comes with the first token
                async for line in answer.aiter_lines():
                    heard_s.append(time.monotonic())
                    done = done or line == "data: [DONE]"
                    if line.startswith('data: {"error"'):
                        code = json.loads(line.removeprefix("data: "))["error"]["code"]
        return Outcome(sent_s, time.monotonic(), done and code is None, code, tuple(heard_s))


@asynccontextmanager
async def load(service: Service, num_clients: int) -> AsyncIterator[Load]:
    """Keeps the clients busy inside the block; what became of their requests is complete after it. Short requests go
    before them: what a process does for the first time takes long, and is not what is tested."""
    clients = Load(num_clients)
    async with httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as http:
        warm_up = [http.post("/v1/completions", json={**BODY, "stream": False}) for _ in range(2 * num_clients)]
        assert {answer.status_code for answer in await asyncio.gather(*warm_up)} == {200}
        asking = [asyncio.create_task(clients.client(http)) for _ in range(num_clients)]
        try:
            yield clients
        finally:
            clients.stopping = True
            await asyncio.gather(*asking)


def oldest(replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """The one that was started first. One that has just started may get nothing: it hasn't reported yet, and the others
    are preferred."""
    return min(replicas, key=lambda replica: Path(f"/proc/{replica['pid']}").stat().st_mtime_ns)


@pytest.mark.parametrize("victim", ["pid", "engine_pid"])
async def test_killed_under_load(service: Service, victim: str) -> None:
    replicas = await service.until_replicas("tiny", 2, set(), 60)
    assert len(replicas) == 2
    killed, before = oldest(replicas), await service.continuations()
    async with load(service, 8) as clients:
        await clients.until_many_are_computed()
        killed_s = time.monotonic()
        os.kill(killed[victim], signal.SIGKILL)
        await clients.until_answered_after(killed_s)
    assert clients.failed() == []
    assert await service.continuations() > before, "nobody was in flight at the killed replica: the test proves nothing"
    assert clients.longest_wait_s(killed_s) < MAX_SILENCE_S
    after = await service.until_replicas("tiny", 2, {killed["pid"]}, 30 - (time.monotonic() - killed_s))
    assert len(after) == 2, "the replica wasn't replaced within 30 s"
    assert await service.until_quiet(2.0) == QUIET
    assert await service.router_in_flight() == 0


async def test_a_replica_that_hangs_loses_no_stream(service: Service) -> None:
    """What it computes goes on at the other within seconds, and so does what it was sent and hasn't taken."""
    replicas = await service.until_replicas("tiny", 2, set(), 60)
    assert len(replicas) == 2
    hung, before = oldest(replicas), await service.continuations()
    async with load(service, 4) as clients:  # what more of them have on the way is heard for seconds after the hang
        await clients.until_many_are_computed()
        hung_s = time.monotonic()
        os.kill(hung["pid"], signal.SIGSTOP)
        try:
            while await service.continuations() == before and time.monotonic() - hung_s < 20:
                await asyncio.sleep(0.05)
            await clients.until_answered_after(time.monotonic())
        finally:
            os.kill(hung["pid"], signal.SIGKILL)
    assert clients.failed() == []
    assert await service.continuations() > before, "nobody was in flight at the hung replica: the test proves nothing"
    assert clients.longest_wait_s(hung_s) < MAX_SILENCE_S
    assert len(await service.until_replicas("tiny", 2, {hung["pid"]}, 60)) == 2
    assert await service.until_quiet(2.0) == QUIET
    assert await service.router_in_flight() == 0


async def test_the_stream_of_the_only_replica_goes_on_at_its_replacement(service: Service) -> None:
    (killed,) = await service.until_replicas("cramped", 1, set(), 60)
    body = {**BODY, "model": "cramped", "max_tokens": 200, "temperature": 0}
    ready: list[int] = []

    async def ask_ready(http: httpx.AsyncClient) -> None:
        while True:
            ready.append((await http.get("/ready")).status_code)
            await asyncio.sleep(0.1)

    async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as http:
        whole = (await http.post("/cramped/v1/completions", json={**body, "stream": False})).json()["choices"][0]
        text, end = "", None
        async with http.stream("POST", "/cramped/v1/completions", json=body) as answer:
            os.kill(killed["engine_pid"], signal.SIGKILL)
            asking = asyncio.create_task(ask_ready(http))
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    text, end = text + choice["text"], choice["finish_reason"]
            asking.cancel()
    assert 503 in ready
    assert (text, end) == (whole["text"], whole["finish_reason"])
    assert len(await service.until_replicas("cramped", 1, {killed["pid"]}, 30)) == 1


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
