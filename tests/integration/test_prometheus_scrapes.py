"""A real Prometheus discovers and scrapes the running service: its values are what the client counted, and every panel
of the overview has something to show."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards.generate import boards
from tests.dashboards.exporters import Prometheus, prometheus
from tests.dashboards.test_prometheus import chosen, shipped_config
from tests.integration.tiny_chat_model import save_tiny_chat_model

BINARY = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BINARY is None, reason="prometheus (Debian package prometheus) isn't installed"),
]

ROOT = Path(__file__).resolve().parents[2]
EXPRESSIONS = [
    target["expr"] for board in boards() for panel in board.json()["panels"] for target in panel.get("targets", [])
]
# Two replicas of four places and 20 blocks each: a dozen long answers don't fit, so some wait and some are preempted.
LIMITS = {
    "replicas": 2,
    "max-num-seqs": 4,
    "max-num-batched-tokens": 64,
    "num-blocks": 20,
    "block-size": 16,
    "max-model-len": 256,
    "num-threads": 1,
    "watermark": 0.0,
    "served-model-name": "tiny",
}
LONG_ANSWER = 120
HAPPENED = (
    "brimful_num_preemptions_total",
    'brimful_http_requests_total{status="499"}',
    "brimful_e2e_request_latency_seconds_count",
)
"""What the load must have brought about before panels are looked at."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`brimful serve` with a tiny model on a free port; gives its address when it is ready."""
    folder = tmp_path_factory.mktemp("service")
    model = save_tiny_chat_model(folder / "tiny")
    (port,) = free_ports(1)
    flags = [text for name, value in LIMITS.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "deployments.cli", "serve", "--model", str(model), "--port", str(port), *flags]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/ready", process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=90)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float = 180.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        threading.Event().wait(0.5)
    raise AssertionError(f"not ready after {limit_s} s:\n{log.read_text()}")


@pytest.fixture
def server(service: str, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration (short intervals), once it sees all three processes."""
    assert BINARY is not None
    with prometheus(BINARY, shipped_config(f"{service}/metrics/targets"), tmp_path) as running:
        running.wait_for("count(up == 1)", 3)
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
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:

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


async def test_every_panel_shows_finite_values_under_load(service: str, server: Prometheus) -> None:
    stop = asyncio.Event()
    load = asyncio.create_task(_load(service, stop))
    try:
        for happened in HAPPENED:
            await asyncio.to_thread(server.wait_for, f"min(rate({happened}[10s]) > 0)", 0.01, 90.0)
        shown = {expr: await asyncio.to_thread(server.values, chosen(expr)) for expr in EXPRESSIONS}
    finally:
        stop.set()
        await load
    assert [expr for expr, values in shown.items() if not values] == []
    assert [expr for expr, values in shown.items() if not all(math.isfinite(value) for value in values)] == []


def test_values_are_what_the_client_counted(service: str, server: Prometheus) -> None:
    counted = {
        "http": 'sum(brimful_http_requests_total{route="/v1/chat/completions",status="200"})',
        "ended": 'sum(brimful_request_success_total{finished_reason="length"})',
        "prompt": "sum(brimful_prompt_tokens_total)",
        "generated": "sum(brimful_generation_tokens_total)",
        "first tokens": "sum(brimful_time_to_first_token_seconds_count)",
    }
    server.wait_for("sum(brimful_num_requests_running) + sum(brimful_num_requests_waiting) == bool 0", 1.0)
    before = {name: server.values(expr)[0] for name, expr in counted.items()}
    usages = []
    for number in range(10):
        answer = httpx.post(f"{service}/v1/chat/completions", json=body(number, 7 + number), timeout=60.0)
        usages.append(answer.json()["usage"])
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


def test_each_target_is_one_process(service: str, server: Prometheus) -> None:
    groups = httpx.get(f"{service}/metrics/targets").json()
    targets = [target for group in groups for target in group["targets"]]
    assert len(targets) == len(set(targets)) == 3
    assert server.values('count(up{job="brimful"} == 1)') == [3.0]
    assert len(server.query("brimful_max_num_seqs")) == 2
