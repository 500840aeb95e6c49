"""A running brimful, started with the command that users type, and questions about what it holds."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
READY_LINE = "Ctrl-C drains"


@dataclass(frozen=True, slots=True)
class Held:
    """What all replicas hold for requests, and how many requests the ingresses work on: all 0 when quiet.

    `missing`: processes that the service should have and that didn't say what they hold.
    """

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    streams: int = 0
    in_flight: int = 0
    missing: int = 0


QUIET = Held()


@dataclass(slots=True)
class Service:
    """`url` answers. `lines` is what the command printed."""

    url: str
    process: subprocess.Popen[str]
    num_ingresses: int
    lines: list[str] = field(default_factory=list)

    async def status(self) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=False) as client:
            answer = await client.get("/status")
            answer.raise_for_status()
            status: dict[str, Any] = answer.json()
            return status

    async def replicas(self, model: str) -> list[dict[str, Any]]:
        """The running replicas of a model that can serve."""
        models = (await self.status())["models"]
        up = next(entry["up"] for entry in models if entry["name"] == model)
        return [replica for replica in up if replica["state"] == "ready"]

    async def held(self) -> Held:
        status = await self.status()
        replicas = [replica for model in status["models"] for replica in model["up"]]
        loads = [replica["load"] for replica in replicas]
        return Held(
            running=sum(load["num_running"] for load in loads),
            waiting=sum(load["num_waiting"] for load in loads),
            prefill_tokens=sum(load["num_prefill_tokens"] for load in loads),
            blocks=sum(
                load["num_blocks_total"] - load["num_blocks_free"] - load["num_blocks_cached"] for load in loads
            ),
            streams=sum(replica["num_streams"] for replica in replicas),
            in_flight=sum(ingress["in_flight"] for ingress in status["ingress"]),
            missing=max(0, self.num_ingresses - len(status["ingress"]))
            + sum(max(0, model["replicas"] - len(model["up"])) for model in status["models"]),
        )

    async def until_quiet(self, limit_s: float) -> Held:
        """What is held when everything is 0, or else at the limit."""
        deadline_s = time.monotonic() + limit_s
        while (held := await self.held()) != QUIET and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        return held

    async def until_replicas(self, model: str, count: int, gone: set[int], limit_s: float) -> list[dict[str, Any]]:
        """The model's replicas once `count` of them run, none with a pid in `gone`; or what is there at the limit."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            replicas = [replica for replica in await self.replicas(model) if replica["pid"] not in gone]
            if len(replicas) == count:
                break
            await asyncio.sleep(0.1)
        return replicas

    async def counter(self, model: str, name: str, **labels: str) -> float:
        """A counter's value, all replicas of the model and all other labels added."""
        addresses = [replica["metrics_address"] for replica in await self.replicas(model)]
        return await _sum_of_series(addresses, name, labels)

    async def router_in_flight(self) -> float:
        """Entries in the ledgers of all routers."""
        return await self.sum_at_ingresses("brimful_router_requests_in_flight")

    async def continuations(self) -> float:
        """Answers that lost their replica and were sent on to another, since the ingresses started."""
        return await self.sum_at_ingresses("brimful_http_continuations_total")

    async def sum_at_ingresses(self, name: str) -> float:
        """A metric's value, all ingresses and all labels added."""
        addresses = [ingress["metrics_address"] for ingress in (await self.status())["ingress"]]
        assert len(addresses) == self.num_ingresses
        return await _sum_of_series(addresses, name, {})


@contextmanager
def running_service(config: dict[str, Any], folder: Path) -> Iterator[Service]:
    """`brimful serve --config` with this Serve config file, until the block is left: then Ctrl-C, which must work."""
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    http = config["http_options"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "deployments.cli", "serve", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    num_ingresses = config["applications"][0]["args"]["ingress"]["num_replicas"]
    service = Service(f"http://{http['host']}:{http['port']}", process, num_ingresses)
    said = threading.Event()
    reader = threading.Thread(target=_read_lines, args=(process, service.lines, said))
    reader.start()
    try:
        said.wait(START_LIMIT_S)
        assert READY_LINE in "".join(service.lines), "brimful serve didn't come up:\n" + "".join(service.lines)
        yield service
    finally:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(STOP_LIMIT_S)
        finally:
            process.kill()
            reader.join()
            if process.stdout is not None:
                process.stdout.close()
    assert code == 0, "brimful serve ended badly:\n" + "".join(service.lines)


async def _sum_of_series(addresses: list[str], name: str, labels: dict[str, str]) -> float:
    """The sum of a metric's series that have these labels, over some processes."""
    total = 0.0
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        for address in addresses:
            text = (await client.get(f"http://{address}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            total += sum(
                sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
            )
    return total


def free_port() -> int:
    """A port that nobody listens on: with a fixed one a test could talk to, and kill, somebody else's service."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _read_lines(process: subprocess.Popen[str], lines: list[str], said: threading.Event) -> None:
    """`said` is set when the service is ready, or when the command ends."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if READY_LINE in line:
            said.set()
    said.set()
