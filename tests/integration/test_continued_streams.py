"""Replicas that die or hang under 32 answers of every kind: each client gets what it gets when nobody dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.integration.service import QUIET, Service
from tests.integration.test_hung_and_killed import stopped

pytestmark = pytest.mark.slow

NUM_ANSWERS = 32
NUM_TOKENS = 220
MOST = 0.75
LONGER_S = 5.0


@dataclass(slots=True)
class Got:
    """What a client got: text and end of each choice, and how many tokens the usage counts."""

    texts: list[str]
    ends: list[str | None]
    num_tokens: int = 0


@dataclass(slots=True)
class Clients:
    """32 requests, sent together. `num_begun`: streams that have had a token."""

    http: httpx.AsyncClient
    num_begun: int = 0
    silences_s: list[float] = field(default_factory=list)

    async def ask_all(self) -> list[Got]:
        return list(await asyncio.gather(*(self._ask(number) for number in range(NUM_ANSWERS))))

    async def until_most_have_begun(self) -> None:
        """Of the streams, which are three quarters of all requests."""
        while self.num_begun < MOST * MOST * NUM_ANSWERS:
            await asyncio.sleep(0.001)

    async def _ask(self, number: int) -> Got:
        """Every fourth is no stream; every second is a chat; some have two choices, some a stop string that may come;
        half of them are greedy."""
        n = 1 + (number % 5 == 0)
        body: dict[str, Any] = {"model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True, "n": n}
        body |= {"temperature": 0} if number % 4 < 2 else {"temperature": 0.9, "seed": number}
        body |= {"stop": ["zz", "é"]} if number % 7 == 0 else {}
        is_chat, text = number % 2 == 0, f"question {number}"
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        got = Got([""] * n, [None] * n)
        if number % 4 == 3:
            answer = await self.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            self._take(got, answer.json())
        else:
            await self._stream(path, {**body, "stream": True, "stream_options": {"include_usage": True}}, got)
        return got

    async def _stream(self, path: str, body: dict[str, Any], got: Got) -> None:
        heard_s, silence_s = time.monotonic(), 0.0
        async with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            self.num_begun += 1  # the status comes with the first token
            lines = []
            async for line in answer.aiter_lines():
                silence_s, heard_s = max(silence_s, time.monotonic() - heard_s), time.monotonic()
                lines.append(line)
                if line.startswith("data: {"):
                    self._take(got, json.loads(line.removeprefix("data: ")))
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        self.silences_s.append(silence_s)

    def _take(self, got: Got, part: dict[str, Any]) -> None:
        """A chunk, or a whole answer."""
        assert "error" not in part, part
        for choice in part["choices"]:
            index = choice["index"]
            assert got.ends[index] is None, "something came after the end"
            said = choice.get("delta") or choice.get("message") or {}
            got.texts[index] += choice.get("text") or said.get("content") or ""
            got.ends[index] = choice["finish_reason"]
        if part.get("usage"):
            got.num_tokens = part["usage"]["completion_tokens"]


async def two_replicas(service: Service) -> list[dict[str, Any]]:
    replicas = await service.until_replicas("tiny", 2, set(), 60)
    assert len(replicas) == 2
    assert await service.until_quiet(5.0) == QUIET
    return replicas


async def expect_nothing_left(service: Service) -> None:
    assert await service.until_quiet(5.0) == QUIET
    assert await service.router_in_flight() == 0


@pytest.mark.parametrize("victim", ["pid", "engine_pid"])
async def test_no_client_notices_that_a_replica_was_killed(service: Service, victim: str) -> None:
    _, before = await two_replicas(service), await service.continuations()
    async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as http:
        undisturbed = await Clients(http).ask_all()
        clients = Clients(http)
        asking = asyncio.create_task(clients.ask_all())
        await clients.until_most_have_begun()
        now = await service.until_replicas("tiny", 2, set(), 60)
        # The one with more to do: a new one may have got little yet.
        other, killed = sorted(now, key=lambda replica: int(replica["num_streams"]))
        with stopped(other["engine_pid"]):  # neither can finish before the one is dead
            os.kill(killed[victim], signal.SIGKILL)
        assert await asking == undisturbed
    assert await service.continuations() > before, "nobody was in flight at the killed replica: the test proves nothing"
    assert len(await service.until_replicas("tiny", 2, {killed["pid"]}, 60)) == 2
    await expect_nothing_left(service)


async def test_nobody_waits_for_more_than_5_s_longer_when_a_replica_hangs(service: Service) -> None:
    replicas, before = await two_replicas(service), await service.continuations()
    hung = replicas[0]
    async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as http:
        calm = Clients(http)
        undisturbed = await calm.ask_all()
        clients = Clients(http)
        asking = asyncio.create_task(clients.ask_all())
        await clients.until_most_have_begun()
        with stopped(hung["pid"]):
            assert await asking == undisturbed
            assert max(clients.silences_s) < max(calm.silences_s) + LONGER_S
            os.kill(hung["pid"], signal.SIGKILL)
    assert await service.continuations() > before, "nobody was in flight at the hung replica: the test proves nothing"
    assert len(await service.until_replicas("tiny", 2, {hung["pid"]}, 60)) == 2
    await expect_nothing_left(service)


async def test_of_completions_cancels_and_deaths_in_any_mix_nothing_is_left(service: Service) -> None:
    """Some clients leave before, some after the death; a bad request and one that is too long come between."""
    replicas = await two_replicas(service)
    killed = replicas[1]
    async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as http:
        clients = Clients(http)
        asking = [asyncio.create_task(clients._ask(number)) for number in range(NUM_ANSWERS)]
        await clients.until_most_have_begun()
        for task in asking[::4]:
            task.cancel()
        os.kill(killed["pid"], signal.SIGKILL)
        for prompt, status in (("", 400), ([5] * 5000, 400), ([10**9], 400)):
            answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 3})
            assert answer.status_code == status
        for task in asking[1::4]:
            task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(end, Got | asyncio.CancelledError) for end in ends), ends
    assert all(isinstance(end, Got) for number, end in enumerate(ends) if number % 4 > 1)
    assert len(await service.until_replicas("tiny", 2, {killed["pid"]}, 60)) == 2
    await expect_nothing_left(service)
