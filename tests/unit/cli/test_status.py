"""What people read about a running service."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deployments.cli.status import program_name, show_status, summary
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

STEP = {
    "num_tokens": 500,
    "token_budget": 512,
    "num_running": 3,
    "num_waiting_by_reason": {"budget": 0, "seqs": 0, "blocks": 1, "long_prefill": 1},
}


def status_of(*loads: dict[str, Any]) -> dict[str, Any]:
    up = [
        {"replica_id": f"r{index}", "state": "ready", "load": load, "last_step": STEP if index == 0 else None}
        for index, load in enumerate(loads)
    ]
    return {"models": [{"name": "embedded", "route": "/", "replicas": 2, "up": up}]}


def test_the_table_shows_load_limits_and_which_of_them_binds_for_every_replica() -> None:
    out = io.StringIO()
    show_status(status_of(LOAD, {**LOAD, "num_blocks_free": 75}), Console(file=out, width=160))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip().startswith("r")]
    assert "embedded on /: 2 of 2 replicas up" in out.getvalue()
    assert rows == [
        "replica state running waiting for tokens free used seqs tokens",
        "r0 ready 3 2 blocks 1, long_prefill 1 500 75/100 25% 64 512",
        "r1 ready 3 2 - - 100/100 0% 64 512",
    ]


def test_the_summary_holds_the_url_a_curl_to_paste_and_the_sizes() -> None:
    config = ServeConfig(app=AppConfig(models=(ModelSettings(route="/small"),)))
    text = summary(status_of(LOAD, LOAD), "http://127.0.0.1:8000", config, ".venv/bin/brimful")
    assert "\n  .venv/bin/brimful chat --url http://127.0.0.1:8000\n" in text
    assert "brimful is ready at http://127.0.0.1:8000" in text
    sizes = "2 replicas, each with 100 KV blocks of 16 tokens, 64 sequences and 512 tokens in a step"
    assert f"embedded: {sizes}" in text
    assert (
        "curl http://127.0.0.1:8000/small/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"model": "embedded", "messages": [{"role": "user", "content": "What is the capital of France?"}], """
        """"temperature": 0, "max_tokens": 32}'"""
    ) in text


def test_no_word_of_the_table_is_cut_at_80_columns() -> None:
    status = status_of({**LOAD, "num_blocks_total": 364, "num_blocks_free": 339})
    status["models"][0]["up"][0]["replica_id"] = "abcdefgh12"
    out = io.StringIO()
    show_status(status, Console(file=out, width=80))
    assert "…" not in out.getvalue()
    assert {"abcdefgh12", "ready", "364/364", "long_prefill", "64", "512", "tokens"} <= set(out.getvalue().split())


@pytest.mark.parametrize(
    ("started_as", "on_path", "name"),
    [
        ("/there/.venv/bin/brimful", None, ".venv/bin/brimful"),
        ("/there/.venv/bin/brimful", "/there/.venv/bin/brimful", "brimful"),
        ("/there/.venv/bin/brimful", "/elsewhere/bin/brimful", ".venv/bin/brimful"),
        ("/a b/bin/brimful", None, "'/a b/bin/brimful'"),
        ("/there/deployments/cli/__main__.py", None, f"{sys.executable} -m deployments.cli"),
    ],
)
def test_a_hint_names_the_program_so_that_a_shell_finds_it(started_as: str, on_path: str | None, name: str) -> None:
    assert program_name(started_as, on_path, Path("/there")) == name
