"""The tree itself obeys its rules, and what must stay light loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree_rules import violations

ROOT = Path(__file__).resolve().parents[2]

TORCH_FREE = (
    *("replica.scheduler.scheduler", "replica.model.api", "replica.model.fake", "replica.model_card"),
    *("replica.text.tokenizer", "replica.text.chat_encoding", "replica.engine", "replica.service"),
    *("router.policy", "router.serve_router", "bench", "dashboards.publish"),
    *("deployments.config", "deployments.admission", "deployments.ingress", "deployments.replica_deployment"),
    *("deployments.app", "deployments.cli.commands"),
)
"""Processes that import these never pay for torch: 360 MB and seconds of start-up."""

IMPORT_ALL = """
import importlib, json, sys
seen = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    seen[name] = [heavy for heavy in ("torch", "transformers") if heavy in sys.modules]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Which heavy packages a fresh interpreter has after each of the imports, in order: the first one is to blame."""
    command = [sys.executable, "-c", IMPORT_ALL, *TORCH_FREE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_tree_obeys_its_rules() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_loads_neither_torch_nor_transformers(loaded: dict[str, list[str]], module: str) -> None:
    assert loaded[module] == []
