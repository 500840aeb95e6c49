"""A real Prometheus discovers and scrapes the running service: its values are what the client counted, and every panel
of the overview has something to show."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards.generate import boards
from tests.dashboards.exporters import Prometheus, prometheus
from tests.dashboards.test_prometheus import chosen, shipped_config
from tests.integration.service import Service

BINARY = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="prometheus (Debian package prometheus) isn't installed"),
]

EXPRESSIONS = [
    target["expr"] for board in boards() for panel in board.json()["panels"] for target in panel.get("targets", [])
]
LONG_ANSWER = 120
HAPPENED = (
    'brimful_http_requests_total{status="499"}',
    "brimful_e2e_request_latency_seconds_count",
)
"""What the load must have brought about before panels are looked at."""


def processes(service: Service) -> tuple[int, int]:
    """How many replica and how many ingress processes the service says it has."""
    status = httpx.get(f"{service.url}/status", trust_env=False).json()
    return sum(len(model["up"]) for model in status["models"]), len(status["ingress"])


@pytest.fixture
def server(service: Service, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration (short intervals), once it sees every process."""
    assert BINARY is not None
    with prometheus(BINARY, shipped_config(f"{service.url}/metrics/targets"), tmp_path) as running:
        running.wait_for("count(up == 1)", sum(processes(service)))
        yield running


def body(number: int, max_tokens: int, **others: Any) -> dict[str, Any]:
    text = f"{number % 2} tell me something long about continuous batching"
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **others}


async def _leave_early(client: httpx.AsyncClient) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body(0, LONG_ANSWER, stream=True)) as response:
        async for _ in response.aiter_bytes():
            return


async def _load(url: str, stop: asyncio.Event) -> None:
    """Twelve clients with long answers, some of which leave early; unknown models in between."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:

        async def one(first: int) -> None:
            number = first
            while not stop.is_set():
                if number % 5 == 4:
                    await _leave_early(client)
                    await client.post("/v1/chat/completions", json=body(0, 1) | {"model": "none"})
                else:
                    answer = await client.post("/v1/chat/completions", json=body(number, LONG_ANSWER))
                    assert answer.status_code == 200, answer.text
                number += 1

        await asyncio.gather(*(one(first) for first in range(12)))


async def test_every_panel_shows_finite_values_under_load(service: Service, server: Prometheus) -> None:
    stop = asyncio.Event()
    load = asyncio.create_task(_load(service.url, stop))
    try:
        for happened in HAPPENED:
            await asyncio.to_thread(server.wait_for, f"min(rate({happened}[10s]) > 0)", 0.01, 90.0)
        shown = {expr: await asyncio.to_thread(server.values, chosen(expr)) for expr in EXPRESSIONS}
    finally:
        stop.set()
        await load
    assert [expr for expr, values in shown.items() if not values] == []
    assert [expr for expr, values in shown.items() if not all(math.isfinite(value) for value in values)] == []


def test_values_are_what_the_client_counted(service: Service, server: Prometheus) -> None:
    counted = {
        "http": 'sum(brimful_http_requests_total{route="/v1/chat/completions",status="200"})',
        "ended": 'sum(brimful_request_success_total{finished_reason="length"})',
        "prompt": "sum(brimful_prompt_tokens_total)",
        "generated": "sum(brimful_generation_tokens_total)",
        "first tokens": "sum(brimful_time_to_first_token_seconds_count)",
    }
    server.wait_for("sum(brimful_num_requests_running) + sum(brimful_num_requests_waiting) == bool 0", 1.0)
    before = {name: server.values(expr)[0] for name, expr in counted.items()}
    with httpx.Client(base_url=service.url, timeout=60.0, trust_env=False) as client:
        answers = [client.post("/v1/chat/completions", json=body(number, 7 + number)) for number in range(10)]
    usages = [answer.json()["usage"] for answer in answers]
    expected = {
        "http": 10.0,
        "ended": 10.0,
        "prompt": float(sum(usage["prompt_tokens"] for usage in usages)),
        "generated": float(sum(usage["completion_tokens"] for usage in usages)),
        "first tokens": 10.0,
    }
    for name, expr in counted.items():
        server.wait_for(expr, before[name] + expected[name])
    assert {name: server.values(expr)[0] - before[name] for name, expr in counted.items()} == expected


def test_each_target_is_one_process(service: Service, server: Prometheus) -> None:
    groups = httpx.get(f"{service.url}/metrics/targets", trust_env=False).json()
    targets = [target for group in groups for target in group["targets"]]
    num_replicas, num_ingresses = processes(service)
    assert len(targets) == len(set(targets)) == num_replicas + num_ingresses
    assert server.values('count(up{job="brimful"} == 1)') == [float(num_replicas + num_ingresses)]
    assert len(server.query("brimful_max_num_seqs")) == num_replicas
    assert len(server.query("brimful_http_requests_in_flight")) == num_ingresses
