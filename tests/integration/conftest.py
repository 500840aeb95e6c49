"""One service for all tests of the HTTP path: two ingress processes, two replicas of a tiny model, and one more model
with little room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service import START_LIMIT_S, Service, free_port, running_service
from tests.integration.tiny_chat_model import save_tiny_chat_model

METRICS_PORTS = "9500-9549"
MAX_MODEL_LEN = 1024
MAX_BODY_BYTES = 200_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first also waits for the service's start."""
    for item in items:
        if "service" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(START_LIMIT_S + 120))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    common: dict[str, Any] = {"model": str(tiny_model), "download_dir": str(folder / "models"), "block_size": 16}
    # Strictly the same tokens in whatever company: what tests of continued answers compare.
    strict = {**common, "batch_invariant": True}
    roomy = {**strict, "served_model_name": "tiny", "replicas": 2, "max_model_len": MAX_MODEL_LEN, "num_blocks": 512}
    cramped = {
        **common,
        "served_model_name": "cramped",
        "route": "/cramped",
        "max_model_len": 256,
        "num_blocks": 32,
        "max_num_seqs": 1,
        "max_num_queued_seqs": 2,
    }
    config = {
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [
            {
                "name": "brimful",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": {
                    "models": [roomy, cramped],
                    "ingress": {"max_body_bytes": MAX_BODY_BYTES, "num_replicas": 2},
                    "metrics_port_range": METRICS_PORTS,
                    "drain_timeout_s": 5,
                },
            }
        ],
    }
    with running_service(config, folder) as running:
        yield running
