"""What people read about a running service."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from deployments.cli.status import show_status, summary
from deployments.config import AppConfig, ModelSettings, ServeConfig

LOAD = {
    "num_running": 3,
    "num_waiting": 2,
    "num_blocks_total": 100,
    "num_blocks_free": 50,
    "num_blocks_cached": 25,
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
}


def status_of(*loads: dict[str, Any]) -> dict[str, Any]:
    up = [{"replica_id": f"r{index}", "state": "ready", "load": load} for index, load in enumerate(loads)]
    return {"models": [{"name": "embedded", "route": "/", "replicas": 2, "up": up}]}


def test_the_table_shows_load_and_limits_of_every_replica() -> None:
    out = io.StringIO()
    show_status(status_of(LOAD, {**LOAD, "num_blocks_free": 75}), Console(file=out, width=120))
    rows = [line.split() for line in out.getvalue().splitlines() if line.strip().startswith("r")]
    assert "embedded on /: 2 of 2 replicas up" in out.getvalue()
    assert rows == [
        ["replica", "state", "running", "waiting", "KV", "free", "KV", "used", "max", "seqs", "max", "tokens"],
        ["r0", "ready", "3", "2", "75/100", "25%", "64", "512"],
        ["r1", "ready", "3", "2", "100/100", "0%", "64", "512"],
    ]


def test_the_summary_holds_the_url_a_curl_to_paste_and_the_sizes() -> None:
    config = ServeConfig(app=AppConfig(models=(ModelSettings(route="/small"),)))
    text = summary(status_of(LOAD, LOAD), "http://127.0.0.1:8000", config)
    assert "brimful is ready at http://127.0.0.1:8000" in text
    sizes = "2 replicas, each with 100 KV blocks of 16 tokens, 64 sequences and 512 tokens in a step"
    assert f"embedded: {sizes}" in text
    assert (
        "curl http://127.0.0.1:8000/small/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"model": "embedded", "messages": [{"role": "user", "content": "What is the capital of France?"}], """
        """"temperature": 0, "max_tokens": 32}'"""
    ) in text
