"""The tree itself obeys its rules, and what must stay light loads no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree_rules import violations

ROOT = Path(__file__).resolve().parents[2]

TORCH_FREE = {
    "deployments.ingress": "deployments/ingress.py",
    "deployments.admission": "deployments/admission.py",
    "deployments.autoscaling": "deployments/autoscaling.py",
    "deployments.config": "deployments/config.py",
    "router.serve_router": "router/serve_router.py",
    "replica.engine": "replica/engine.py",
    "replica.service": "replica/service.py",
    "replica.scheduler.plan": "replica/scheduler/plan.py",
    "replica.model.api": "replica/model/api.py",
    "replica.model.fake": "replica/model/fake.py",
    "replica.model_card": "replica/model_card.py",
    "replica.text": "replica/text/__init__.py",
    "dashboards.publish": "dashboards/publish.py",
}


def test_tree_obeys_its_rules() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_loads_neither_torch_nor_transformers(module: str) -> None:
    if not (ROOT / TORCH_FREE[module]).exists():
        pytest.skip(f"{module} isn't written yet")
    script = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
