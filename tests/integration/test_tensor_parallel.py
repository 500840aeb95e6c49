"""A replica over two processes behind the whole service: the same answers as over one; when a rank is killed, its
streams end with engine_dead (nobody continues them here), the replica is replaced, and no process of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.service import QUIET, START_LIMIT_S, Service, free_port, running_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_LIMIT_S + 240)]

METRICS_PORTS = "9700-9749"
PROMPTS = ("hello", "a longer prompt, which has a few more tokens in it", "hello again")
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
# Serve sees that the process is gone, starts another, which loads two shards.
REPLACED_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def split_service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("split")
    common: dict[str, Any] = {
        "model": str(tiny_model),
        "download_dir": str(folder / "models"),
        "device": "cpu",
        "max_model_len": 1024,
        "num_blocks": 256,
        "block_size": 16,
    }
    args = {
        "models": [
            {**common, "served_model_name": "split", "tensor_parallel_size": 2},
            {**common, "served_model_name": "whole", "route": "/whole"},
        ],
        "ingress": {"num_replicas": 1, "max_continuations": 0},
        "metrics_port_range": METRICS_PORTS,
        "drain_timeout_s": 5,
    }
    application = {"name": "brimful", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
    config = {"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": [application]}
    with running_service(config, folder) as running:
        yield running


async def completion(client: httpx.AsyncClient, route: str, model: str, prompt: str, **sampling: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, **sampling}
    answer = await client.post(f"{route}/v1/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def all_answers(client: httpx.AsyncClient, route: str, model: str) -> list[str]:
    asked = [completion(client, route, model, prompt, **how) for prompt in PROMPTS for how in SAMPLING]
    return list(await asyncio.gather(*asked))


async def error_of_long_stream(client: httpx.AsyncClient) -> str | None:
    """The code of the error event that ends it."""
    body = {"model": "split", "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and "error" in (event := json.loads(line.removeprefix("data: "))):
                return str(event["error"]["code"])
    return None


def ranks_of(replica: dict[str, Any]) -> list[int]:
    return [child.pid for child in psutil.Process(replica["engine_pid"]).children()]


async def until_gone(pids: list[int], limit_s: float) -> list[int]:
    deadline_s = time.monotonic() + limit_s
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
    return left


async def test_two_processes_answer_as_one_and_a_killed_rank_costs_one_replica(split_service: Service) -> None:
    service = split_service
    async with httpx.AsyncClient(base_url=service.url, timeout=120, trust_env=False) as client:
        expected = await all_answers(client, "/whole", "whole")
        assert await all_answers(client, "", "split") == expected

        (replica,) = await service.replicas("split")
        (rank,) = ranks_of(replica)
        streams = [asyncio.create_task(error_of_long_stream(client)) for _ in range(4)]
        while (await service.held()).running < len(streams):
            await asyncio.sleep(0.02)
        os.kill(rank, signal.SIGKILL)
        assert await asyncio.gather(*streams) == ["engine_dead"] * len(streams)

        (successor,) = await service.until_replicas("split", 1, {replica["pid"]}, REPLACED_LIMIT_S)
        assert await until_gone([rank, replica["engine_pid"], replica["pid"]], 10.0) == []
        (new_rank,) = ranks_of(successor)
        assert new_rank != rank
        assert await all_answers(client, "", "split") == expected
        assert await service.until_quiet(10.0) == QUIET

        # An idle replica that loses a rank is replaced too, before a request has to find out.
        os.kill(new_rank, signal.SIGKILL)
        gone = {replica["pid"], successor["pid"]}
        assert len(await service.until_replicas("split", 1, gone, REPLACED_LIMIT_S)) == 1
        assert await all_answers(client, "", "split") == expected
