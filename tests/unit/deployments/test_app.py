"""What the graph derives for the router from settings that belong to others."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.app import router_settings
from deployments.config import AppConfig
from deployments.machine import Machine
from router.config import POLICIES, RouterConfig


def router_config(app: dict[str, Any] | None = None, **model: Any) -> RouterConfig:
    """As the router gets it: this also proves that it takes what the loader lets through."""
    config = AppConfig.parse({"models": [model], **(app or {})})
    settings = config.models[0]
    return RouterConfig(**router_settings(settings, config, settings.engine_config(Machine(), 1).scheduler))


def test_without_a_prefix_cache_the_router_does_not_look_at_prefixes() -> None:
    weights = {"cost_s": 1.0, "kv_headroom": 0.0, "queue_depth": 0.0, "prefix_affinity": 3.0}
    app = {"router": {"prefix_affinity": 3}}
    assert router_config(app).weights == weights
    assert router_config(app, enable_prefix_caching=True).weights == weights
    without = router_config(app, enable_prefix_caching=False)
    assert without.weights == {**weights, "prefix_affinity": 0.0}
    assert (router_config(app).uses_prefixes, without.uses_prefixes) == (True, False)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_chosen(policy: str) -> None:
    assert router_config({"router": {"policy": policy}}).policy == policy


@pytest.mark.parametrize("weight", [0, 100])
def test_the_router_takes_every_weight_that_the_loader_takes(weight: float) -> None:
    assert router_config({"router": {"kv_headroom": weight}}).weights["kv_headroom"] == weight


@pytest.mark.parametrize(("queue_timeout_s", "expire_after_s"), [(1, 300), (60, 300), (3600, 3840)])
def test_a_request_may_wait_as_long_as_its_queue_lets_it(queue_timeout_s: float, expire_after_s: float) -> None:
    assert router_config(queue_timeout_s=queue_timeout_s).expire_after_s == expire_after_s


def test_the_queue_bound_is_the_schedulers() -> None:
    assert router_config(max_num_queued_seqs=7).max_num_queued_seqs == 7


def test_the_router_is_told_how_many_ingress_processes_route() -> None:
    assert router_config().num_routers == 1
    assert router_config({"ingress": {"num_replicas": 3}}).num_routers == 3
