"""Tests that need a CUDA device: `make test-gpu`. Elsewhere they skip with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="this machine shows no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
