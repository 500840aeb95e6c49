"""Ctrl-C while a stream is open: it is finished, and what comes meanwhile is told to come back."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.service import free_port, running_service

NUM_TOKENS = 1800
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_stream_finishes_while_new_requests_get_503(tiny_model: Path, tmp_path: Path) -> None:
    model = {
        "model": str(tiny_model),
        "served_model_name": "tiny",
        "download_dir": str(tmp_path / "models"),
        "max_model_len": 2048,
    }
    args = {
        "models": [model],
        "ingress": {"num_replicas": 2},
        "metrics_port_range": "8550-8559",
        "drain_timeout_s": 120,
    }
    app = {"name": "brimful", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
    config = {"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": [app]}
    with running_service(config, tmp_path) as service, httpx.Client(base_url=service.url, trust_env=False) as client:
        body: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=120) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            service.process.send_signal(signal.SIGINT)
            until_draining(client)
            refused = client.post("/v1/completions", json={**body, "max_tokens": 1})
            health = client.get("/health")
            events = [line for line in (first, *lines) if line.startswith("data: ")]
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "unavailable"
        assert health.status_code == 200
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert service.process.wait(60) == 0


def until_draining(client: httpx.Client) -> None:
    """Until three answers in a row say so: each comes from one of the two ingress processes."""
    deadline_s = time.monotonic() + 30
    in_a_row = 0
    while in_a_row < 3:
        assert time.monotonic() < deadline_s, "not draining within 30 s"
        answer = client.get("/ready")
        in_a_row = in_a_row + 1 if answer.status_code == 503 and answer.json()["status"] == "draining" else 0
