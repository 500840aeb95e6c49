"""`brimful limits` on a running service under load: the next steps obey, no request fails, refusals change nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.service import Service

NUM_CLIENTS = 4
HALF = 256
"""Of the fixture's model, which has the default budget of a CPU."""
NUM_STEPS = 15
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one replica, as one scrape shows it: its budget, the steps so far, and those wider than `HALF` tokens."""

    budget: float
    num_steps: float
    num_wide: float


async def steps_of(service: Service) -> dict[str, Steps]:
    """By replica of the model `tiny`."""
    found = {}
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        for replica in await service.replicas("tiny"):
            page = (await client.get(f"http://{replica['metrics_address']}/metrics")).text
            values = {
                (sample.name, sample.labels.get("le")): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            }
            num_steps = values["brimful_iteration_tokens_total_count", None]
            narrow = values["brimful_iteration_tokens_total_bucket", f"{HALF}.0"]
            budget = values["brimful_max_num_batched_tokens", None]
            found[replica["replica_id"]] = Steps(budget, num_steps, num_steps - narrow)
    return found


async def until(service: Service, condition: Any, what: str) -> dict[str, Steps]:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition(steps := await steps_of(service)):
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {what}; {steps}"
        await asyncio.sleep(0.05)
    return steps


async def brimful(service: Service, *arguments: str) -> tuple[int, str, str]:
    """The command as people run it: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deployments.cli", "limits", "--url", service.url, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def limits_now(service: Service) -> list[dict[str, Any]]:
    """Of every replica of the model `tiny`."""
    async with httpx.AsyncClient(base_url=service.url, timeout=10, trust_env=False) as client:
        models = (await client.get("/limits")).json()["models"]
    return [replica["now"] for model in models for replica in model["replicas"] if model["name"] == "tiny"]


async def budgets(service: Service) -> list[int]:
    return [now["max_num_batched_tokens"] for now in await limits_now(service)]


@asynccontextmanager
async def load(service: Service) -> AsyncIterator[list[str]]:
    """Clients that stream answers to long prompts, each another one, inside the block. Yields how each request ended:
    its finish reason, or what went wrong. Complete after the block."""
    ends: list[str] = []
    stop = asyncio.Event()

    async def one(client: httpx.AsyncClient, drawn: random.Random) -> str:
        prompt = [drawn.randrange(10, 200) for _ in range(700)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}
        reason = "cut short"
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    return line
                if line.startswith("data: {"):
                    reason = json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] or reason
        return reason

    async def keep_asking(client: httpx.AsyncClient, seed: int) -> None:
        drawn = random.Random(seed)
        while not stop.is_set():
            ends.append(await one(client, drawn))

    async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as client:
        asking = [asyncio.create_task(keep_asking(client, seed)) for seed in range(NUM_CLIENTS)]
        try:
            yield ends
        finally:
            stop.set()
            await asyncio.gather(*asking)


async def test_halving_the_budget_under_load_is_obeyed_by_the_next_steps_and_nobody_fails(service: Service) -> None:
    async with load(service) as ends:
        await until(service, lambda s: all(one.num_wide > 0 for one in s.values()) and len(s) == 2, "wide steps")
        try:
            later = await halved(service)
        finally:
            code, _, _ = await brimful(service, "--model", "tiny", "--reset")
        assert code == 0
        await until(service, lambda s: all(s[one].num_wide > later[one].num_wide for one in later), "wide steps again")
    assert len(ends) > NUM_CLIENTS
    assert set(ends) == {"length"}


async def halved(service: Service) -> dict[str, Steps]:
    """Halve the budget; the steps after `NUM_STEPS` more of each replica, none of them wide."""
    code, out, err = await brimful(service, "--model", "tiny", "--max-num-batched-tokens", str(HALF), "--json")
    assert (code, err) == (0, "")
    (model,) = json.loads(out)["models"]
    assert [replica["now"]["max_num_batched_tokens"] for replica in model["replicas"]] == [HALF, HALF]
    lowered = await until(service, lambda s: all(one.budget == HALF for one in s.values()), "gauges that follow")
    later = await until(
        service,
        lambda s: all(s[one].num_steps >= lowered[one].num_steps + NUM_STEPS for one in lowered),
        "more steps",
    )
    assert {one: steps.num_wide for one, steps in later.items()} == {
        one: steps.num_wide for one, steps in lowered.items()
    }
    return later


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--max-num-batched-tokens", "513"],
            "--max-num-batched-tokens = 513 is not allowed: "
            "a whole number, at least max_num_seqs + 1 = 65, at most its start value, 512",
        ),
        (["--max-num-seqs", "32", "--watermark", "nan"], "--watermark = nan is not allowed: a number, at least 0, at"),
        (["--max-num-seqs", "0"], "--max-num-seqs = 0 is not allowed: a whole number, at least 1, at most its start"),
    ],
)
async def test_a_refused_value_changes_nothing(service: Service, arguments: list[str], message: str) -> None:
    before = await limits_now(service)
    code, out, err = await brimful(service, "--model", "tiny", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1
    assert await limits_now(service) == before


async def test_several_models_must_be_told_apart(service: Service) -> None:
    code, _, err = await brimful(service, "--max-num-seqs", "1")
    assert (code, err) == (2, "error: several models are served: tiny on /, cramped on /cramped; name one\n")


async def test_the_table_shows_both_models(service: Service) -> None:
    code, out, _ = await brimful(service)
    assert code == 0
    assert "tiny on /: 2 replicas" in out and "cramped on /cramped: 1 replica" in out


async def test_only_this_machine_may_change_limits(service: Service) -> None:
    before = await limits_now(service)
    body = {"model": "tiny", "limits": {"max_num_seqs": 3}}
    async with httpx.AsyncClient(base_url=service.url, timeout=10, trust_env=False) as client:
        through_proxy = await client.post("/limits", json=body, headers={"x-forwarded-for": "192.0.2.7"})
        web_page = await client.post("/limits", json=body, headers={"origin": "http://example.org"})
    assert [answer.status_code for answer in (through_proxy, web_page)] == [403, 403]
    assert through_proxy.json()["error"]["code"] == "forbidden"
    assert await limits_now(service) == before


@pytest.mark.slow
async def test_a_replica_in_the_place_of_a_dead_one_gets_the_changed_limits(service: Service) -> None:
    replicas = await service.until_replicas("tiny", 2, set(), 60)
    code, _, _ = await brimful(service, "--model", "tiny", "--max-num-batched-tokens", str(HALF))
    assert code == 0
    try:
        os.kill(replicas[0]["pid"], signal.SIGKILL)
        assert len(await service.until_replicas("tiny", 2, {replicas[0]["pid"]}, 60)) == 2
        await until(service, lambda s: [one.budget for one in s.values()] == [HALF, HALF], "the new one's gauge")
        assert await budgets(service) == [HALF, HALF]
    finally:
        await brimful(service, "--model", "tiny", "--reset")
