"""The whole application on one screen: one replica deployment per model, one ingress deployment in front of them.

    client -> Serve proxy -> ingress -> (router) -> replica-<i> -> engine process

`serve deploy`, `serve run` and `brimful serve` all call `build`.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from deployments.config import AppConfig, ModelSettings
from deployments.ingress import Ingress
from deployments.machine import Machine
from deployments.replica_deployment import ReplicaDeployment
from replica.config import SchedulerConfig

APP_NAME = "brimful"
ROUTER = "router.serve_router.BrimfulRouter"

# Waiting requests belong in the engines, whose queues are bounded and ordered; Serve's own queue stays empty.
UNBOUNDED = 1_000_000
# A full or vanished replica is asked again soon: Serve's default backoff of up to 0.5 s would be idle time.
BACKOFF_S = {"initial_backoff_s": 0.01, "max_backoff_s": 0.05}
ROUTING_STATS_PERIOD_S = 1.0
# A request that the router heard nothing of for so long is taken for lost; the margin is for its prefill.
EXPIRE_AFTER_S = 300.0
EXPIRE_MARGIN_S = 240.0
# On top of the drain limit: closing the engine and its process.
SHUTDOWN_MARGIN_S = 5.0
# An ingress outlives its replicas, so that streams which the drain limit cuts off get their error event; such a stream
# may wait for another replica first.
INGRESS_MARGIN_S = 10.0


def build(args: dict[str, Any] | AppConfig) -> serve.Application:
    """The graph for `args` (the file's `applications[0].args`). Raises `SettingError`; needs an initialized Ray."""
    config = AppConfig.parse(args)
    machine = machine_of_cluster()
    replicas = [_replicas_of(model, index, config, machine) for index, model in enumerate(config.models)]
    ingress = serve.deployment(
        name="ingress",
        num_replicas=config.ingress.num_replicas,
        ray_actor_options={"num_cpus": 0},
        **_life_cycle(config, INGRESS_MARGIN_S + config.ingress.continuation_wait_s),
    )(serve.ingress()(Ingress))
    return ingress.bind(config, machine, *replicas)


def _replicas_of(model: ModelSettings, index: int, config: AppConfig, machine: Machine) -> serve.Application:
    model.check_unused(model.device_on(machine))
    engine = model.engine_config(machine, config.num_model_replicas)
    routing: dict[str, Any] = {
        "request_router_class": ROUTER,
        "request_router_kwargs": router_settings(model, config, engine.scheduler),
        "request_routing_stats_period_s": ROUTING_STATS_PERIOD_S,
        **BACKOFF_S,
    }
    deployment = serve.deployment(
        name=f"replica-{index}",
        num_replicas=model.replicas,
        ray_actor_options=model.ray_resources(machine, config.num_model_replicas),
        request_router_config=RequestRouterConfig(**routing),
        logging_config={"enable_access_log": False},  # a line for every poll would be most of a replica's log
        **_life_cycle(config, SHUTDOWN_MARGIN_S),
    )(ReplicaDeployment)
    return deployment.bind(engine, model.name, config.metrics_host, config.metrics_ports)


def router_settings(model: ModelSettings, config: AppConfig, bounds: SchedulerConfig) -> dict[str, Any]:
    """Fields of `RouterConfig` for the replicas of one model; `bounds` are their schedulers' settings."""
    return {
        "policy": config.router.policy,
        "weights": config.router_weights(model),
        "prefix_caching": model.enable_prefix_caching is not False,
        "max_num_queued_seqs": bounds.max_num_queued_seqs,
        "num_routers": config.ingress.num_replicas,
        # Nothing is heard of a request that waits, however long it may.
        "expire_after_s": max(EXPIRE_AFTER_S, bounds.queue_timeout_s + EXPIRE_MARGIN_S),
    }


def _life_cycle(config: AppConfig, shutdown_margin_s: float) -> dict[str, Any]:
    return {
        "max_ongoing_requests": UNBOUNDED,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": config.drain_timeout_s + shutdown_margin_s,
    }


def machine_of_cluster() -> Machine:
    """GPUs and cores of the running Ray cluster. A cluster whose GPU nodes only come with demand shows none: there,
    say `device: cuda`."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return Machine(has_gpu=resources.get("GPU", 0) > 0, node_cpus=tuple(nodes) or (1.0,))
