"""A Ray Serve of a test module's own, without HTTP, and the settings that its replicas have in common."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray import serve

REPLICAS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0},
    "max_ongoing_requests": 1000,
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": 60,
}
"""Of a deployment whose open streams are waited for when it is taken down."""
ROUTER: dict[str, Any] = {
    "request_router_class": "router.serve_router.BrimfulRouter",
    "request_routing_stats_period_s": 0.2,
}


@contextmanager
def private_ray() -> Iterator[None]:
    """Nothing of it is left after the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        folder = tempfile.mkdtemp(prefix="rt-")
        try:
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                _temp_dir=folder,
                configure_logging=False,
                log_to_driver=False,
            )
            serve.start(http_options={"location": "NoServer"})
            yield
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
